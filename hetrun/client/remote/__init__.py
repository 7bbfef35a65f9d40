"""The APIs in which a running server is asked: OpenAI's, Ollama's, Anthropic's."""
