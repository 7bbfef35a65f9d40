"""The table of quantisation types against the `gguf` package, bit for bit, and against itself.

Against ggml: test_quant_ggml.py.
"""

from __future__ import annotations

import pickle
import tracemalloc

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from hetrun.errors import BackendUnavailable
from hetrun.graph import quant
from hetrun.graph.quant import OTHER_TYPES, QUANTS, QuantType, by_ggml_id, by_name
from hetrun.system import entry_points
from tests.support.examples import examples

ALL = [pytest.param(q, id=q.name) for q in QUANTS.values()]
PACKED = [pytest.param(q, id=q.name) for q in QUANTS.values() if q.pack is not None]

# What the gguf package can dequantise: all but two.
KNOWN = [pytest.param(q, id=q.name) for q in QUANTS.values() if q.name not in ("Q1_0", "Q2_0")]

# Where the float16 scales of a block lie, if it does not begin with one; random bytes there would often be
# NaN. The bits of IQ1_M's are scattered, and those of MXFP4 and NVFP4 are bytes.
HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}

# How far a weight may lie from what it was, as a part of its block's largest (of its span for Qx_1): half
# a step, but a whole one for Q4_0 and Q5_0 at the end of the range opposite their peak.
ERRORS = {
    **{"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 0.5 / 127},
    **{"Q4_0": 1 / 8, "Q4_1": 0.5 / 15, "Q5_0": 1 / 16, "Q5_1": 0.5 / 31},
}


def random_rows(q: QuantType, rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    if q.block == 1:
        weights = rng.standard_normal((rows, cols), dtype=np.float32)
        return q.quantise(weights)
    raw = rng.integers(0, 256, (rows, q.row_bytes(cols)), dtype=np.uint8)
    blocks = raw.reshape(-1, q.block_bytes)
    for at in HALVES.get(q.name, (0,)):
        blocks[:, at : at + 2] = rng.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    return raw


def oracle_type(q: QuantType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(q.ggml_id)


def same_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """But any NaN is as good as another."""
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return a.shape == b.shape and bool(same.all())


def quantised_by_gguf(q: QuantType, x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    raw: npt.NDArray[np.uint8] = gguf.quants.quantize(x, oracle_type(q)).view(np.uint8)
    return raw.reshape(x.shape[0], -1)


def test_the_table_has_the_types_of_gguf() -> None:
    ours = OTHER_TYPES | {q.ggml_id: (q.name, q.block, q.block_bytes) for q in QUANTS.values()}
    assert len(ours) == len(OTHER_TYPES) + len(QUANTS)
    known = {int(t): (t.name, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    # Files hold no Q8_1 and Q8_K: ggml rounds activations to them. gguf does not know Q2_0.
    assert {t: row for t, row in known.items() if row[0] not in ("Q8_1", "Q8_K")} == {
        t: row for t, row in ours.items() if row[0] != "Q2_0"
    }
    for q in QUANTS.values():
        assert by_name(q.name) is by_ggml_id(q.ggml_id) is q


@pytest.mark.parametrize("q", KNOWN)
def test_dequantises_as_gguf_does(q: QuantType) -> None:
    raw = random_rows(q, 9, 768)
    with np.errstate(over="ignore"):  # MXFP4's largest scales
        expected = gguf.quants.dequantize(raw, oracle_type(q)).reshape(9, 768)
    assert same_bits(q.dequantise(raw, 768), expected)


@pytest.mark.parametrize("q", PACKED)
def test_quantises_as_gguf_does(q: QuantType) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 512)).astype(np.float32)
    x[1] *= np.float32(1e-4)
    x[2] = rng.integers(-9, 10, 512) / np.float32(2)
    x[3, :32] = 0
    assert (q.quantise(x) == quantised_by_gguf(q, x)).all()


FLOATS = st.floats(-(2.0**10), 2.0**10, width=32, allow_subnormal=False).filter(
    lambda v: v == 0 or abs(v) > 1e-3
)


@pytest.mark.parametrize("q", PACKED)
@given(x=arrays(np.float32, (2, 64), elements=FLOATS))
@settings(max_examples=examples(25))
def test_quantises_any_weights_as_gguf_does_and_comes_back_close(
    q: QuantType, x: npt.NDArray[np.float32]
) -> None:
    raw = q.quantise(x)
    if not q.name.startswith(("Q4", "Q5")):  # there ggml and gguf part in the sign of a zero
        assert (raw == quantised_by_gguf(q, x)).all()
    back = q.dequantise(raw, 64)
    blocks = x.reshape(-1, q.block)
    reach = np.ptp(blocks, axis=1) if q.name.endswith("_1") else np.abs(blocks).max(axis=1)
    rounding = 0.0 if q.name == "F32" else 2**-10 * np.abs(blocks).max(axis=1)
    error = np.abs(back.reshape(-1, q.block) - blocks).max(axis=1)
    assert (error <= reach * ERRORS[q.name] * 1.001 + rounding).all()


def test_zeros_have_the_signs_that_ggml_gives_them() -> None:
    zeros = np.full((1, 32), -0.0, np.float32)
    assert by_name("Q4_0").quantise(zeros).tobytes() == b"\x00\x80" + b"\x88" * 16
    assert by_name("Q4_1").quantise(zeros).tobytes() == b"\x00\x00\x00\x80" + b"\x00" * 16
    assert by_name("Q8_0").quantise(zeros).tobytes() == bytes(34)
    mixed = zeros.copy()
    mixed[0, 0], mixed[0, 5] = 0.0, 15.0
    assert by_name("Q4_1").quantise(mixed)[0, 2:4].tobytes() == b"\x00\x00", (
        "the first of equal minima counts"
    )


def test_q8_0_rounds_halves_away_from_zero() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -126.5]
    raw = by_name("Q8_0").quantise(x)
    assert raw[0, 2:10].view(np.int8).tolist() == [127, 1, -1, 2, 3, -3, 0, -127]


def test_bf16_rounds_half_to_even_and_keeps_nan() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF800000, 0x7F7FFFFF]], np.uint32)
    raw = by_name("BF16").quantise(bits.view(np.float32))
    assert raw.view("<u2")[0].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFF80, 0x7F80]


def test_too_small_a_scale_gives_zeros_and_too_large_ones_stay_visible() -> None:
    """Without a warning, too: pytest turns those into errors."""
    tiny = np.full((1, 32), 1e-39, np.float32)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        q = by_name(name)
        assert (q.dequantise(q.quantise(tiny), 32) == 0).all()
        for bad in (np.nan, np.inf):
            x = np.ones((1, 64), np.float32)
            x[0, 3] = bad
            back = q.dequantise(q.quantise(x), 64)
            assert not np.isfinite(back[0, :32]).any(), "a block that holds NaN or infinity is not a number"
            assert np.isfinite(back[0, 32:]).all()


@pytest.mark.parametrize("q", ALL)
def test_chunks_and_strides_change_nothing(q: QuantType, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_rows(q, 12, 256, seed=2)
    whole = q.dequantise(raw, 256)
    assert same_bits(q.dequantise(raw.reshape(-1), 256), whole)
    padded = np.zeros((12, raw.shape[1] + 3), np.uint8)  # rows apart from each other, and no scale aligned
    padded[:, 3:] = raw
    monkeypatch.setattr(quant, "CHUNK_WEIGHTS", 5 * 256)
    assert same_bits(q.dequantise(padded[:, 3:], 256), whole)
    assert same_bits(q.dequantise(raw[::2], 256), whole[::2])
    if q.pack is not None:
        assert (q.quantise(whole[::-1])[::-1] == q.quantise(whole)).all()
        assert q.quantise(whole[:0]).shape == (0, raw.shape[1])
    assert q.dequantise(raw[:0], 256).shape == (0, 256)


@pytest.mark.parametrize("q", ALL)
def test_temporary_memory_does_not_grow_with_the_tensor(q: QuantType) -> None:
    raw = random_rows(q, 1024, 2048)
    tracemalloc.start()
    try:
        weights = q.dequantise(raw, 2048)
        assert tracemalloc.get_traced_memory()[1] < weights.nbytes + (3 << 20)
        if q.pack is not None:
            tracemalloc.reset_peak()
            packed = q.quantise(weights)
            assert tracemalloc.get_traced_memory()[1] < weights.nbytes + packed.nbytes + (3 << 20)
    finally:
        tracemalloc.stop()


def test_row_bytes() -> None:
    assert by_name("F16").row_bytes(7) == 14
    assert by_name("Q4_K").row_bytes(512) == 288
    for wrong in (0, -32, 33):
        with pytest.raises(ValueError, match=f"{wrong} weights cannot be Q8_0: .* multiple of 32"):
            by_name("Q8_0").row_bytes(wrong)


def test_what_is_not_supported_is_said_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"'Q9_9' is not supported; hetrun has F32, F16, .*Q6_K"):
        by_name("Q9_9")
    with pytest.raises(ValueError, match=r"I32 \(ggml type 26\) is not a type of weights"):
        by_ggml_id(26)
    with pytest.raises(ValueError, match=r"ggml type 999 is not supported"):
        by_ggml_id(999)
    with pytest.raises(
        ValueError, match="does not quantise to Q6_K, only to F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"
    ):
        by_name("Q6_K").quantise(np.zeros((1, 256), np.float32))


def test_wrong_arrays_are_refused() -> None:
    q = by_name("Q8_0")
    with pytest.raises(ValueError, match="64 Q8_0 weights take 68 bytes each"):
        q.dequantise(np.zeros((2, 69), np.uint8), 64)
    with pytest.raises(ValueError, match="64 Q8_0 weights take 68 bytes each"):
        q.dequantise(np.zeros(69, np.uint8), 64)
    with pytest.raises(ValueError, match="read from uint8, not from int8"):
        q.dequantise(np.zeros((2, 68), np.int8), 64)
    with pytest.raises(ValueError, match="only float32"):
        q.quantise(np.zeros((2, 64)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only float32"):
        q.quantise(np.zeros(64, np.float32))


@pytest.mark.parametrize("q", ALL)
def test_a_type_is_itself_in_another_process(q: QuantType) -> None:
    assert pickle.loads(pickle.dumps(q)) is q


def test_a_type_that_nothing_unpacks_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = np.zeros((1, 66), np.uint8)
    monkeypatch.setattr(quant.external, "provided", lambda: None)
    with pytest.raises(
        BackendUnavailable, match=r"IQ2_XXS are read by ggml's own .* nothing provides .*; reinstall hetrun"
    ):
        by_name("IQ2_XXS").dequantise(raw, 256)

    def missing(ggml_id: int, blocks: quant.Bytes, out: quant.Floats) -> None:
        raise BackendUnavailable("llama-cpp-python is not installed: pip install it")

    monkeypatch.setattr(quant.external, "provided", lambda: missing)
    with pytest.raises(BackendUnavailable, match=r"IQ2_XXS are read by .*: llama-cpp-python is not"):
        by_name("IQ2_XXS").dequantise(raw, 256)


def test_the_service_comes_from_a_package() -> None:
    assert quant.external.provided() is entry_points.named("services", "dequantise") is not None
