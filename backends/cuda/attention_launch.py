"""How attention is given to kernels: the structures and sizes that its source names as well."""

from __future__ import annotations

from ctypes import Structure, c_int, c_longlong, c_void_p

import numpy as np

SPLITS = 32  # parts of what a row sees
HEADS = 8  # query heads of a KV head that a block takes at once
THREADS = 128
LINES = KEYS = 64  # of a tile: rows times query heads of a KV head, and keys at a time

ROW = np.dtype([("q", np.int32), ("first", np.int32), ("length", np.int32), ("unused", np.int32)])
TILE = np.dtype([(name, np.int32) for name in ("q", "rows", "first", "length", "window")])


class Table(Structure):
    """Where keys and values lie."""

    _fields_ = (
        ("slabs", c_void_p),
        ("k_at", c_longlong),
        ("v_at", c_longlong),
        ("row_bytes", c_int),
    )


def few_shared(heads_of_kv: int, head: int) -> int:
    """Shared memory of a block of attend_few."""
    return 4 * (THREADS // 32) * min(HEADS, heads_of_kv) * (2 + head)


def many_shared(head: int) -> int:
    """Shared memory of a block of attend_many: three tiles of halves, scores and shares."""
    return 3 * 2 * LINES * (head + 8) + (4 + 2) * LINES * (KEYS + 8)


def partial_bytes(rows: int, n_heads: int, head: int) -> int:
    """What the parts of some rows take."""
    return 4 * rows * n_heads * SPLITS * (2 + head)
