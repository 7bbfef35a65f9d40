"""The quantisation types hetrun computes with: one row in the table per type.

A row of weights is a run of blocks; a block holds `block` weights in `block_bytes` bytes. Layouts and
rounding are ggml's, bit for bit, because GGUF files are written with them. Adding a type is one function that
unpacks blocks (and one that packs them, where hetrun writes the type) and one row at the bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Weights converted at a time: the temporaries then stay in a core's own cache, whatever the tensor's size.
CHUNK_WEIGHTS = 1 << 16

_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)


@dataclass(frozen=True)
class QuantType:
    """How a type lays weights out in bytes, and how to get from one to the other."""

    name: str
    ggml_id: int
    block: int
    block_bytes: int
    unpack: Callable[[Bytes, Floats], None] = field(repr=False, compare=False)
    pack: Callable[[Floats, Bytes], None] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[str], QuantType], tuple[str]]:
        return by_name, (self.name,)

    def row_bytes(self, n: int) -> int:
        """The bytes a row of n weights takes."""
        if n <= 0 or n % self.block:
            raise ValueError(
                f"a row of {n} weights cannot be {self.name}: it must be a positive multiple of {self.block}"
            )
        return n // self.block * self.block_bytes

    def dequantise(self, raw: Bytes, n_cols: int) -> Floats:
        """Turn rows of bytes, [rows, row_bytes] or flat, into float32 [rows, n_cols]."""
        width = self.row_bytes(n_cols)
        if raw.dtype != np.uint8:
            raise ValueError(f"{self.name} rows are read from uint8, not from {raw.dtype}")
        if raw.ndim == 1 and raw.size % width == 0:
            raw = raw.reshape(-1, width)
        if raw.ndim != 2 or raw.shape[1] != width:
            raise ValueError(f"rows of {n_cols} {self.name} weights take {width} bytes each, not {raw.shape}")
        out = np.empty((raw.shape[0], n_cols), np.float32)
        step = max(1, CHUNK_WEIGHTS // n_cols)
        with np.errstate(all="ignore"):  # infinities and NaN in a file come out as such, as they do from ggml
            for at in range(0, raw.shape[0], step):
                blocks = np.ascontiguousarray(raw[at : at + step]).reshape(-1, self.block_bytes)
                self.unpack(blocks, out[at : at + step].reshape(-1, self.block))
        return out

    def quantise(self, x: Floats) -> Bytes:
        """Turn float32 [rows, cols] into uint8 [rows, row_bytes], as ggml's reference quantiser does."""
        if self.pack is None:
            can = ", ".join(q.name for q in QUANTS.values() if q.pack is not None)
            raise ValueError(f"hetrun does not quantise to {self.name}, only to {can}")
        if x.ndim != 2 or x.dtype != np.float32:
            raise ValueError(f"only float32 [rows, cols] can be quantised, not {x.dtype} {x.shape}")
        rows, cols = x.shape
        out = np.empty((rows, self.row_bytes(cols)), np.uint8)
        step = max(1, CHUNK_WEIGHTS // cols)
        with np.errstate(all="ignore"):  # a NaN in a block makes its scale NaN: it stays visible
            for at in range(0, rows, step):
                blocks = np.ascontiguousarray(x[at : at + step]).reshape(-1, self.block)
                self.pack(blocks, out[at : at + step].reshape(-1, self.block_bytes))
        return out


def by_name(name: str) -> QuantType:
    """The type with this name, as GGUF spells it."""
    if (quant := QUANTS.get(name)) is None:
        raise ValueError(f"quantisation type {name!r} is not supported; hetrun has {', '.join(QUANTS)}")
    return quant


def by_ggml_id(ggml_id: int) -> QuantType:
    """The type with this number in ggml and in GGUF files."""
    if (quant := _BY_ID.get(ggml_id)) is None:
        other = OTHER_TYPES.get(ggml_id)
        what = f"{other[0]} (ggml type {ggml_id})" if other else f"ggml type {ggml_id}"
        raise ValueError(f"quantisation type {what} is not supported; hetrun has {', '.join(QUANTS)}")
    return quant


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    half: Floats = blocks[:, at : at + 2].view("<f2").astype(np.float32)
    return half


def _put_half(blocks: Bytes, at: int, value: Floats) -> None:
    blocks[:, at : at + 2] = value.astype("<f2").view(np.uint8)


def _inverse(scale: Floats) -> Floats:
    """1 / scale; 0 where that is not finite: such a scale is 0 in float16 too, so the block is all zero."""
    inverse = np.float32(1) / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def _unpack_f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _pack_f32(x: Floats, blocks: Bytes) -> None:
    blocks[:] = x.astype("<f4", copy=False).view(np.uint8)


def _unpack_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _pack_f16(x: Floats, blocks: Bytes) -> None:
    blocks[:] = x.astype("<f2").view(np.uint8)


def _unpack_bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _pack_bf16(x: Floats, blocks: Bytes) -> None:
    bits = x.view(np.uint32)
    # Round half to even. The sum wraps only for NaN, which is truncated and made quiet instead.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    bf16 = np.where(np.isnan(x), (bits >> 16) | 64, rounded)
    blocks[:] = bf16.astype("<u2").view(np.uint8)


def _unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _pack_q8_0(x: Floats, blocks: Bytes) -> None:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    q = x * _inverse(scale)
    whole = np.trunc(q)
    # roundf: half away from zero. q - whole is exact, q + 0.5 is not (0.49999997 would become 1).
    whole += np.trunc((q - whole) * 2)
    _put_half(blocks, 0, scale)
    blocks[:, 2:] = whole.astype(np.int8).view(np.uint8)


def _unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    qs = blocks[:, 2:]
    np.subtract(qs & 15, 8, out=out[:, :16], dtype=np.float32)
    np.subtract(qs >> 4, 8, out=out[:, 16:], dtype=np.float32)
    out *= _half(blocks, 0)


def _pack_q4_0(x: Floats, blocks: Bytes) -> None:
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    peak += np.float32(0)  # ggml starts from +0, so a block of -0 has the scale +0 / -8
    scale = peak / np.float32(-8)
    _put_half(blocks, 0, scale)
    _put_nibbles(blocks[:, 2:], x * _inverse(scale) + np.float32(8.5))


def _unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    qs = blocks[:, 4:]
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _pack_q4_1(x: Floats, blocks: Bytes) -> None:
    # The first of equal values, as in ggml's loop: which zero of +0 and -0 is taken shows in the bits.
    low = np.take_along_axis(x, x.argmin(axis=1, keepdims=True), axis=1)
    high = np.take_along_axis(x, x.argmax(axis=1, keepdims=True), axis=1)
    scale = (high - low) / np.float32(15)
    _put_half(blocks, 0, scale)
    _put_half(blocks, 2, low)
    _put_nibbles(blocks[:, 4:], (x - low) * _inverse(scale) + np.float32(0.5))


def _put_nibbles(qs: Bytes, q: Floats) -> None:
    """Cut 32 values per block to whole numbers up to 15; the first 16 go to the low half of the bytes."""
    whole = np.minimum(q, np.float32(15)).astype(np.uint8)
    np.bitwise_or(whole[:, :16], whole[:, 16:] << 4, out=qs)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, float32 [blocks, 8, 1] each.

    Six bits each in 12 bytes: the first four scales and the first four minima are whole, the others keep
    their low four bits in the last four bytes and their high two on top of the first eight.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=1)
    return (scales * _half(blocks, 0))[:, :, None], (minima * _half(blocks, 2))[:, :, None]


def _unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    q = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLES[:, None]) & 15
    weights = out.reshape(-1, 8, 32)
    np.multiply(q.reshape(-1, 8, 32), scales, out=weights)
    weights -= minima


def _unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    q = ((blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLES[:, None]) & 15).reshape(-1, 8, 32)
    q |= ((blocks[:, None, 16:48] >> _BITS[:, None]) & 1) << 4
    weights = out.reshape(-1, 8, 32)
    np.multiply(q, scales, out=weights)
    weights -= minima


def _unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    # Two halves of 128 weights: 64 bytes hold four runs of 32 low nibbles, 32 bytes the high pairs of bits.
    q = ((blocks[:, :128].reshape(-1, 2, 1, 64) >> _NIBBLES[:, None]) & 15).reshape(-1, 2, 4, 32)
    q |= ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS[:, None]) & 3) << 4
    signed = q.view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    np.multiply(signed, scales[:, :, None], out=out.reshape(-1, 16, 16))


_TABLE = (
    QuantType("F32", 0, 1, 4, _unpack_f32, _pack_f32),
    QuantType("F16", 1, 1, 2, _unpack_f16, _pack_f16),
    QuantType("BF16", 30, 1, 2, _unpack_bf16, _pack_bf16),
    QuantType("Q4_0", 2, 32, 18, _unpack_q4_0, _pack_q4_0),
    QuantType("Q4_1", 3, 32, 20, _unpack_q4_1, _pack_q4_1),
    QuantType("Q8_0", 8, 32, 34, _unpack_q8_0, _pack_q8_0),
    QuantType("Q4_K", 12, 256, 144, _unpack_q4_k),
    QuantType("Q5_K", 13, 256, 176, _unpack_q5_k),
    QuantType("Q6_K", 14, 256, 210, _unpack_q6_k),
)

QUANTS: dict[str, QuantType] = {q.name: q for q in _TABLE}
_BY_ID: dict[int, QuantType] = {q.ggml_id: q for q in _TABLE}

# Types that files may hold and hetrun does not compute with: name, weights and bytes per block, by ggml's
# number. With the sizes a file that has some of them can still be checked and described to its last byte.
OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
