"""How layers with states are given to kernels: structures and sizes that their sources name as well."""

from __future__ import annotations

import numpy as np

from hetrun.backends.cuda.programs import Source

CONVOLUTION = Source("convolution")
MOST_TAPS = 8
SPAN = 8  # tokens of a thread of causal_conv
CONVOLVING = 128  # threads of its blocks
MOST_COLUMNS = 512
THREADS = 128  # of a block of delta_net
OF_LANE = 2  # rows that a lane has a part of
WIDE = 4

# A sequence's tokens, and the place of its state; tokens that a thread of causal_conv has.
PART = np.dtype([("first", np.int32), ("end", np.int32), ("read", np.uint64)])
SPAN_DTYPE = np.dtype([(name, np.int32) for name in ("first", "count", "part", "unused")])


def columns(k_dim: int) -> int:
    """Those that delta_net is compiled for: whole vectors of all lanes of a row."""
    whole = WIDE * _lanes(k_dim)
    return -(-k_dim // whole) * whole


def delta_net(k_dim: int) -> Source:
    """The delta rule for matrices with `k_dim` columns."""
    return Source("delta_net", (("COLUMNS", str(columns(k_dim))),))


def delta_rows(k_dim: int) -> int:
    """Rows of a block."""
    return THREADS // _lanes(k_dim) * OF_LANE


def delta_shared(k_dim: int) -> int:
    """Shared memory of a block: keys, queries, values, facts and places of some tokens."""
    tokens = 16 if columns(k_dim) <= 128 else 8
    return tokens * (4 * (2 * columns(k_dim) + delta_rows(k_dim) + WIDE) + 8)


def _lanes(k_dim: int) -> int:
    """Of a row."""
    return 8 if k_dim <= 128 else 16 if k_dim <= 256 else 32
