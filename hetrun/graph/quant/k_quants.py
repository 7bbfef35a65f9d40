"""The K types: 256 weights in sub-blocks whose scales are quantised as well."""

from __future__ import annotations

import numpy as np

from hetrun.graph.quant.blocks import BITS, NIBBLES, PAIRS, Bytes, Floats, half


def unpack_q2_k(blocks: Bytes, out: Floats) -> None:
    scales = (blocks[:, :16] & 15) * half(blocks, 80)
    minima = (blocks[:, :16] >> 4) * half(blocks, 82)
    # Two halves of 128 weights: 32 bytes hold four runs of 32.
    q = (blocks[:, 16:80].reshape(-1, 2, 1, 32) >> PAIRS[:, None]) & 3
    weights = out.reshape(-1, 16, 16)
    np.multiply(q.reshape(-1, 16, 16), scales[:, :, None], out=weights)
    weights -= minima[:, :, None]


def unpack_q3_k(blocks: Bytes, out: Floats) -> None:
    # Of the sixteen scales' six bits, the low four lie in eight bytes and the high two in four.
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    six = np.concatenate([low & 15, low >> 4], axis=1)
    six |= ((high[:, None] >> PAIRS[:, None]) & 3).reshape(-1, 16) << 4
    scales = (six.view(np.int8) - np.int8(32)) * half(blocks, 108)
    q = ((blocks[:, 32:96].reshape(-1, 2, 1, 32) >> PAIRS[:, None]) & 3).reshape(-1, 8, 32)
    q |= ((blocks[:, None, :32] >> BITS[:, None]) & 1) << 2
    signed = q.view(np.int8).reshape(-1, 16, 16) - np.int8(4)
    np.multiply(signed, scales[:, :, None], out=out.reshape(-1, 16, 16))


def unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales(blocks)
    q = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> NIBBLES[:, None]) & 15
    weights = out.reshape(-1, 8, 32)
    np.multiply(q.reshape(-1, 8, 32), scales, out=weights)
    weights -= minima


def unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _scales(blocks)
    q = ((blocks[:, 48:].reshape(-1, 4, 1, 32) >> NIBBLES[:, None]) & 15).reshape(-1, 8, 32)
    q |= ((blocks[:, None, 16:48] >> BITS[:, None]) & 1) << 4
    weights = out.reshape(-1, 8, 32)
    np.multiply(q, scales, out=weights)
    weights -= minima


def unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, 192:208].view(np.int8) * half(blocks, 208)
    # Two halves of 128 weights: 64 bytes hold four runs of 32 low nibbles, 32 bytes the high pairs of bits.
    q = ((blocks[:, :128].reshape(-1, 2, 1, 64) >> NIBBLES[:, None]) & 15).reshape(-1, 2, 4, 32)
    q |= ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> PAIRS[:, None]) & 3) << 4
    signed = q.view(np.int8).reshape(-1, 16, 16) - np.int8(32)
    np.multiply(signed, scales[:, :, None], out=out.reshape(-1, 16, 16))


def _scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, float32 [blocks, 8, 1] each.

    Six bits each in 12 bytes: the first four scales and the first four minima are whole, the others keep
    their low four bits in the last four bytes and their high two on top of the first eight.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=1)
    return (scales * half(blocks, 0))[:, :, None], (minima * half(blocks, 2))[:, :, None]
