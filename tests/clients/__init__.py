"""Clients as their authors publish them, against a server as users have it: `python -m tests.clients`."""
