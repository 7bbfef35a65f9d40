"""The KV cache: its rows, who has them, and prompts that are found in it again."""
