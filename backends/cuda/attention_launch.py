"""How attention is given to kernels: the structures and sizes that its source names as well."""

from __future__ import annotations

from ctypes import Structure, c_int, c_longlong, c_void_p

import numpy as np

MOST_SPLITS = 128  # parts of what a row sees
TILED = 256  # the widest heads that tiles take
WIDEST = 640  # the widest that there are kernels for
THREADS = 128
LINES = 64  # of a tile: rows times query heads of a KV head

ROW = np.dtype([("q", np.int32), ("first", np.int32), ("length", np.int32), ("unused", np.int32)])
TILE = np.dtype([(name, np.int32) for name in ("q", "rows", "first", "length", "window")])


def heads_at_once(head: int) -> int:
    """Query heads of a KV head that a block takes at once."""
    return 8 if head <= TILED else 2


class KvTableStruct(Structure):
    """Where keys and values lie."""

    _fields_ = (
        ("slabs", c_void_p),
        ("k_at", c_longlong),
        ("v_at", c_longlong),
        ("row_bytes", c_int),
    )


class QueryRotation(Structure):
    """Queries that are turned while keys and values are stored."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "turns", "token_of")),
        ("rows", c_int),
        ("heads", c_int),
    )


class AttentionResults(Structure):
    """Where results go, and what joins the parts of them."""

    _fields_ = tuple((name, c_void_p) for name in ("y", "sinks", "in_bytes", "ended"))


def groups_of(n_heads: int, n_kv_heads: int, head: int) -> int:
    """Groups of the query heads of a KV head: a block takes one of them at a time."""
    return -(-n_heads // n_kv_heads // heads_at_once(head))


def splits(processors: int, n_heads: int, n_kv_heads: int, head: int) -> int:
    """Parts of what a row sees, so that those of one row have all processors at work: as many blocks as each
    has room for. The number of rows does not count: it must not change what a row becomes."""
    at_once = 4 if head <= 64 else 2 if head <= TILED else 1
    groups = n_kv_heads * groups_of(n_heads, n_kv_heads, head)
    return max(1, min(MOST_SPLITS, processors * at_once // groups))


def few_shared(heads_of_kv: int, head: int, splits: int) -> int:
    """Shared memory of a block of attend_few: what its warps have made, then weights of parts, and queries of
    wide heads."""
    heads = min(heads_at_once(head), heads_of_kv)
    made = 4 * heads * max(THREADS // 32 * (2 + head), splits)
    return made if head <= 128 or head > TILED else -(-made // 16) * 16 + 32 * head


def many_shared(head: int) -> int:
    """Shared memory of a block of attend_many: keys and values twice, in halves; of wide heads queries."""
    keys, queries = 32 if head > 64 else 64, LINES * (head + 8) if head > 128 else 8
    return 2 * (2 * 2 * keys * (head + 8) + queries)


def partial_bytes(rows: int, n_heads: int, head: int, splits: int) -> int:
    """What the parts of some rows take."""
    return 4 * rows * n_heads * splits * (head + 4)
