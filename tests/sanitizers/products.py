"""products.c: packing, products with all that is fused with them, by experts, by pieces, and rows as
floats."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from hetrun.backends.llamacpp.kernels.matmul import (
    COUNTERS,
    LEVELS,
    PLAIN,
    PORTABLE,
    ROWS,
    MatmulLibrary,
    PartialWeightStruct,
    ProductStruct,
    RowLookup,
)
from hetrun.graph.quant import Bytes, QuantType, by_name
from tests.sanitizers.inputs import Input, node, same, spread
from tests.sanitizers.memory import LINE, Array
from tests.unit import test_expert_kernels as experts, test_matmul_kernels as kernels
from tests.unit.test_matmul_kernels import EXACT, SCALES, STEPS, apart, library, rounded
from tests.unit.test_streamed_matmul import Source, cut

NAMES = sorted(SCALES)


@cache
def plain(folder: Path) -> MatmulLibrary:
    """The ordinary library."""
    path = str(folder / "hetrun" / "backends" / "llamacpp" / "kernels" / "products.so")
    return MatmulLibrary(ctypes.PyDLL(path), ctypes.CDLL(path))


def levels(case: Input) -> list[int]:
    """The library's numbers of the instructions that may be used."""
    return [level for level in library().levels if LEVELS[level] in case.levels]


def blocks(case: Input, quant: QuantType, name: str, rows: int, cols: int) -> Bytes:
    """Any bits, in one of eight inputs also as scales, which then are no numbers at times."""
    found = case.numbers.integers(0, 256, (rows, quant.row_bytes(cols)), np.uint8)
    if name in EXACT:
        floats = case.numbers.uniform(-0.1, 0.1, (rows, cols)).astype(np.float32)
        return found if case.chance(8) else quant.quantise(floats)
    if case.chance(8):
        return found
    each = found.reshape(-1, quant.block_bytes)
    for at in SCALES[name]:
        scales = case.numbers.uniform(-0.01, 0.01, (len(each), 1)).astype(np.float16)
        each[:, at : at + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        each[:, 0] = case.numbers.integers(117, 121, len(each))
    return found


def activations(case: Input, n: int, cols: int) -> Array:
    """Rows of several sizes; in one of eight inputs with numbers that are none."""
    rng = case.numbers
    x = rng.standard_normal((n, cols), dtype=np.float32) * np.exp(
        3 * rng.standard_normal((n, 1), dtype=np.float32)
    )
    if case.chance(8):
        strange = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 3e38, 1e-45, 1e-38], np.float32)
        at = rng.integers(0, x.size, 1 + x.size // 50)
        x.reshape(-1)[at] = rng.choice(strange, len(at))
    return x.astype(np.float32)


@dataclass
class Factors:
    """A product's weight and all that goes into it, in ordinary memory."""

    name: str
    rows: int
    cols: int
    stored: Bytes
    activation: int
    exact: bool
    x: Array
    fused: dict[str, Array]
    threads: int
    slots: int
    gaps: tuple[int, int]

    @property
    def quant(self) -> QuantType:
        return by_name(self.name)

    @property
    def width(self) -> int:
        return self.rows if self.activation == PLAIN else self.rows // 2


def factors(case: Input) -> Factors:
    """Mostly small ones, and now and then as many rows as are taken in tiles, or columns in parts."""
    rng, name = case.rng, case.rng.choice(NAMES)
    activation = rng.choice((PLAIN, PLAIN, 1, 2, 3, 4))
    cols = STEPS[name] * (rng.choice((8, 16, 33)) if case.chance(12) else rng.randint(1, 4))
    n = rng.choice((40, 63, 64, 65, 79, 130, 203)) if case.chance(12) else rng.randint(1, 19)
    rows = rng.randint(1, 70) if activation == PLAIN else 2 * ROWS * rng.randint(1, 3)
    width = rows if activation == PLAIN else rows // 2
    sizes = {"gain": (cols,), "bias": (rows,), "residual": (n, width)}
    fused = {
        key: case.numbers.standard_normal(size, dtype=np.float32)
        for key, size in sizes.items()
        if case.chance(3)
    }
    threads = rng.randint(1, 4)
    return Factors(
        name=name, rows=rows, cols=cols, stored=blocks(case, by_name(name), name, rows, cols),
        activation=activation, exact=case.chance(3), x=activations(case, n, cols), fused=fused,
        threads=threads + rng.choice((0, 0, 1)), slots=threads,
        gaps=(rng.randint(0, 5), rng.randint(0, 5)),
    )  # fmt: skip


def multiplied(
    case: Input, f: Factors, packed: Array, level: int, pieces: PartialWeightStruct | None
) -> Array:
    """By the library under test, everything of it in memory that ends where it does."""
    lib, memory, kind, n = library(), case.memory, f.quant.ggml_id, len(f.x)
    x, out = spread(case, n, f.cols, f.gaps[0]), spread(case, n, f.width, f.gaps[1])
    x.rows[...] = f.x
    halves = 1 if f.activation == PLAIN else 2
    size = lib.scratch(kind, 2 * n if f.exact else n, f.cols)
    size += lib.unit(kind, f.cols, halves) if pieces else 0
    scratch = memory.array(size * f.slots, np.uint8, LINE)
    shared = memory.array(lib.shared(kind, 2 * n if f.exact else n, f.cols) if pieces else 0, np.uint8, LINE)
    counters = memory.full(COUNTERS, 0, np.int32)
    given = {key: memory.copy(value) for key, value in f.fused.items()}
    made = ProductStruct(
        weights=packed.ctypes.data, type=kind, rows=f.rows, cols=f.cols, x=x.address, out=out.address,
        n=n, x_stride=x.stride, out_stride=out.stride, eps=1e-5, activation=f.activation,
        scratch=scratch.ctypes.data, scratch_size=size, slots=f.slots, counters=counters.ctypes.data,
        level=level, exact=f.exact, shared=shared.ctypes.data, residual_stride=f.width,
        **{key: value.ctypes.data for key, value in given.items()},
    )  # fmt: skip
    if case.chance(2):  # memory is asked for what is computed next, which changes nothing
        made.next = ctypes.addressof(made)
    if pieces:
        made.partial = ctypes.addressof(pieces)
    node(lib.product_address, made, f.threads)
    assert not counters.any(), "counters are not ready for the next call"
    return out.read()


def expected(case: Input, f: Factors) -> Array:
    """By the ordinary library in plain C: one thread, ordinary memory, all of the weight at once."""
    lib, kind, n = plain(case.plain), f.quant.ggml_id, len(f.x)
    packed = kernels.aligned(lib.packed_bytes(kind, (f.rows, f.cols)))
    lib.pack(kind, (f.rows, f.cols), f.stored, packed)
    out, counters = np.zeros((n, f.width), np.float32), np.zeros(COUNTERS, np.int32)
    size = lib.scratch(kind, 2 * n if f.exact else n, f.cols)
    scratch = kernels.aligned(size)
    made = ProductStruct(
        weights=packed.ctypes.data, type=kind, rows=f.rows, cols=f.cols, x=f.x.ctypes.data,
        out=out.ctypes.data, n=n, x_stride=f.cols, out_stride=f.width, eps=1e-5, activation=f.activation,
        scratch=scratch.ctypes.data,
        scratch_size=size, slots=1, counters=counters.ctypes.data, level=PORTABLE, exact=f.exact,
        residual_stride=f.width, **{key: value.ctypes.data for key, value in f.fused.items()},
    )  # fmt: skip
    lib.multiply(None, 0, 1, ctypes.addressof(made))
    return out


def packed_in(case: Input, f: Factors, level: int) -> Array:
    """Packed by the library under test, from a file's bytes that end where they do and begin anywhere."""
    lib, kind, shape = library(), f.quant.ggml_id, (f.rows, f.cols)
    stored = case.memory.copy(f.stored)
    packed = case.memory.array(lib.packed_bytes(kind, shape), np.uint8, LINE)
    lib._pack(kind, *shape, stored.ctypes.data, packed.ctypes.data, level)
    return packed


def product(case: Input) -> None:
    """A whole weight: packed, and multiplied by with every set of instructions."""
    f = factors(case)
    right = expected(case, f)
    for level in levels(case):
        found = multiplied(case, f, packed_in(case, f, level), level, None)
        assert same(found, right), f"other bits than those of plain C, with {LEVELS[level]}"
    usual = np.isfinite(f.x).all() and np.abs(f.x).max() < 1e6 and not f.fused and f.activation == PLAIN
    floats = f.quant.dequantise(f.stored, f.cols).astype(np.float64)
    if usual and not f.exact and np.abs(floats).max() < 1e3:
        assert apart(right, rounded(f.x, f.name) @ floats.T) < 1e-9, "not what numpy makes of it"


def partial_product(case: Input) -> None:
    """A weight of which pieces are missing, and come while the product runs, or do not come."""
    f, rng = factors(case), case.rng
    halves, fails = 1 if f.activation == PLAIN else 2, case.chance(6)
    right = expected(case, f)
    for level in levels(case):
        w = kernels.Weight(f.quant, f.rows, f.cols, f.stored, packed_in(case, f, level))
        sizes, absent = [rng.randint(1, 5) for _ in range(3)], [rng.random() < 0.6 for _ in range(4)]
        pieces = cut(w, halves, sizes, absent, rng.randint(0, 70))
        stored = {rank: case.memory.copy(data) for rank, data in pieces.stored.items()}
        source = Source(stored, f.stored, rng.randint(0, len(stored)) if fails else None)
        table, ranks = case.memory.copy(pieces.table, 8), case.memory.copy(pieces.ranks)
        taken = case.memory.full(len(table), 0, np.int32)
        partial = PartialWeightStruct(
            supply=ctypes.addressof(source.made), streamed=len(stored), pieces=len(table),
            piece=table.ctypes.data, rank=ranks.ctypes.data, taken=taken.ctypes.data,
        )  # fmt: skip
        found = multiplied(case, f, case.memory.copy(pieces.packed, LINE), level, partial)
        if not fails:
            assert same(found, right), f"other bits than those of the whole weight, with {LEVELS[level]}"
            assert not taken.any(), "a piece was not taken as often as it has units"


def expert_products(case: Input) -> None:
    """Products by experts: routed rows, some experts left to others."""
    rng, name = case.rng, case.rng.choice(NAMES)
    number, n, by_pair = rng.randint(1, 6), rng.randint(1, 40), case.chance(2)
    used, gated = rng.randint(1, number), case.chance(2)
    without = rng.sample(range(number), rng.randint(0, number)) if case.chance(2) else []
    routes = experts.routed(n, used, number, without, rng.randint(0, 99))
    cols, rows = STEPS[name] * rng.randint(1, 2), ROWS * rng.randint(1, 3)
    weights = [kernels.weight(name, rows * number, cols, seed) for seed in range(1 + gated)]
    biases = [kernels.activations(number, rows) for _ in weights] if case.chance(2) else []
    x = case.memory.copy(kernels.activations(routes.pairs if by_pair else n, cols))
    with patch.object(experts, "aligned", lambda size: case.memory.array(size, np.uint8, LINE)):
        made = [
            experts.multiplied(routes, weights, biases, x, by_pair, level, threads)
            for level in levels(case)
            for threads in (1, rng.randint(2, 4))
        ]
    assert all(same(made[0], other) for other in made[1:]), "bits depend on instructions or threads"
    for expert in without:
        assert not made[0][routes.of(expert)].any(), "what others compute is not zero"


def lookup(case: Input) -> None:
    """Rows of a packed weight, and of a file, as floats."""
    rng, name = case.rng, case.rng.choice(NAMES)
    rows, cols = rng.randint(1, 70), STEPS[name] * rng.choice((1, 1, 2, 3, 90))
    quant = by_name(name)
    stored = blocks(case, quant, name, rows, cols)
    lib, shape = library(), (rows, cols)
    packed = case.memory.array(lib.packed_bytes(quant.ggml_id, shape), np.uint8, LINE)
    lib._pack(quant.ggml_id, *shape, stored.ctypes.data, packed.ctypes.data, rng.choice(levels(case)))
    ids = case.memory.copy(np.array([rng.randrange(rows) for _ in range(rng.randint(1, 9))], np.int32))
    gap, threads = rng.randint(0, 3), rng.randint(1, 3)
    with np.errstate(all="ignore"):
        right = quant.dequantise(stored, cols)[ids]
    source = Source({}, case.memory.copy(stored))
    for from_file in (False, True):
        out = spread(case, len(ids), cols, gap)
        made = RowLookup(
            weights=packed.ctypes.data, type=quant.ggml_id, rows=rows, cols=cols, ids=ids.ctypes.data,
            out=out.address, n=len(ids), out_stride=out.stride, level=PORTABLE,
        )  # fmt: skip
        if from_file:
            made.supply, made.offset = ctypes.addressof(source.made), 0
        node(lib.lookup_address, made, threads)
        assert same(out.read(), right), f"other numbers than {'the file' if from_file else 'numpy'} has"
