"""llama.cpp's own API, beside what it shares with OpenAI's: completions in their native shape, and slots."""
