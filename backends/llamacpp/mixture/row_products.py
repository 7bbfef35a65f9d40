"""ggml's products of weights that own kernels do not take, such as a router's.

ggml multiplies several rows at once by other code than a single one, and adds up in another order. So each of
a few rows is given to it as a matrix of its own, and has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetrun.backends.llamacpp.ggml_api import tensor_at
from hetrun.graph import Op

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

MOST_ROWS = 16  # of a pass: of more, products row by row would take much longer than at once
KINDS = ("moe", "per_head")


def multiplies(ops: Sequence[Op]) -> bool:
    """Whether there are such products among them."""
    return any(op.kind in KINDS for op in ops)


def multiply(e: GgmlEmitter, weight: int, rows: int, n: int) -> int:
    """A matrix by n rows: [results, n]."""
    if n > MOST_ROWS:
        return int(e.lib.ggml_mul_mat(e.ctx, weight, rows))
    width, stride = tensor_at(rows).ne[0], tensor_at(rows).nb[1]
    each = e.lib.ggml_view_3d(e.ctx, rows, width, 1, n, stride, stride, 0)
    return int(
        e.lib.ggml_reshape_2d(e.ctx, e.lib.ggml_mul_mat(e.ctx, weight, each), tensor_at(weight).ne[1], n)
    )


def multiply_heads(e: GgmlEmitter, matrices: int, columns: int) -> int:
    """Matrices, one for each head, by their columns of each row [columns, heads, n]: [results, heads, n]."""
    lib, ctx, given = e.lib, e.ctx, tensor_at(columns)
    width, heads, n = given.ne[0], given.ne[1], given.ne[2]
    if n > MOST_ROWS:
        by_head = lib.ggml_permute(ctx, columns, 0, 2, 1, 3)
        return int(lib.ggml_permute(ctx, lib.ggml_mul_mat(ctx, matrices, by_head), 0, 2, 1, 3))
    head, row = given.nb[1], given.nb[2]
    each = lib.ggml_view_4d(ctx, columns, width, 1, heads, n, head, head, row, 0)
    made = lib.ggml_mul_mat(ctx, matrices, each)
    return int(lib.ggml_reshape_3d(ctx, made, tensor_at(matrices).ne[1], heads, n))
