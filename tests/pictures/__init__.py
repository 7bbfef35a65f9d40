"""Pictures as they are decoded, and the process that does it."""
