"""Chat templates, their process, and calls of tools that a grammar forces."""
