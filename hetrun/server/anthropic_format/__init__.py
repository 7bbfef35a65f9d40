"""Shapes of Anthropic's API that other parts of the server write, too: errors and models."""
