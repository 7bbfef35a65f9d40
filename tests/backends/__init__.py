"""Backends one by one: kernels, and what each makes of ops, against numpy, torch, ggml and the reference."""
