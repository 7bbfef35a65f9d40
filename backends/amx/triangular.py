"""Inverses of triangular matrices, many at once, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # rows that are solved one after the other; larger blocks are products


def unit_inverse(x: Tensor) -> Tensor:
    """Of matrices [n, rows, rows] the inverse of I + what is below the diagonal; the rest is not read.

    `rows` is a power of two, BLOCK or more. The inverse of [[a, 0], [b, c]] is that of a and of c, and
    -c' b a' between them: stable whatever the matrix is, while a sum of powers of b is not.
    """
    rows = x.shape[1]
    out = torch.zeros(x.shape)
    corners = _diagonal(x, BLOCK)
    one = torch.eye(BLOCK).expand(corners.shape)
    _diagonal(out, BLOCK).copy_(torch.linalg.solve_triangular(corners, one, upper=False, unitriangular=True))
    half = BLOCK
    while half < rows:
        given, found = _diagonal(x, 2 * half), _diagonal(out, 2 * half)
        first, second = found[..., :half, :half], found[..., half:, half:]
        between = torch.matmul(torch.matmul(second, given[..., half:, :half]), first)
        found[..., half:, :half].copy_(between.neg_())
        half *= 2
    return out


def _diagonal(x: Tensor, block: int) -> Tensor:
    """The blocks on the diagonals [n, rows / block, block, block], in x's memory."""
    n, rows, _ = x.shape
    blocks = x.view(n, rows // block, block, rows // block, block)
    return torch.diagonal(blocks, dim1=1, dim2=3).permute(0, 3, 1, 2)
