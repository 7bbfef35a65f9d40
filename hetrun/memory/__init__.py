"""Bytes that are held: the ledger of `--ram`, and the KV cache with its prefix cache."""
