"""The float types, and the types of 32 weights with one scale: how to unpack and pack their blocks."""

from __future__ import annotations

import numpy as np

from hetrun.graph.quant.blocks import Bytes, Floats, half, put_half


def unpack_f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def pack_f32(x: Floats, blocks: Bytes) -> None:
    blocks[:] = x.astype("<f4", copy=False).view(np.uint8)


def unpack_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def pack_f16(x: Floats, blocks: Bytes) -> None:
    blocks[:] = x.astype("<f2").view(np.uint8)


def unpack_bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def pack_bf16(x: Floats, blocks: Bytes) -> None:
    bits = x.view(np.uint32)
    # Round half to even. The sum wraps only for NaN, which is truncated and made quiet instead.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    bf16 = np.where(np.isnan(x), (bits >> 16) | 64, rounded)
    blocks[:] = bf16.astype("<u2").view(np.uint8)


def unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), half(blocks, 0), out=out)


def pack_q8_0(x: Floats, blocks: Bytes) -> None:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    q = x * _inverse(scale)
    whole = np.trunc(q)
    # roundf: half away from zero. q - whole is exact, q + 0.5 is not (0.49999997 would become 1).
    whole += np.trunc((q - whole) * 2)
    put_half(blocks, 0, scale)
    blocks[:, 2:] = whole.astype(np.int8).view(np.uint8)


def unpack_q2_0(blocks: Bytes, out: Floats) -> None:
    for i in range(4):
        np.subtract(blocks[:, 2:] >> 2 * i & 3, 1, out=out[:, i::4], dtype=np.float32)
    out *= half(blocks, 0)


def unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    qs = blocks[:, 2:]
    np.subtract(qs & 15, 8, out=out[:, :16], dtype=np.float32)
    np.subtract(qs >> 4, 8, out=out[:, 16:], dtype=np.float32)
    out *= half(blocks, 0)


def pack_q4_0(x: Floats, blocks: Bytes) -> None:
    scale = _signed_peak(x) / np.float32(-8)
    put_half(blocks, 0, scale)
    _put_nibbles(_whole(x * _inverse(scale) + np.float32(8.5), 15), blocks[:, 2:])


def unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    qs = blocks[:, 4:]
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4
    out *= half(blocks, 0)
    out += half(blocks, 2)


def pack_q4_1(x: Floats, blocks: Bytes) -> None:
    q, blocks[:, :4] = _between_extremes(x, 15)
    _put_nibbles(q, blocks[:, 4:])


def unpack_q5_0(blocks: Bytes, out: Floats) -> None:
    signed = _five_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8) - np.int8(16)
    np.multiply(signed, half(blocks, 0), out=out)


def pack_q5_0(x: Floats, blocks: Bytes) -> None:
    scale = _signed_peak(x) / np.float32(-16)
    put_half(blocks, 0, scale)
    _put_five_bits(_whole(x * _inverse(scale) + np.float32(16.5), 31), blocks[:, 6:], blocks[:, 2:6])


def unpack_q5_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_five_bits(blocks[:, 8:], blocks[:, 4:8]), half(blocks, 0), out=out)
    out += half(blocks, 2)


def pack_q5_1(x: Floats, blocks: Bytes) -> None:
    q, blocks[:, :4] = _between_extremes(x, 31)
    _put_five_bits(q, blocks[:, 8:], blocks[:, 4:8])


def _five_bits(qs: Bytes, high: Bytes) -> Bytes:
    """32 whole numbers per block: nibbles in 16 bytes, and the fifth bits in the 4 bytes of `high`."""
    q = np.unpackbits(high, axis=1, bitorder="little")
    q <<= 4
    q[:, :16] |= qs & 15
    q[:, 16:] |= qs >> 4
    return q


def _put_five_bits(q: Bytes, qs: Bytes, high: Bytes) -> None:
    high[:] = np.packbits(q >> 4, axis=1, bitorder="little")
    _put_nibbles(q & np.uint8(15), qs)


def _put_nibbles(q: Bytes, qs: Bytes) -> None:
    """32 whole numbers up to 15 per block; the first 16 go to the low half of the bytes."""
    np.bitwise_or(q[:, :16], q[:, 16:] << 4, out=qs)


def _whole(q: Floats, most: int) -> Bytes:
    return np.minimum(q, np.float32(most)).astype(np.uint8)


def _signed_peak(x: Floats) -> Floats:
    """The value of each block that lies farthest from zero, [blocks, 1]."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    peak += np.float32(0)  # ggml starts from +0, so a block of -0 has the scale +0 / -8
    return peak


def _between_extremes(x: Floats, steps: int) -> tuple[Bytes, Bytes]:
    """Where each value lies between its block's least and largest, and the bytes of scale and minimum."""
    # The first of equal values, as in ggml's loop: which zero of +0 and -0 is taken shows in the bits.
    low = np.take_along_axis(x, x.argmin(axis=1, keepdims=True), axis=1)
    high = np.take_along_axis(x, x.argmax(axis=1, keepdims=True), axis=1)
    scale = (high - low) / np.float32(steps)
    q = _whole((x - low) * _inverse(scale) + np.float32(0.5), steps)
    return q, np.concatenate([scale, low], axis=1).astype("<f2").view(np.uint8)


def _inverse(scale: Floats) -> Floats:
    """1 / scale; 0 where that is not finite: such a scale is 0 in float16 too, so the block is all zero."""
    inverse = np.float32(1) / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)
