"""The table of quantisation types and ggml's services against each other: bit for bit, at every edge."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from hetrun.backend.conformance.cases import QUANT_LIMITS
from hetrun.backend.conformance.random_weights import SLOW, packed
from hetrun.backends.llamacpp import dequantize, ggml_api
from hetrun.graph.quant import QUANTS, QuantType, by_name
from tests.graph.test_quant import ALL, HALVES, PACKED, same_bits
from tests.support.packing import packed_by_ggml, unpacked_by_ggml
from tests.support.tiers import exhaustive

# The halves that a scale may be: zeros, the smallest and largest denormals and normals, infinities, NaN.
EDGES = (0x0000, 0x8000, 0x0001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)

# The types' own errors on gaussian weights: mean square of the error, as a part of that of the weights.
OWN_ERRORS = {
    **{"F16": 4.3e-8, "BF16": 2.75e-6, "Q8_0": 2.8e-5, "Q6_K": 3.1e-4, "Q5_K": 1.3e-3, "Q5_1": 1.42e-3},
    **{"Q5_0": 1.8e-3, "Q4_K": 5e-3, "IQ4_NL": 5.7e-3, "IQ4_XS": 5.8e-3, "Q4_1": 6.1e-3, "Q4_0": 7.3e-3},
    **{"NVFP4": 9.2e-3, "MXFP4": 0.0132, "Q3_K": 0.0223, "IQ3_S": 0.027, "IQ3_XXS": 0.0445, "IQ2_S": 0.07},
    **{"Q2_K": 0.087, "IQ2_XS": 0.09, "IQ2_XXS": 0.118, "IQ1_S": 0.233, "IQ1_M": 0.333},
    # These are for models that were trained with weights of two to four values.
    **{"Q1_0": 0.36, "Q2_0": 0.505, "TQ1_0": 0.65, "TQ2_0": 0.65},
}
COLS = 512


def random_bytes(q: QuantType, rows: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (rows, q.row_bytes(COLS)), dtype=np.uint8)


def gaussian(rows: int, cols: int = COLS) -> npt.NDArray[np.float32]:
    return np.random.default_rng(4).standard_normal((rows, cols), dtype=np.float32)


@pytest.mark.parametrize("q", ALL)
def test_names_and_sizes_are_those_of_ggml(q: QuantType) -> None:
    traits = ggml_api.library().ggml_get_type_traits(q.ggml_id).contents
    found = traits.type_name.decode().upper(), traits.blck_size, traits.type_size
    assert found == (q.name, q.block, q.block_bytes)
    assert q.row_bytes(1024) == 1024 // traits.blck_size * traits.type_size


def test_no_type_that_ggml_dequantises_is_missing() -> None:
    assert {
        number for number in range(43) if ggml_api.library().ggml_get_type_traits(number).contents.to_float
    } == {q.ggml_id for q in QUANTS.values() if q.name != "F32"}


@pytest.mark.parametrize("q", ALL[1:])
def test_random_bytes_are_the_weights_that_ggml_sees(q: QuantType) -> None:
    raw = random_bytes(q, 40)  # of every 32 random halves one is infinite or NaN
    assert same_bits(q.dequantise(raw, COLS), unpacked_by_ggml(raw, q, COLS))


@pytest.mark.parametrize("q", ALL[1:])
def test_scales_at_every_edge(q: QuantType) -> None:
    raw = random_bytes(q, len(EDGES) * len(EDGES))
    blocks = raw.reshape(len(raw), -1, q.block_bytes)
    halves = np.array(EDGES, "<u2")
    for i, at in enumerate(() if q.block == 1 else HALVES.get(q.name, (0,))):
        values = np.tile(halves, len(EDGES)) if i else np.repeat(halves, len(EDGES))
        blocks[:, :, at : at + 2] = values[:, None, None].view(np.uint8)
    if q.name in ("MXFP4", "NVFP4"):
        blocks[:, :, 0] = np.resize([0, 1, 2, 0x7E, 0x7F, 0x80, 0xFE, 0xFF], len(raw))[:, None]
    assert same_bits(q.dequantise(raw, COLS), unpacked_by_ggml(raw, q, COLS))


@pytest.mark.parametrize(
    "q",
    [
        # ggml prepares tables for seconds before it packs these, and unpacks them for us too: one is enough.
        pytest.param(q, id=q.name, marks=exhaustive if q.name in SLOW and q.name != "IQ2_XXS" else ())
        for q in QUANTS.values()
        if q.name != "F32"
    ],
)
def test_what_ggml_packed_comes_back_as_close_as_the_type_allows(q: QuantType) -> None:
    x = gaussian(16)
    raw = packed_by_ggml(x, q)
    back = q.dequantise(raw, COLS)
    assert same_bits(back, unpacked_by_ggml(raw, q, COLS))
    error = float(np.square(back - x).sum() / np.square(x).sum())
    assert error == pytest.approx(OWN_ERRORS[q.name], rel=0.1)


def test_products_cost_less_than_the_types_themselves() -> None:
    """What conformance allows; these three round activations just as they round weights."""
    alike = {"F16", "BF16", "Q8_0"}
    assert all(QUANT_LIMITS[name] < error for name, error in OWN_ERRORS.items() if name not in alike)


@pytest.mark.parametrize("q", PACKED)
def test_packs_as_ggml_does(q: QuantType) -> None:
    x = gaussian(8)
    x[1] *= np.float32(1e-4)
    x[2] = np.round(x[2] * 4) / np.float32(2)
    x[3, :32], x[4], x[5, ::2] = 0, -0.0, -0.0
    x[6] *= np.float32(1e-30)
    x[7] = np.float32(1.5)
    assert (q.quantise(x) == packed_by_ggml(x, q)).all()


def by_hand(q: QuantType, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The two types that the gguf package does not have: a half, then bits, or pairs of bits, upwards."""
    blocks = raw.reshape(-1, q.block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    values = bits * 2 - 1 if q.name == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    weights: npt.NDArray[np.float32] = values * scale
    return weights.reshape(len(raw), -1)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_the_types_that_gguf_lacks(name: str) -> None:
    q = by_name(name)
    raw = packed(gaussian(9), q)
    assert same_bits(q.dequantise(raw, COLS), by_hand(q, raw))


@pytest.mark.parametrize("name", ["Q4_K", "IQ3_S"])
def test_two_threads_pack_the_halves_of_a_tensor(name: str) -> None:
    q, x = by_name(name), gaussian(64)
    out = np.empty((64, q.row_bytes(COLS)), np.uint8)
    threads = [
        threading.Thread(target=dequantize.quantise, args=(q.ggml_id, x[a : a + 32], out[a : a + 32]))
        for a in (0, 32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (out == packed_by_ggml(x, q)).all()


def test_an_importance_matrix_counts() -> None:
    q, x = by_name("Q4_K"), gaussian(32)
    out = np.empty((32, q.row_bytes(COLS)), np.uint8)
    imatrix = np.ones(COLS, np.float32)
    imatrix[::16] = 100
    dequantize.quantise(q.ggml_id, x, out, imatrix)
    plain, weighted = (np.square(q.dequantise(r, COLS) - x)[:, ::16].sum() for r in (packed(x, q), out))
    assert weighted < 0.7 * plain


def test_what_would_end_the_process_is_refused() -> None:
    x, out = gaussian(2), np.empty((2, 288), np.uint8)
    with pytest.raises(ValueError, match="IQ1_S cannot be made without an importance matrix"):
        dequantize.quantise(19, x, np.empty((2, 100), np.uint8))
    with pytest.raises(ValueError, match="importance matrix must be 512 contiguous float32"):
        dequantize.quantise(12, x, out, np.ones(256, np.float32))
    with pytest.raises(ValueError, match="blocks must be 576 contiguous uint8, not uint8"):
        dequantize.quantise(12, x, np.empty((2, 287), np.uint8))
    with pytest.raises(ValueError, match="weights must be 1024 contiguous float32, not float32"):
        dequantize.quantise(12, np.asfortranarray(x), out)
    with pytest.raises(ValueError, match="multiple of 256"):
        dequantize.quantise(12, x[:, :100].copy(), out)
    for bad in (np.nan, np.inf):
        x[1, 7] = bad
        with pytest.raises(ValueError, match="not a number cannot be quantised to Q4_K"):
            dequantize.quantise(12, x, out)
    with pytest.raises(ValueError, match="ggml type 43 is not supported"):
        dequantize.dequantise(43, out[0], x[0])
    with pytest.raises(ValueError, match="no routine that dequantises F32"):
        dequantize.dequantise(0, np.empty(4, np.uint8), np.empty(1, np.float32))
    with pytest.raises(ValueError, match="blocks must be 288 contiguous uint8"):
        dequantize.dequantise(12, out[0, 1:], x[0])


def test_large_weights_are_finite() -> None:
    x = np.full((1, 256), 3e38, np.float32)
    out = np.empty((1, 144), np.uint8)
    dequantize.quantise(12, x, out)  # their sum is not, and numpy must not warn
