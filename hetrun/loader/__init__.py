"""Model files: names resolved, headers checked, settings and weights in GGUF's terms, bytes read."""
