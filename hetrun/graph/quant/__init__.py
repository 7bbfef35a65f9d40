"""The quantisation types hetrun computes with: one row in the table per type.

A row of weights is a run of blocks; a block holds `block` weights in `block_bytes` bytes. Layouts and
rounding are ggml's, bit for bit, because GGUF files are written with them. Adding a type is one function that
unpacks blocks (and one that packs them, where hetrun writes the type) and one row at the bottom. Rare types
have a row only: a service unpacks them, which a package registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hetrun.graph.quant import basic, codebook, k_quants
from hetrun.graph.quant.blocks import Bytes, Floats
from hetrun.graph.quant.external import unpacker

__all__ = ["OTHER_TYPES", "QUANTS", "RAW", "Bytes", "Floats", "QuantType", "by_ggml_id", "by_name"]

# Weights converted at a time: the temporaries then stay in a core's own cache, whatever the tensor's size.
CHUNK_WEIGHTS = 1 << 16


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
        if other := OTHER_TYPES.get(ggml_id):
            raise ValueError(f"{other[0]} (ggml type {ggml_id}) is not a type of weights")
        raise ValueError(f"ggml type {ggml_id} is not supported; hetrun has {', '.join(QUANTS)}")
    return quant


def _by_service(name: str, ggml_id: int, block: int, block_bytes: int) -> QuantType:
    return QuantType(name, ggml_id, block, block_bytes, unpacker(name, ggml_id))


def _no_numbers(blocks: Bytes, out: Floats) -> None:
    raise ValueError("bytes are no weights")


RAW = QuantType("U8", -1, 1, 1, _no_numbers)  # bytes of a file of which weights are made

_TABLE = (
    QuantType("F32", 0, 1, 4, basic.unpack_f32, basic.pack_f32),
    QuantType("F16", 1, 1, 2, basic.unpack_f16, basic.pack_f16),
    QuantType("BF16", 30, 1, 2, basic.unpack_bf16, basic.pack_bf16),
    QuantType("Q4_0", 2, 32, 18, basic.unpack_q4_0, basic.pack_q4_0),
    QuantType("Q4_1", 3, 32, 20, basic.unpack_q4_1, basic.pack_q4_1),
    QuantType("Q5_0", 6, 32, 22, basic.unpack_q5_0, basic.pack_q5_0),
    QuantType("Q5_1", 7, 32, 24, basic.unpack_q5_1, basic.pack_q5_1),
    QuantType("Q8_0", 8, 32, 34, basic.unpack_q8_0, basic.pack_q8_0),
    QuantType("Q2_K", 10, 256, 84, k_quants.unpack_q2_k),
    QuantType("Q3_K", 11, 256, 110, k_quants.unpack_q3_k),
    QuantType("Q4_K", 12, 256, 144, k_quants.unpack_q4_k),
    QuantType("Q5_K", 13, 256, 176, k_quants.unpack_q5_k),
    QuantType("Q6_K", 14, 256, 210, k_quants.unpack_q6_k),
    QuantType("IQ4_NL", 20, 32, 18, codebook.unpack_iq4_nl),
    QuantType("IQ4_XS", 23, 256, 136, codebook.unpack_iq4_xs),
    QuantType("MXFP4", 39, 32, 17, codebook.unpack_mxfp4),
    _by_service("NVFP4", 40, 64, 36),
    _by_service("IQ1_S", 19, 256, 50),
    _by_service("IQ1_M", 29, 256, 56),
    _by_service("IQ2_XXS", 16, 256, 66),
    _by_service("IQ2_XS", 17, 256, 74),
    _by_service("IQ2_S", 22, 256, 82),
    _by_service("IQ3_XXS", 18, 256, 98),
    _by_service("IQ3_S", 21, 256, 110),
    _by_service("TQ1_0", 34, 256, 54),
    _by_service("TQ2_0", 35, 256, 66),
    _by_service("Q1_0", 41, 128, 18),
    QuantType("Q2_0", 42, 64, 18, basic.unpack_q2_0),
)

QUANTS: dict[str, QuantType] = {q.name: q for q in _TABLE}
_BY_ID: dict[int, QuantType] = {q.ggml_id: q for q in _TABLE}

# Types of tensors that are not weights: name, numbers and bytes per block, by ggml's number. With the sizes a
# file that has some of them can still be checked and described to its last byte.
OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
}
