"""Prompts with pictures: marks in texts, tokens that stand for rows, and the encoder at work."""
