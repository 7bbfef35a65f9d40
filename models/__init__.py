"""One file per model architecture, named as GGUF names it; shared blocks lie in blocks.py."""
