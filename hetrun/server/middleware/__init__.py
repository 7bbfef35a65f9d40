"""What every request passes before its endpoint: keys, limits, turns, counters, timeouts."""
