"""The engine with a scripted model and a byte tokenizer."""
