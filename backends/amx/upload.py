"""Weights from their files into the form that a way of the backend multiplies by."""

from __future__ import annotations

import numpy as np
import torch

from hetrun.backend import Buffer, ReadInto, WeightUse
from hetrun.backends.amx.bf16_matmul import BF16, Bf16Product, LeanProduct, PackedProduct, UnpackScratch
from hetrun.backends.amx.buffers import AmxExpertProducts, Vector
from hetrun.backends.amx.int8_matmul import Int8Product
from hetrun.backends.amx.sizes import Way, way_of
from hetrun.backends.amx.weight_slices import StoredRows, floats, spans
from hetrun.graph import Weight


def upload(wanted: WeightUse, way: Way, read: ReadInto, scratch: UnpackScratch) -> Buffer:
    """Bring a weight in; beside what is kept, a slice of it is in memory at a time."""
    weight = wanted.weight
    if wanted.use == "vector":
        return Vector(torch.from_numpy(floats(weight, read) + np.float32(wanted.offset)))
    if wanted.use == "heads":
        return Vector(torch.from_numpy(floats(weight, read)).to(BF16))
    if wanted.use == "lookup":
        return StoredRows(weight, read)
    if wanted.use == "experts":
        each = weight.shape[0] // wanted.matrices
        return AmxExpertProducts(
            [_product(weight.rows(a, b), way, read, scratch) for a, b in spans(weight.shape[0], each)]
        )
    return _product(weight, way_of(wanted, way), read, scratch)


def _product(weight: Weight, way: Way, read: ReadInto, scratch: UnpackScratch) -> Bf16Product:
    if way == "lean":
        return LeanProduct(weight, read, scratch)
    if way == "int8":
        return Int8Product.upload(weight, read)
    if way == "ipex":
        from hetrun.backends.amx.ipex_matmul import IpexProduct

        return IpexProduct(weight, read)
    return PackedProduct(weight, read)
