"""Real models, and the installed command in a clean environment."""
