"""Text to tokens and back; messages to text; answers to text, reasoning and tool calls."""
