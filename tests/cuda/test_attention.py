"""The kernels of attention on the emulator, against numpy: few rows, many rows, rows that are written."""

from __future__ import annotations

from ctypes import c_longlong, c_void_p
from dataclasses import dataclass

import numpy as np
import pytest

from hetrun.backends.cuda import attention_launch
from hetrun.backends.cuda.attention_launch import (
    LINES,
    MOST_SPLITS,
    ROW,
    THREADS,
    TILE,
    AttentionResults,
    KvTableStruct,
    QueryRotation,
)
from hetrun.backends.cuda.matmul_launch import int8_row
from hetrun.backends.cuda.programs import Source
from hetrun.graph.quant import by_name
from tests.cuda.emulated.kernels import needs_compiler, run
from tests.support.tiers import exhaustive, first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
SLAB = 32


@dataclass
class Cache:
    """Rows of one layer in slabs that lie anywhere, beside rows of another layer."""

    kv_type: str
    heads: int
    head: int
    rows: int

    def __post_init__(self) -> None:
        quant, rng = by_name(self.kv_type), np.random.default_rng(3)
        self.width = quant.row_bytes(self.heads * self.head)
        self.k_at, self.v_at = 2 * SLAB * self.width, 3 * SLAB * self.width
        blocks = -(-self.rows // SLAB)
        self.slabs = np.zeros((blocks, 4 * SLAB * self.width), np.uint8)
        order = rng.permutation(blocks)
        self.table = (self.slabs.ctypes.data + order * self.slabs.shape[1]).astype(np.uint64)
        self.order = order
        shape = (2, self.rows, self.heads * self.head)
        self.numbers = rng.standard_normal(shape, dtype=np.float32)

    def argument(self) -> KvTableStruct:
        return KvTableStruct(self.table.ctypes.data, self.k_at, self.v_at, self.width)

    def write(self, rows: np.ndarray) -> None:
        """By the kernel."""
        k, v = (np.ascontiguousarray(x[rows]) for x in self.numbers)
        jobs = 2 * self.heads * len(rows)
        run(self.source, "write_rows", (-(-jobs // 4),), 128, k, v, rows.astype(np.int64), self.argument(),
            self.heads, len(rows))  # fmt: skip

    @property
    def source(self) -> Source:
        return Source("attention", (("KV", self.kv_type), ("HEAD", str(self.head))))

    def stored(self, which: int) -> np.ndarray:
        """What lies in the slabs, as bytes."""
        begin = (self.k_at, self.v_at)[which]
        raw = self.slabs[self.order][:, begin : begin + SLAB * self.width].reshape(-1, self.width)
        return raw[: self.rows]

    def read(self, which: int) -> np.ndarray:
        flat = by_name(self.kv_type).dequantise(
            np.ascontiguousarray(self.stored(which)), self.heads * self.head
        )
        return flat.reshape(self.rows, self.heads, self.head)


def expected(
    q: np.ndarray,
    cache: Cache,
    seen: list[slice],
    scale: float,
    softcap: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    k, v = (cache.read(i).astype(np.float64) for i in (0, 1))
    group = q.shape[1] // cache.heads
    out = np.zeros(q.shape)
    for i, rows in enumerate(seen):
        for h in range(q.shape[1]):
            scores = k[rows, h // group] @ q[i, h].astype(np.float64) * scale
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            p = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(sinks[h] - scores.max())
            out[i, h] = p @ v[rows, h // group] / (p.sum() + sink)
    return out


def close(found: np.ndarray, right: np.ndarray, limit: float) -> None:
    error = np.square(found - right).sum() / np.square(right).sum()
    assert error <= limit, f"{error:.2g} is more than {limit}"


@pytest.mark.parametrize("kv_type", ["F32", "F16", "BF16", "Q8_0"])
def test_rows_are_stored_as_everybody_stores_them(kv_type: str) -> None:
    cache = Cache(kv_type, 3, 96 if kv_type == "BF16" else 64, 70)
    rows = np.random.default_rng(0).permutation(70)[:50]
    cache.numbers[:, rows[0]] = 0
    cache.write(rows)
    for which in (0, 1):
        right = by_name(kv_type).quantise(cache.numbers[which][rows])
        assert (cache.stored(which)[rows] == right).all()
    left = np.setdiff1d(np.arange(70), rows)
    assert not cache.stored(0)[left].any()
    untouched = cache.slabs[:, : 2 * SLAB * cache.width]
    assert not untouched.any()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
@pytest.mark.parametrize("wanted", [None, [4, 1]], ids=["all rows", "some rows"])
def test_what_is_turned_on_its_way_is_what_was_turned_before(
    kv_type: str, interleaved: int, wanted: list[int] | None
) -> None:
    """Bit by bit: queries, and what is stored of keys and values."""
    heads, n_heads, head, n, n_rot = 3, 6, 64, 6, 48
    rng, turning = np.random.default_rng(5), n_rot // 2
    turns = rng.standard_normal((n, turning, 2), dtype=np.float32)
    k, v = (rng.standard_normal((n, heads, head), dtype=np.float32) for _ in range(2))
    whose = list(range(n)) if wanted is None else wanted
    q = rng.standard_normal((len(whose), n_heads, head), dtype=np.float32)
    token_of = np.array(whose, np.int32)

    def rotated(x: np.ndarray, of: np.ndarray | c_void_p) -> np.ndarray:
        y, small = np.zeros_like(x), Source("small")
        run(small, "rope", (2,), 64, x, turns, of, y, len(x), x.shape[1], head, n_rot, interleaved)
        return y

    one, other = (Cache(kv_type, heads, head, 70) for _ in range(2))
    slots = rng.permutation(70)[:n].astype(np.int64)
    one.numbers[0][slots] = rotated(k, c_void_p(0)).reshape(n, -1)
    one.numbers[1][slots] = v.reshape(n, -1)
    one.write(slots)
    y = np.full(q.shape, np.nan, np.float32)
    whose_turn = None if wanted is None else token_of
    queries = QueryRotation(q.ctypes.data, y.ctypes.data, turns.ctypes.data,
                      None if whose_turn is None else whose_turn.ctypes.data, len(q), n_heads)  # fmt: skip
    jobs = 2 * heads * n + n_heads * len(q)
    run(other.source, "turn_and_write", (-(-jobs // 4),), 128, queries, k, turns, v, slots, other.argument(),
        heads, n, turning, interleaved, shared=4 * 4 * head)  # fmt: skip
    assert (other.slabs == one.slabs).all()
    assert (y == rotated(q, token_of)).all()


def test_a_result_is_left_in_bytes_beside_floats() -> None:
    views = [(0, 600), (17, 1)]
    cache = Cache("F16", 3, 64, 700)
    cache.write(np.arange(700))
    q = np.random.default_rng(1).standard_normal((2, 9, 64), dtype=np.float32)
    cols = 9 * 64
    found, right = np.zeros((2, int8_row(cols)), np.uint8), np.zeros((2, int8_row(cols)), np.uint8)
    y = few(cache, q, views, 0.2, 0.0, in_bytes=found)
    run(Source("small"), "round_int8", (1,), 64, y, right, cols, c_longlong(y.size))
    assert right.any()
    assert (found == right).all()


CASES = [
    # KV type, query heads, KV heads, size of heads, (first row, keys) of each query row
    ("F32", 4, 2, 32, [(0, 1), (3, 31), (40, 32), (5, 33)]),
    ("F16", 9, 3, 64, [(0, 600), (17, 1)]),
    ("BF16", 8, 1, 96, [(64, 40), (0, 200)]),
    ("Q8_0", 4, 2, 64, [(2, 333), (2, 334), (2, 335)]),
    ("F16", 12, 1, 32, [(0, 3000)]),
    ("F16", 4, 4, 128, [(0, 1000)]),
    ("F32", 2, 1, 256, [(0, 70), (0, 71)]),
    ("F16", 16, 2, 256, [(0, 300), (31, 17)]),  # queries lie in shared memory
    ("F16", 24, 2, 96, [(3, 100), (0, 1)]),  # more query heads than a block takes at once, and half a step
    ("F16", 5, 1, 576, [(0, 90), (3, 40)]),  # latent rows: more of them than a block takes, in registers
    ("Q8_0", 2, 1, 512, [(0, 40)]),
    ("F16", 4, 2, 80, [(0, 200)]),  # not whole steps: as other types
]
OFTEN = 5  # of them are tried by `make test`: a program for each type and size of heads has to be built


def few(
    cache: Cache,
    q: np.ndarray,
    views: list[tuple[int, int]],
    scale: float,
    softcap: float,
    seed: int = 1,
    sinks: np.ndarray | None = None,
    in_bytes: np.ndarray | None = None,
    splits: int = 32,
) -> np.ndarray:
    n, n_heads = len(q), q.shape[1]
    rows = np.array([(i, first, length, 0) for i, (first, length) in enumerate(views)], ROW).view(np.uint8)
    nbytes = attention_launch.partial_bytes(n, n_heads, cache.head, splits)
    partial, y = np.full(nbytes // 4, np.nan, np.float32), np.full(q.shape, np.nan, np.float32)
    groups = attention_launch.groups_of(n_heads, cache.heads, cache.head)
    ended = np.zeros((n, cache.heads, groups), np.int32)
    joined = AttentionResults(
        *(None if array is None else array.ctypes.data for array in (y, sinks, in_bytes, ended))
    )
    grid = n * splits, cache.heads, groups
    shared = attention_launch.few_shared(n_heads // cache.heads, cache.head, splits)
    factors = float(scale), float(softcap)
    run(cache.source, "attend_few", grid, THREADS, q, rows, cache.argument(), partial, *factors,
        n_heads, cache.heads, splits, joined, shared=shared, seed=seed)  # fmt: skip
    assert not ended.any(), "the next attention counts from zero again"
    return y


@pytest.mark.parametrize("case", first(CASES, OFTEN), ids=lambda case: "-".join(map(str, case[:-1])))
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_few_rows(case: tuple[str, int, int, int, list[tuple[int, int]]], softcap: float) -> None:
    kv_type, heads, kv_heads, head, views = case
    cache = Cache(kv_type, kv_heads, head, max(a + n for a, n in views))
    cache.write(np.arange(cache.rows))
    q = np.random.default_rng(1).standard_normal((len(views), heads, head), dtype=np.float32)
    found = few(cache, q, views, head**-0.5, softcap)
    close(found, expected(q, cache, [slice(a, a + n) for a, n in views], head**-0.5, softcap), 1e-12)
    for i, view in enumerate(views):
        assert (few(cache, q[i : i + 1].copy(), [view], head**-0.5, softcap, seed=i + 2)[0] == found[i]).all()


@pytest.mark.parametrize("splits", [1, 7, 33, MOST_SPLITS])
def test_rows_are_cut_into_any_number_of_parts(splits: int) -> None:
    views = [(0, 600), (17, 1), (3, 3000)]
    cache = Cache("F16", 2, 64, 3003)
    cache.write(np.arange(cache.rows))
    q = np.random.default_rng(1).standard_normal((3, 6, 64), dtype=np.float32)
    right = expected(q, cache, [slice(a, a + n) for a, n in views], 0.125, 0.0)
    close(few(cache, q, views, 0.125, 0.0, splits=splits), right, 1e-12)


def test_parts_of_a_row_are_as_many_as_a_device_computes_at_once() -> None:
    of_8b = 32, 8, 128  # query heads, KV heads, size of a head: two blocks to a processor
    assert attention_launch.splits(132, *of_8b) * 8 == 2 * 132
    assert attention_launch.splits(28, *of_8b) == 7
    assert attention_launch.splits(128, 16, 1, 128) == MOST_SPLITS  # two groups of query heads
    assert attention_launch.splits(4, 128, 64, 576) == 1


def _or_null(array: np.ndarray | None) -> np.ndarray | c_void_p:
    return c_void_p(0) if array is None else array


def test_sinks_take_their_share_of_few_rows() -> None:
    kv_type, heads, kv_heads, head, views = CASES[1]
    cache = Cache(kv_type, kv_heads, head, max(a + n for a, n in views))
    cache.write(np.arange(cache.rows))
    rng = np.random.default_rng(1)
    q = rng.standard_normal((len(views), heads, head), dtype=np.float32)
    sinks = 2 * rng.standard_normal(heads, dtype=np.float32)
    found = few(cache, q, views, head**-0.5, 0.0, sinks=sinks)
    right = expected(q, cache, [slice(a, a + n) for a, n in views], head**-0.5, 0.0, sinks)
    close(found, right, 1e-12)


SHAPES = [(4, 2, 32), (9, 3, 64), (8, 1, 128), (2, 2, 96), (1, 1, 256), (4, 1, 192)]
# In `make test` sizes of heads take turns at the types, one of them at none.
MANY = [
    pytest.param(*shape, kv_type, marks=[exhaustive] if (i + j) % 2 or shape[2] == 96 else [])
    for i, shape in enumerate(SHAPES)
    for j, kv_type in enumerate(["Q8_0", "F16"])
]


@pytest.mark.parametrize(("heads", "kv_heads", "head", "kv_type"), MANY)
@pytest.mark.parametrize(("before", "rows", "window", "softcap", "sunk"), [
    (0, 64, 0, 0.0, False), (100, 37, 0, 0.0, True), (0, 70, 20, 0.0, True), (130, 5, 40, 1.5, False),
])  # fmt: skip
def test_many_rows(
    heads: int,
    kv_heads: int,
    head: int,
    kv_type: str,
    before: int,
    rows: int,
    window: int,
    softcap: float,
    sunk: bool,
) -> None:
    cache = Cache(kv_type, kv_heads, head, before + rows)
    cache.write(np.arange(cache.rows))
    q = 3 * np.random.default_rng(1).standard_normal((rows, heads, head), dtype=np.float32)
    sinks = np.linspace(-2, 4, heads, dtype=np.float32) if sunk else None
    most = LINES * kv_heads // heads
    ends = [before + i + 1 for i in range(rows)]
    begins = [max(0, end - window) if window else 0 for end in ends]
    tiles = []
    for a in range(0, rows, most):
        tiles.append((a, min(most, rows - a), begins[a], ends[a] - begins[a], window))
    y = np.full(q.shape, np.nan, np.float32)
    tiles_source = Source("attention_tiles", cache.source.defines)
    run(tiles_source, "attend_many", (len(tiles), kv_heads), THREADS, q, np.array(tiles, TILE).view(np.uint8),
        cache.argument(), y, _or_null(sinks), float(head**-0.5), float(softcap), heads, kv_heads,
        shared=attention_launch.many_shared(head))  # fmt: skip
    seen = [slice(a, b) for a, b in zip(begins, ends, strict=True)]
    close(y, expected(q, cache, seen, head**-0.5, softcap, sinks), 3e-6)
