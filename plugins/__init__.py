"""Example plugins and optional extras that use only the public hooks."""
