"""Readers of model files. Each checks a file to its last extent before it believes a word of it."""
