"""Products of packed weights in C, for each set of instructions that this CPU has, against numpy's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backends.llamacpp.kernels import matmul as module
from hetrun.backends.llamacpp.kernels.matmul import (
    CLAMPED,
    COUNTERS,
    GEGLU,
    GEGLU_ERF,
    PLAIN,
    ROWS,
    SWIGLU,
    MatmulLibrary,
    ProductStruct,
    RowLookup,
)
from hetrun.graph.quant import Bytes, Floats, QuantType, by_name

BUILT = module.library()
pytestmark = pytest.mark.skipif(BUILT is None, reason="hetrun was installed without a C compiler")
LEVELS = BUILT.levels if BUILT else ()
# Types, and where their blocks hold float16 numbers; MXFP4 has exponents of a byte, floats no blocks. And
# what numbers of columns they are taken with.
SCALES: dict[str, tuple[int, ...]] = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": ()},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)},
    **{"Q2_0": (0,), "F16": (), "BF16": ()},
}
EXACT = ("F16", "BF16")  # activations are not rounded for these
STEPS = {name: 256 if by_name(name).block == 256 else 64 for name in SCALES}
STEPS |= {"Q2_0": 128} | dict.fromkeys(EXACT, 32)
Doubles = npt.NDArray[np.float64]
NODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


def library() -> MatmulLibrary:
    assert BUILT is not None
    return BUILT


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)


def aligned(nbytes: int) -> Bytes:
    """Memory that begins where a cache line does."""
    whole = np.zeros(nbytes + 64, np.uint8)
    at = -whole.ctypes.data % 64
    return whole[at : at + nbytes]


@dataclass(frozen=True)
class Weight:
    """Blocks of a file, and the same packed."""

    quant: QuantType
    rows: int
    cols: int
    stored: Bytes = field(repr=False)
    packed: Bytes = field(repr=False)

    @property
    def floats(self) -> Floats:
        return self.quant.dequantise(self.stored, self.cols)


def pack(quant: QuantType, stored: Bytes, rows: int, cols: int) -> Bytes:
    lib = library()
    packed = aligned(lib.packed_bytes(quant.ggml_id, (rows, cols)))
    lib.pack(quant.ggml_id, (rows, cols), stored, packed)
    return packed


@cache
def weight(name: str, rows: int, cols: int, seed: int = 0) -> Weight:
    """Any bits, with scales of a usual size."""
    quant, rng = by_name(name), np.random.default_rng(seed)
    stored = rng.integers(0, 256, (rows, quant.row_bytes(cols)), np.uint8)
    blocks = stored.reshape(-1, quant.block_bytes)
    for at in SCALES[name]:
        scales = rng.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(117, 121, len(blocks))
    if name in EXACT:
        stored = quant.quantise(rng.uniform(-0.1, 0.1, (rows, cols)).astype(np.float32))
    return Weight(quant, rows, cols, stored, pack(quant, stored, rows, cols))


def activations(n: int, cols: int, seed: int = 1) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, cols), dtype=np.float32) * np.exp(
        rng.standard_normal((n, 1), dtype=np.float32)
    )


@dataclass(frozen=True)
class Fused:
    """What is done beside a product."""

    gain: Floats | None = None
    bias: Floats | None = None
    residual: Floats | None = None
    activation: int = PLAIN
    exact: bool = False  # with activations of 16 bits


PLAINLY = Fused()


def address(x: npt.NDArray[np.generic] | None) -> int | None:
    return None if x is None else x.ctypes.data


def computed(
    w: Weight,
    x: Floats,
    level: int,
    threads: int = 1,
    fused: Fused = PLAINLY,
    slots: int | None = None,
    gap: int = 0,
) -> Floats:
    """What the library makes of it, with some floats between the rows, which must stay as they are."""
    lib, n, slots = library(), len(x), slots or threads
    width = w.rows if fused.activation == PLAIN else w.rows // 2
    wide = np.full((n, w.cols + gap), np.nan, np.float32)
    wide[:, : w.cols] = x
    out = np.full((n, width + gap), 7, np.float32)
    size = lib.scratch(w.quant.ggml_id, 2 * n if fused.exact else n, w.cols)
    scratch, counters = aligned(size * slots), np.zeros(COUNTERS, np.int32)
    product = ProductStruct(
        weights=w.packed.ctypes.data,
        type=w.quant.ggml_id,
        rows=w.rows,
        cols=w.cols,
        x=wide.ctypes.data,
        out=out.ctypes.data,
        n=n,
        x_stride=w.cols + gap,
        out_stride=width + gap,
        gain=address(fused.gain),
        eps=1e-5,
        bias=address(fused.bias),
        residual=address(fused.residual),
        residual_stride=0 if fused.residual is None else fused.residual.shape[1],
        activation=fused.activation,
        scratch=scratch.ctypes.data,
        scratch_size=size,
        slots=slots,
        counters=counters.ctypes.data,
        level=level,
        exact=fused.exact,
    )
    if gap:  # memory is asked for what is computed next, which changes nothing
        product.next = ctypes.addressof(product)
    call = NODE(lib.product_address)
    list(pool().map(lambda i: call(None, i, threads, ctypes.addressof(product)), range(threads)))
    assert not counters.any()  # ready for the next call
    assert (out[:, width:] == 7).all()
    return out[:, :width]


def rounded(x: Floats, name: str = "Q8_0") -> Doubles:
    """Activations as they are multiplied: 8 bits, one scale for 32 columns."""
    if name in EXACT:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, 32)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.where(top > 0, np.rint(blocks * (np.float32(127) / top)), 0)
    back: Doubles = whole.astype(np.float64) * (top / np.float32(127))
    return back.reshape(x.shape)


def apart(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """How far a is from b, squared, as a part of b's square."""
    return float(np.square(a - b, dtype=np.float64).sum() / np.square(b, dtype=np.float64).sum())


def looked_up(w: Weight, ids: list[int], level: int, threads: int = 1) -> Floats:
    lib, out = library(), np.full((len(ids), w.cols + 3), 7, np.float32)
    tokens = np.array(ids, np.int32)
    lookup = RowLookup(
        weights=w.packed.ctypes.data,
        type=w.quant.ggml_id,
        rows=w.rows,
        cols=w.cols,
        ids=tokens.ctypes.data,
        out=out.ctypes.data,
        n=len(ids),
        out_stride=w.cols + 3,
        level=level,
    )
    for i in range(threads):
        lib.look_up(None, i, threads, ctypes.byref(lookup))
    assert (out[:, w.cols :] == 7).all()
    return out[:, : w.cols]


def same(a: Floats, b: Floats) -> bool:
    """Whether all bits are the same."""
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))


def alone(w: Weight, x: Floats, fused: Fused = PLAINLY) -> Floats:
    """Row by row, by one thread in plain C."""
    each = []
    for i in range(len(x)):
        residual = None if fused.residual is None else np.ascontiguousarray(fused.residual[i : i + 1])
        each.append(computed(w, x[i : i + 1], 0, fused=replace(fused, residual=residual)))
    return np.concatenate(each)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SCALES)
def test_product(name: str, level: int) -> None:
    w, x = weight(name, 83, 512), activations(3, 512)
    got, floats = computed(w, x, level), w.floats.astype(np.float64)
    assert apart(got, rounded(x, name) @ floats.T) < 1e-12
    assert apart(got, x @ floats.T) < (1e-12 if name in EXACT else 2e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SCALES)
def test_exact_products_round_to_16_bits(name: str, level: int) -> None:
    w, x = weight(name, 83, 512), activations(3, 512)
    got, floats = computed(w, x, level, fused=Fused(exact=True)), w.floats.astype(np.float64)
    left = (x - rounded(x, name)).astype(np.float32)
    assert apart(got, (rounded(x, name) + rounded(left, name)) @ floats.T) < 1e-11
    assert apart(got, x @ floats.T) < 4e-9


@st.composite
def cases(draw: st.DrawFn) -> tuple[Weight, Floats, Fused]:
    name = draw(st.sampled_from(sorted(SCALES)))
    cols, n = STEPS[name] * draw(st.integers(1, 3)), draw(st.integers(1, 19))
    activation = draw(st.sampled_from((PLAIN, PLAIN, SWIGLU, GEGLU, GEGLU_ERF, CLAMPED)))
    rows = draw(st.integers(1, 70)) if activation == PLAIN else 2 * ROWS * draw(st.integers(1, 3))
    width, rng = rows if activation == PLAIN else rows // 2, np.random.default_rng(2)
    sizes = {"gain": (cols,), "bias": (rows,), "residual": (n, width)}
    given_with = {
        key: rng.standard_normal(size, dtype=np.float32) for key, size in sizes.items() if draw(st.booleans())
    }
    fused = Fused(**given_with, activation=activation, exact=draw(st.booleans()))
    return weight(name, rows, cols), activations(n, cols), fused


@given(cases(), st.integers(1, 4), st.integers(0, 2), st.integers(0, 5))
@settings(max_examples=60)
def test_bits_depend_on_nothing_but_the_row(
    case: tuple[Weight, Floats, Fused], threads: int, idle: int, gap: int
) -> None:
    w, x, fused = case
    expected = alone(w, x, fused)
    for level in LEVELS:
        assert same(computed(w, x, level, threads + idle, fused, threads, gap), expected)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("activation", [PLAIN, SWIGLU])
@pytest.mark.parametrize("name", SCALES)
def test_many_rows_are_taken_in_tiles(name: str, activation: int, level: int) -> None:
    """And weights unpacked for some of them at once, a part of the columns at a time."""
    # Rows of 16 bits are twice as many of 8: both kinds are taken here, in turn.
    exact = activation == SWIGLU
    w, x, fused = weight(name, 64, 2048), activations(203, 2048), Fused(activation=activation, exact=exact)
    several = computed(w, x, level, threads=2, fused=fused)
    for i in (0, 7, 63, 64, 79, 80, 81, 144, 150, 202):
        assert same(several[i : i + 1], computed(w, x[i : i + 1], level, fused=fused))
    assert library().scratch(w.quant.ggml_id, 203, 2048) < 1 << 20


@pytest.mark.parametrize("activation", [PLAIN, SWIGLU])
@pytest.mark.parametrize("name", [*EXACT, "Q2_0"])
def test_every_number_of_rows_and_all_instructions_give_the_same_bits(name: str, activation: int) -> None:
    """More columns than are taken at once, and no multiple of them; pairs of groups, and one that is left."""
    w, x = weight(name, 96, 384), activations(19, 384)
    fused, given_with = Fused(activation=activation), np.random.default_rng(5)
    expected = alone(w, x, fused)
    for n in range(1, 20):
        first = int(given_with.integers(0, 20 - n))
        for level in LEVELS:
            got = computed(w, x[first : first + n], level, threads=2, fused=fused)
            assert same(got, expected[first : first + n])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_norm_bias_and_residual(name: str, level: int) -> None:
    w, x, rng = weight(name, 40, 256), activations(5, 256), np.random.default_rng(3)
    gain, bias = (rng.standard_normal(size, dtype=np.float32) for size in (256, 40))
    residual = rng.standard_normal((5, 40), dtype=np.float32)
    got = computed(w, x, level, fused=Fused(gain, bias, residual))
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + 1e-5) * gain
    assert apart(got, normed @ w.floats.T.astype(np.float64) + bias + residual) < 1e-4
    in_single = (normed.astype(np.float32)).astype(np.float32)
    assert apart(got, rounded(in_single, name) @ w.floats.T.astype(np.float64) + bias + residual) < 1e-6


def silu(x: Doubles) -> Doubles:
    y: Doubles = x / (1 + np.exp(-x))
    return y


def gelu(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def gelu_erf(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
    return y


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("activation", "f"), [(SWIGLU, silu), (GEGLU, gelu), (GEGLU_ERF, gelu_erf)])
def test_activations(activation: int, f: Callable[[Doubles], Doubles], level: int) -> None:
    """A weight of zeros leaves the biases: of the rows that go through the function, and of their factors."""
    x = np.concatenate([np.linspace(-12, 12, 480), np.geomspace(1e-6, 300, 16), -np.geomspace(1e-6, 300, 16)])
    quant, rows = by_name("Q4_0"), 2 * len(x)
    stored = np.zeros((rows, quant.row_bytes(64)), np.uint8)
    w = Weight(quant, rows, 64, stored, pack(quant, stored, rows, 64))
    factors = np.linspace(1, 2, len(x))
    bias = np.concatenate([x, factors]).astype(np.float32)
    got = computed(w, np.ones((1, 64), np.float32), level, fused=Fused(bias=bias, activation=activation))[0]
    expected = f(bias[: len(x)].astype(np.float64)) * factors
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 1e-45])
def test_strange_numbers_stay_in_their_rows(name: str, bad: float, level: int) -> None:
    w, x = weight(name, 20, 256), activations(10, 256)
    expected = computed(w, x, level)
    x[3, 100] = bad
    x[5] = 0
    x[6] = bad
    with np.errstate(all="ignore"):
        got = computed(w, x, level, threads=2)
    usual = [0, 1, 2, 4, 7, 8, 9]
    assert same(got[usual], expected[usual])
    assert not got[5].any()
    if not np.isfinite(bad):
        assert not np.isfinite(got[[3, 6]]).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in SCALES if name not in EXACT])
def test_the_largest_sums_fit(name: str, level: int) -> None:
    """All weights and activations as large as they can be."""
    quant, x = by_name(name), np.ones((9, 512), np.float32)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        stored = np.full((16, quant.row_bytes(512)), fill, np.uint8)
        for at in SCALES[name]:
            stored.reshape(-1, quant.block_bytes)[:, at : at + 2] = np.array([1], np.float16).view(np.uint8)
        if name == "MXFP4":
            stored.reshape(-1, quant.block_bytes)[:, 0] = 128
        w = Weight(quant, 16, 512, stored, pack(quant, stored, 16, 512))
        for sign in (1, -1):
            got, expected = computed(w, sign * x, level), sign * (x @ w.floats.T.astype(np.float64))
            assert np.allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_looked_up_as_the_file_has_them(name: str, threads: int) -> None:
    w = weight(name, 37, 512)
    ids = [36, 0, 17, 17, 31]
    assert same(looked_up(w, ids, 0, threads), w.floats[ids])


@pytest.mark.parametrize("name", SCALES)
def test_weights_are_packed_in_slices(name: str) -> None:
    w = weight(name, 70, 512)
    slices = [pack(w.quant, w.stored[i : i + 32], len(w.stored[i : i + 32]), 512) for i in (0, 32, 64)]
    assert np.array_equal(np.concatenate(slices), w.packed)


@pytest.mark.parametrize("name", SCALES)
def test_what_is_taken(name: str) -> None:
    lib, quant, step = library(), by_name(name), STEPS[name]
    assert lib.takes(quant.ggml_id, (1, step))
    assert lib.takes(quant.ggml_id, (7, 3 * step))
    assert not lib.takes(quant.ggml_id, (16, step // 2))
    assert not lib.takes(quant.ggml_id, (16, step + 16))
    assert not lib.takes(quant.ggml_id, (0, step))
    # Nothing grows by more than half a line of each step of a group.
    grown = lib.packed_bytes(quant.ggml_id, (160, 1024)) - 160 * quant.row_bytes(1024)
    assert 0 <= grown <= 32 * 10 * 1024 // step


def test_other_types_are_not_taken() -> None:
    lib = library()
    others = ("F32", "IQ3_S", "TQ2_0")
    assert not any(lib.takes(by_name(name).ggml_id, (16, 256)) for name in others)
