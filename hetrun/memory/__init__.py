"""Bytes that are held: the ledger of `--ram`, and the KV cache with its prefix cache.

`ledger.Books` is what may be taken and what is taken, `breakdown` the table that people read, `kv/` the
cache.
"""
