"""Products of many tokens in bytes, where results need not be exact."""
