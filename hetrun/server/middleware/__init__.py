"""Middleware that runs before every endpoint: keys, limits, turns, counters, timeouts."""
