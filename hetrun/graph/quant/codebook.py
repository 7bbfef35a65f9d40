"""Types whose nibbles are not numbers but places in a list of sixteen."""

from __future__ import annotations

import numpy as np

from hetrun.graph.quant.blocks import NIBBLES, PAIRS, Bytes, Floats, half

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice a float of 2 + 1 bits

# For each byte, the values of its low and of its high nibble.
_BYTES_IQ4, _BYTES_FP4 = (
    (np.tile(values, 16), np.repeat(values, 16)) for values in (np.array(v, np.float32) for v in (_IQ4, _FP4))
)
# MXFP4's scales, halved because the list is doubled; the two smallest are denormal.
_POWERS = np.ldexp(np.float32(1), np.arange(-128, 128, dtype=np.int32))


def unpack_iq4_nl(blocks: Bytes, out: Floats) -> None:
    _look_up(_BYTES_IQ4, blocks[:, 2:], out)
    out *= half(blocks, 0)


def unpack_iq4_xs(blocks: Bytes, out: Floats) -> None:
    # Of the eight scales' six bits, the high two lie in two bytes and the low four in four.
    six = ((blocks[:, 4:8, None] >> NIBBLES) & 15).reshape(-1, 8)
    six |= ((blocks[:, 2:4, None] >> PAIRS) & 3).reshape(-1, 8) << 4
    scales = (six.view(np.int8) - np.int8(32)) * half(blocks, 0)
    _look_up(_BYTES_IQ4, blocks[:, 8:].reshape(-1, 16), out.reshape(-1, 32))
    out.reshape(-1, 8, 32)[:] *= scales[:, :, None]


def unpack_mxfp4(blocks: Bytes, out: Floats) -> None:
    _look_up(_BYTES_FP4, blocks[:, 1:], out)
    out *= _POWERS[blocks[:, :1]]


def _look_up(byte: tuple[Floats, Floats], qs: Bytes, out: Floats) -> None:
    """32 weights for 16 bytes: first those of the low nibbles."""
    out[:, :16], out[:, 16:] = byte[0][qs], byte[1][qs]
