"""Processes that read what strangers wrote and may be killed at any time: outside (`child`) and inside."""
