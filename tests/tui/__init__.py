"""The terminal chat, driven by Textual's pilot."""
