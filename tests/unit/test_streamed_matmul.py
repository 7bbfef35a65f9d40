"""Products by weights that come in pieces meanwhile: the bits are those of the whole weight."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backends.llamacpp.kernels import matmul as module
from hetrun.backends.llamacpp.kernels.matmul import (
    PLAIN,
    ROWS,
    SWIGLU,
    PartialWeightStruct,
    ProductStruct,
    RowLookup,
)
from hetrun.graph.quant import Bytes, Floats
from tests.unit.test_matmul_kernels import (
    LEVELS,
    SCALES,
    STEPS,
    Weight,
    activations,
    aligned,
    library,
    weight,
)

pytestmark = pytest.mark.skipif(module.library() is None, reason="hetrun was installed without a C compiler")
PIECE = np.dtype([("first", np.int64), ("groups", np.int64), ("starts", np.int64, 2)])
VOID, I64 = ctypes.c_void_p, ctypes.c_int64
WAIT = ctypes.CFUNCTYPE(VOID, VOID, I64)
RELEASE = ctypes.CFUNCTYPE(None, VOID, I64)
READ = ctypes.CFUNCTYPE(ctypes.c_int, VOID, I64, I64, I64, VOID)


class Struct(ctypes.Structure):
    """struct supply"""

    _fields_ = (("ring", VOID), ("wait", WAIT), ("release", RELEASE), ("read", READ))


class Source:
    """Gives pieces from memory, and counts."""

    def __init__(self, pieces: dict[int, Bytes], table: Bytes, fails_at: int | None = None) -> None:
        self.pieces, self.table, self.fails_at = pieces, table, fails_at
        self.released: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.made = Struct(None, WAIT(self._wait), RELEASE(self._release), READ(self._read))

    def _wait(self, ring: int, rank: int) -> int | None:
        if self.fails_at is not None and rank >= self.fails_at:
            return None
        assert not self.released[rank]
        return self.pieces[rank].ctypes.data

    def _release(self, ring: int, rank: int) -> None:
        with self._lock:
            self.released[rank] += 1

    def _read(self, ring: int, file: int, offset: int, nbytes: int, out: int) -> int:
        ctypes.memmove(out, self.table.ctypes.data + offset, nbytes)
        return 0


@dataclass(frozen=True)
class Pieces:
    """A weight's pieces: the table of them, which are in memory, what the others hold."""

    table: np.ndarray
    ranks: np.ndarray
    stored: dict[int, Bytes]
    packed: Bytes  # with nothing where pieces are missing


def cut(w: Weight, halves: int, sizes: list[int], missing: list[bool], gap: int) -> Pieces:
    """Pieces of `sizes` groups, over and over."""
    rows = w.rows // halves
    groups, first = -(-rows // ROWS), 0
    parts: list[tuple[int, int]] = []
    while first < groups:
        parts.append((first, min(sizes[len(parts) % len(sizes)], groups - first)))
        first += parts[-1][1]
    table, ranks, packed = np.zeros(len(parts), PIECE), [], w.packed.copy()
    stored: dict[int, Bytes] = {}
    group = len(w.packed) // (groups * halves)
    for i, (first, n) in enumerate(parts):
        runs = [
            w.stored[half * rows :][first * ROWS : min((first + n) * ROWS, rows)] for half in range(halves)
        ]
        table[i] = first, n, [gap, 2 * gap + runs[0].nbytes]
        if not missing[i % len(missing)]:
            ranks.append(-1)
            continue
        space = np.full(gap, 77, np.uint8)
        stored[len(stored)] = np.concatenate([x for run in runs for x in (space, run.reshape(-1))])
        ranks.append(len(stored) - 1)
        for half in range(halves):
            at = (half * groups + first) * group
            packed[at : at + n * group] = 255
    return Pieces(table, np.array(ranks, np.int32), stored, packed)


def multiplied(
    w: Weight,
    x: Floats,
    level: int,
    threads: int,
    activation: int,
    pieces: Pieces | None,
    source: Source | None,
) -> Floats:
    """By the library, with this many threads."""
    lib, halves = library(), 1 if activation == PLAIN else 2
    n, width = len(x), w.rows // halves
    out = np.full((n, width), np.nan, np.float32)
    counters = np.zeros(module.COUNTERS, np.int32)
    kind = w.quant.ggml_id
    size = lib.scratch(kind, n, w.cols) + lib.unit(kind, w.cols, halves)
    scratch, shared = aligned(size * threads), aligned(lib.shared(kind, n, w.cols))
    made = ProductStruct(
        weights=(pieces.packed if pieces else w.packed).ctypes.data,
        type=kind, rows=w.rows, cols=w.cols, x=x.ctypes.data, out=out.ctypes.data,
        n=n, x_stride=w.cols, out_stride=width, activation=activation, scratch=scratch.ctypes.data,
        scratch_size=size, slots=threads, counters=counters.ctypes.data, level=level,
        shared=shared.ctypes.data,
    )  # fmt: skip
    if pieces and source:
        taken = np.zeros(len(pieces.table), np.int32)
        partial = PartialWeightStruct(
            supply=ctypes.addressof(source.made), streamed=len(pieces.stored), pieces=len(pieces.table),
            piece=pieces.table.ctypes.data, rank=pieces.ranks.ctypes.data, taken=taken.ctypes.data,
        )  # fmt: skip
        made.partial = ctypes.addressof(partial)
    # Not by ctypes.PyDLL: threads wait for each other, and must not hold the interpreter meanwhile.
    call = ctypes.CFUNCTYPE(None, VOID, ctypes.c_int, ctypes.c_int, VOID)(lib.product_address)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: call(None, i, threads, ctypes.addressof(made)), range(threads)))
    assert not counters.any()
    if pieces and source and source.fails_at is None:
        assert not taken.any()
    return out


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_bits_of_the_whole_weight(data: st.DataObject) -> None:
    """Whatever is missing, for every type, with and without a gate, for few rows and for many."""
    name = data.draw(st.sampled_from(sorted(SCALES)))
    level = data.draw(st.sampled_from(LEVELS))
    gate = data.draw(st.booleans())
    rows = data.draw(st.integers(1, 6)) * 32 if gate else data.draw(st.integers(1, 200))
    n = data.draw(st.integers(1, 70) | st.just(300))
    w = weight(name, rows, STEPS[name] * data.draw(st.sampled_from([1, 2, 5])))
    x = activations(n, w.cols)
    activation, threads = SWIGLU if gate else PLAIN, data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    missing = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
    pieces = cut(w, 2 if gate else 1, sizes, missing, data.draw(st.integers(0, 70)))
    source = Source(pieces.stored, w.stored)
    whole = multiplied(w, x, level, threads, activation, None, None)
    assert np.array_equal(multiplied(w, x, level, threads, activation, pieces, source), whole)
    assert source.released == Counter(dict.fromkeys(pieces.stored, 1))


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
@pytest.mark.parametrize("n", [1, 64, 70])
def test_large_rows_share_their_roundings(n: int, name: str) -> None:
    """More rows than a thread has memory for, and units of less than a piece."""
    w = weight(name, 256, 4096)
    x = activations(n, w.cols)
    pieces = cut(w, 1, [9], [True, False], 5)
    source = Source(pieces.stored, w.stored)
    whole = multiplied(w, x, LEVELS[-1], 2, PLAIN, None, None)
    assert np.array_equal(multiplied(w, x, LEVELS[-1], 2, PLAIN, pieces, source), whole)
    assert set(source.released.values()) == {1}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "cols"), [("Q4_0", 4096), ("Q4_0", 8192), ("Q4_0", 14336), ("BF16", 14336)])
def test_wide_rows_are_multiplied_in_the_layout_they_were_rounded_in(
    name: str, cols: int, level: int
) -> None:
    """Rounding is cut into other parts than multiplying; the last rows must not depend on either."""
    w = weight(name, 32, cols)
    pieces = cut(w, 1, [1], [True], 0)
    x = activations(130, cols)
    expected = multiplied(w, x, level, 2, PLAIN, None, None)
    for n in (7, 8, 13, 24, 29, 41, 43, 63, 107, 109, 130):
        source = Source(pieces.stored, w.stored)
        found = multiplied(w, x[:n], level, 2, PLAIN, pieces, source)
        assert np.array_equal(found, expected[:n]), n


def test_a_piece_that_does_not_come_ends_the_product() -> None:
    """All threads come back."""
    w = weight("Q4_0", 512, 64)
    pieces = cut(w, 1, [2], [True], 0)
    source = Source(pieces.stored, w.stored, fails_at=3)
    multiplied(w, activations(2, 64), LEVELS[-1], 3, PLAIN, pieces, source)
    assert set(source.released) <= {0, 1, 2}


@pytest.mark.parametrize("name", sorted(SCALES))
def test_rows_are_looked_up_in_a_file(name: str) -> None:
    """As from memory, also where a row is read in several parts."""
    lib, w = library(), weight(name, 40, STEPS[name] * 80)
    ids = np.array([3, 39, 0, 3], np.int32)
    source = Source({}, w.stored)
    out = np.zeros((2, len(ids), w.cols), np.float32)
    for i in range(2):
        made = RowLookup(
            weights=w.packed.ctypes.data if i == 0 else None, type=w.quant.ggml_id, rows=w.rows, cols=w.cols,
            ids=ids.ctypes.data, out=out[i].ctypes.data, n=len(ids), out_stride=w.cols, level=LEVELS[-1],
        )  # fmt: skip
        if i:
            made.supply = ctypes.addressof(source.made)
        for thread in range(2):
            lib.look_up(None, thread, 2, ctypes.addressof(made))
    assert np.array_equal(out[0], out[1])
