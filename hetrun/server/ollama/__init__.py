"""Ollama's API under `/api`: chat and generation, embeddings, the list of models, downloads."""
