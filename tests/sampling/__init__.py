"""Samplers and grammars, beside those of llama.cpp and on real vocabularies."""
