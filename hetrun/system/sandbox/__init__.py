"""Processes that read what strangers wrote and may be killed at any time, from outside (`child`) and inside."""
