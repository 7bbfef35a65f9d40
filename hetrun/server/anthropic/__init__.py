"""Anthropic's API: `/v1/messages`, its input and output."""
