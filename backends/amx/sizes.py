"""What weights will take, by the way they are held: asked before torch is loaded."""

from __future__ import annotations

from typing import Literal

from hetrun.backend import FLOAT_BYTES, WeightUse

Way = Literal["packed", "lean", "int8", "ipex"]

BF16_BYTES = 2
TILE = 32  # oneDNN pads both sides of a packed weight to this
INT8_TILE = 64  # and of an int8 one to this
NARROW = 768  # outputs; oneDNN gives so few to two threads badly when there are many rows
IPEX_ROWS, IPEX_COLS = 32, 64  # the blocks of IPEX's weights


def bytes_of(use: WeightUse, way: Way) -> int:
    """Memory of a weight as `upload` will hold it."""
    rows, cols = use.weight.shape
    if use.use == "vector":
        return FLOAT_BYTES * rows * cols
    if use.use == "heads":
        return BF16_BYTES * rows * cols
    if use.use == "lookup" or way == "lean":
        return use.weight.nbytes
    return use.matrices * matrix_bytes(rows // use.matrices, cols, way_of(use, way))


def way_of(use: WeightUse, way: Way) -> Way:
    """How a weight is held: logits in int8 would be less exact than all layers are, and gain little time.

    What makes logits exact (see PackedProduct) is oneDNN's alone.
    """
    return "packed" if use.use == "logits" and way in ("int8", "ipex") else way


def matrix_bytes(rows: int, cols: int, way: Way) -> int:
    """Memory of one packed matrix."""
    if way == "int8":
        return int8_bytes(rows, cols)
    copies = (rows <= NARROW) + (way == "ipex" and has_blocks(rows, cols))
    return packed_bytes(rows, cols) + copies * BF16_BYTES * rows * cols


def has_blocks(rows: int, cols: int) -> bool:
    """Whether a matrix can be cut into IPEX's blocks."""
    return rows % IPEX_ROWS == 0 and cols % IPEX_COLS == 0


def packed_bytes(rows: int, cols: int) -> int:
    """Memory of a packed bf16 copy."""
    return BF16_BYTES * (-(-rows // TILE) * TILE) * (-(-cols // TILE) * TILE)


def int8_bytes(rows: int, cols: int) -> int:
    """Memory of a packed int8 copy and its outputs' scales."""
    whole = (-(-rows // INT8_TILE) * INT8_TILE) * (-(-cols // INT8_TILE) * INT8_TILE)
    return whole + FLOAT_BYTES * rows
