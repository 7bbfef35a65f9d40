"""A mixture of experts: the router's choice, and the products of those chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.backend import FLOAT_BYTES
from hetrun.backends.cuda import grouped_launch, matmul_launch
from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.kernel_cache import at, long, number, real
from hetrun.backends.cuda.matmul_launch import Output
from hetrun.backends.cuda.pass_args import FEW
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.weights import Held
from hetrun.graph import Op
from hetrun.graph.ops import Moe

if TYPE_CHECKING:
    from hetrun.backends.cuda.lowering import Emitter

SMALL = Source("small")
WARPS = 4  # of a block of `route`, each with a row


def mixture(e: Emitter, op: Op) -> None:
    """Each token's pairs with its experts; few tokens take them one by one, many by expert."""
    a, n = op.attrs, e.rows(op.out)
    assert isinstance(a, Moe)
    router, gate, up, down = e.held(op)
    pairs, width, target = n * a.n_used, op.out.width, e.make(op.out)
    chosen, shares, outs = (
        e.arena.take(FLOAT_BYTES * size, op.scope) for size in (pairs, pairs, pairs * width)
    )
    _route(e, op, a, router, chosen, shares)
    by_pairs = _many if n > FEW else _few
    by_pairs(e, op, a, (gate, up, down), chosen, shares, outs)
    total = n * width
    e.each("experts_sum", total, at(outs), at(target), number(width), number(a.n_used), long(total))
    for address in (chosen, shares, outs):
        e.arena.give(address)


def _route(e: Emitter, op: Op, a: Moe, router: Held, chosen: Address, shares: Address) -> None:
    x, n = op.inputs[0], e.rows(op.out)
    scores = e.arena.take(FLOAT_BYTES * n * a.n_experts, op.scope)
    e.few(router.source, x, [Output(router.address, 0, 0, scores, a.n_experts, a.n_experts)])
    facts = number(n), number(a.n_experts), number(a.n_used), number(a.normalise), real(a.scale)
    shared = FLOAT_BYTES * WARPS * a.n_experts
    e.do(
        *(SMALL, "route", (-(-n // WARPS),), 32 * WARPS),
        *(at(scores), at(chosen), at(shares), *facts),
        shared=shared,
    )
    e.arena.give(scores)


Three = tuple[Held, Held, Held]  # gate, up and down


def _few(e: Emitter, op: Op, a: Moe, weights: Three, chosen: Address, shares: Address, outs: Address) -> None:
    """A product for each pair."""
    (gate, up, down), x, width = weights, op.inputs[0], op.out.width
    pairs, threads = e.rows(op.out) * a.n_used, matmul_launch.THREADS
    inner = e.arena.take(FLOAT_BYTES * pairs * a.n_ff, op.scope)
    held = number(a.first), number(a.matrices)
    given = at(gate.address), at(up.address), at(chosen), *held, at(inner), at(e.at[x])
    sizes = number(a.n_ff), number(width), number(a.n_used), number(pairs)
    e.do(gate.source, "experts_gated", (pairs * -(-a.n_ff // matmul_launch.WARPS),), threads, *given, *sizes)
    told = at(down.address), at(chosen), at(shares), *held, at(outs), at(inner)
    sizes_down = number(width), number(a.n_ff), number(pairs)
    e.do(
        down.source, "experts_down", (pairs * -(-width // matmul_launch.WARPS),), threads, *told, *sizes_down
    )
    e.arena.give(inner)


def _many(
    e: Emitter, op: Op, a: Moe, weights: Three, chosen: Address, shares: Address, outs: Address
) -> None:
    """Pairs sorted by expert, in tiles."""
    (gate, up, down), x, width, held = weights, op.inputs[0], op.out.width, a.matrices
    pairs = e.rows(op.out) * a.n_used
    most = grouped_launch.most_tiles(pairs, held)
    order = e.arena.take(FLOAT_BYTES * pairs, op.scope)
    tiles = e.arena.take(grouped_launch.TILE_DTYPE.itemsize * most, op.scope)
    inner = e.arena.take(2 * pairs * a.n_ff, op.scope)
    e.do(
        *(grouped_launch.GROUPING, "group_pairs", grouped_launch.grouping_grid(held), grouped_launch.THREADS),
        *(at(chosen), number(a.first), number(held), number(pairs), at(order), at(tiles), number(most)),
        shared=grouped_launch.grouping_shared(held),
    )
    with_bf16, told = e.rounded(x), (at(order), at(tiles), number(held))
    grid = grouped_launch.gated_grid(pairs, held, a.n_ff)
    given = at(gate.address), at(up.address), *told, at(inner), at(with_bf16)
    sizes = number(a.n_ff), number(width), number(a.n_used)
    source, threads, shared = (
        grouped_launch.source(gate.quant.name),
        grouped_launch.THREADS,
        grouped_launch.SHARED,
    )
    e.do(source, "experts_gated_many", grid, threads, *given, *sizes, shared=shared)
    grid = grouped_launch.down_grid(pairs, held, width)
    given_down = at(down.address), *told, at(shares), at(outs), at(inner)
    source = grouped_launch.source(down.quant.name)
    e.do(
        source, "experts_down_many", grid, threads, *given_down, number(width), number(a.n_ff), shared=shared
    )
    for address in (with_bf16, inner, tiles, order):
        e.arena.give(address)
