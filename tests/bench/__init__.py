"""`hetrun bench` and `hetrun eval`: what is measured, and how it is told."""
