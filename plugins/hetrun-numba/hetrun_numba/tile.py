"""The innermost loop of products: a tile of results that stays in registers, written in LLVM's language.

numba leaves it to LLVM which numbers of a loop stay in registers, and for a tile of two dimensions LLVM does
not find it. So the loop is built here, instruction by instruction, for the width of this CPU's vectors.

numba keeps compiled kernels as long as the file of the kernel is the same. Who changes this one or `codes`
removes what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import types
from numba.core.base import BaseContext
from numba.core.typing.context import BaseContext as Typing
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from hetrun_numba.formats import COLUMNS, NUMBER, STEPS


def _lanes() -> int:
    """Numbers in one of this CPU's vectors, as numba compiles for it."""
    from numba.core.registry import cpu_target

    features = str(cpu_target.target_context.codegen().magic_tuple()[2])
    return 16 if "+avx512f" in features else 8


LANES = _lanes()
VECTORS = 2  # side by side in a tile
# Rows of tiles; of the tallest all sums fit into the registers.
HEIGHTS = (1, 2, 4, 8, 12) if LANES == 16 else (1, 2, 3, 4, 6)
TALLEST = HEIGHTS[-1]


def _tile(height: int) -> Callable[..., None]:
    """A function of numba's: out[0:height, 0:COLUMNS] += x.T @ w over `steps` of both.

    x has `height` numbers for each step, w COLUMNS; `steps` is a multiple of STEPS.
    """
    chains = 4 if height == 1 else 2 if height == 2 else 1  # sums that do not wait for each other

    def build(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> None:
        del context, signature
        x, w, steps, out, stride = args
        for first in range(0, COLUMNS, LANES * VECTORS):
            _columns(builder, (x, w, steps, out, stride), height, chains, first)

    @intrinsic
    def tile(
        typing: Typing, x: types.Type, w: types.Type, steps: types.Type, out: types.Type, stride: types.Type
    ) -> tuple[Signature, Callable[..., None]]:
        """Addresses of float32 numbers, and the distance of two rows of the result in bytes."""
        del typing
        return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), build

    return tile


def _columns(builder: ir.IRBuilder, args: Sequence[ir.Value], height: int, chains: int, first: int) -> None:
    """The loop for the columns of VECTORS vectors."""
    x, w, steps, out, stride = args
    f32, i64 = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(f32, LANES)
    grid = [(c, r, v) for c in range(chains) for r in range(height) for v in range(VECTORS)]

    def at(base: ir.Value, offset: ir.Value, kind: ir.Type) -> ir.Value:
        return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

    def const(n: int) -> ir.Value:
        return ir.Constant(i64, n)

    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(i64)
    k.add_incoming(const(0), before)
    sums = {}
    for key in grid:
        sums[key] = builder.phi(vector)
        sums[key].add_incoming(ir.Constant(vector, [0.0] * LANES), before)
    now = dict(sums)
    for step in range(STEPS):
        at_k = builder.add(k, const(step))
        row = builder.mul(at_k, const(NUMBER * COLUMNS))
        weights = [
            builder.load(at(w, builder.add(row, const(NUMBER * (first + v * LANES))), vector), align=4)
            for v in range(VECTORS)
        ]
        for r in range(height):
            place = builder.add(builder.mul(at_k, const(NUMBER * height)), const(NUMBER * r))
            number = _spread(builder, builder.load(at(x, place, f32), align=4), vector)
            for v in range(VECTORS):
                key = (step % chains, r, v)
                product = builder.fmul(number, weights[v], flags=["contract"])
                now[key] = builder.fadd(now[key], product, flags=["contract"])
    following = builder.add(k, const(STEPS))
    k.add_incoming(following, loop)
    for key in grid:
        sums[key].add_incoming(now[key], loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    for r in range(height):
        for v in range(VECTORS):
            place = builder.add(builder.mul(stride, const(r)), const(NUMBER * (first + v * LANES)))
            pointer = at(out, place, vector)
            total = builder.load(pointer, align=4)
            for c in range(chains):
                total = builder.fadd(total, now[c, r, v])
            builder.store(total, pointer, align=4)


def _spread(builder: ir.IRBuilder, number: ir.Value, vector: ir.Type) -> ir.Value:
    """A vector of one number."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


TILES = {height: _tile(height) for height in HEIGHTS}
