"""Serves requests: one thread, a queue, a scheduler, admission, speculation."""
