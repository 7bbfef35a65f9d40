"""A mixture of experts: the router's choice, and the products of those chosen."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, c_float, c_int, c_void_p
from typing import TYPE_CHECKING

from hetrun.backend import FLOAT_BYTES
from hetrun.backends.cuda import grouped_launch, matmul_launch
from hetrun.backends.cuda.driver import Address, Argument
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.kernel_cache import at, long, number
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.backends.cuda.pass_args import FEW
from hetrun.backends.cuda.programs import Source
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.graph import Op
from hetrun.graph.ops import Activation, Moe, MoreWeight

if TYPE_CHECKING:
    from hetrun.backends.cuda.lowering import CudaEmitter

SMALL = Source("small")
WARPS = 4  # of a block of `route`, each with a row
ACTIVATIONS: Mapping[Activation, int] = {"silu": 0, "gelu": 1, "clamped": 3}  # as the kernels number them
Three = tuple[DeviceWeight, DeviceWeight, DeviceWeight]  # gate, up and down
More = Mapping[MoreWeight, DeviceWeight]  # what only some mixtures have


def mixture(e: CudaEmitter, op: Op) -> None:
    """Each token's pairs with its experts; few tokens take them one by one, many by expert."""
    a, n = op.attrs, e.rows(op.out)
    assert isinstance(a, Moe)
    found = e.held(op)
    three, more = (found[1], found[2], found[3]), a.others(found)
    pairs, width, target = n * a.n_used, op.out.width, e.make(op.out)
    chosen, shares, outs = (
        e.arena.take(FLOAT_BYTES * size, op.scope) for size in (pairs, pairs, pairs * width)
    )
    _route(e, op, a, found[0], more, chosen, shares)
    by_pairs = _many if n > FEW else _few
    by_pairs(e, op, a, three, more, chosen, shares, outs)
    total = n * width
    e.each("experts_sum", total, at(outs), at(target), number(width), number(a.n_used), long(total))
    for address in (chosen, shares, outs):
        e.arena.give(address)


class RouterStruct(Structure):
    """How a router chooses."""

    _fields_ = (
        *((name, c_int) for name in ("n_experts", "n_used", "normalise", "sigmoid")),
        *((name, c_int) for name in ("groups", "groups_used", "group_best")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("bias", "choice_bias", "expert_scale", "slots")),
    )


def routing_of(a: Moe, addresses: Mapping[MoreWeight, Address], slots: Address | None = None) -> RouterStruct:
    """The same of a mixture; the addresses of what it has more than others, and of its experts' slots."""
    sizes = a.n_experts, a.n_used, a.normalise, a.scores == "sigmoid", a.groups, a.groups_used, a.group_best
    names: tuple[MoreWeight, ...] = ("router_bias", "choice_bias", "expert_scale")
    return RouterStruct(*map(int, sizes), a.scale, *(addresses.get(name) for name in names), slots)


def route_shared(a: Moe) -> int:
    """Shared memory of a block of `route`."""
    return FLOAT_BYTES * WARPS * (2 * a.n_experts + a.groups)


def _route(
    e: CudaEmitter, op: Op, a: Moe, router: DeviceWeight, more: More, chosen: Address, shares: Address
) -> None:
    x, n = op.inputs[-1], e.rows(op.out)
    scores = e.arena.take(FLOAT_BYTES * n * a.n_experts, op.scope)
    e.few(router.source, x, [MatmulOutput(router.address, 0, 0, scores, a.n_experts, a.n_experts)])
    slots = e.place.slots.table_of(op) if a.slots else None
    routing = routing_of(a, {name: held.address for name, held in more.items()}, slots)
    e.do(
        SMALL,
        "route",
        (-(-n // WARPS),),
        32 * WARPS,
        at(scores),
        at(chosen),
        at(shares),
        number(n),
        routing,
        shared=route_shared(a),
    )
    e.arena.give(scores)


def _held(a: Moe) -> tuple[int, int]:
    """The first of the experts whose weights lie here, and how many there are: numbers as `route` gives them,
    which are those of slots where there are any."""
    return (0, len(a.slots)) if a.slots else (a.first, a.matrices)


def _biases(more: More) -> tuple[Argument, Argument, Argument]:
    """Of gate, up and down, as far as there are any."""
    names: tuple[MoreWeight, ...] = ("gate_bias", "up_bias", "down_bias")
    gate, up, down = (at(more[name].address if name in more else 0) for name in names)
    return gate, up, down


def _few(
    e: CudaEmitter,
    op: Op,
    a: Moe,
    weights: Three,
    more: More,
    chosen: Address,
    shares: Address,
    outs: Address,
) -> None:
    """A product for each pair."""
    (gate, up, down), x, width = weights, op.inputs[0], op.out.width
    pairs, threads = e.rows(op.out) * a.n_used, matmul_launch.THREADS
    inner = e.arena.take(FLOAT_BYTES * pairs * a.n_ff, op.scope)
    held = tuple(map(number, _held(a)))
    *gate_up_bias, down_bias = _biases(more)
    small = e.takes_bytes(gate)
    begin, source = e.in_bytes(x)[0] if small else e.at[x], matmul_launch.source(gate.quant.name, small)
    given = at(gate.address), at(up.address), *gate_up_bias, at(chosen), *held, at(inner), at(begin)
    sizes = number(a.n_ff), number(width), number(a.n_used), number(pairs), number(ACTIVATIONS[a.activation])
    e.do(source, "experts_gated", (pairs * -(-a.n_ff // matmul_launch.WARPS),), threads, *given, *sizes)
    small = e.takes_bytes(down)
    between = e.round_int8(inner, pairs, a.n_ff) if small else inner
    source = matmul_launch.source(down.quant.name, small)
    told = at(down.address), down_bias, at(chosen), at(shares), *held, at(outs), at(between)
    sizes_down = number(width), number(a.n_ff), number(pairs)
    e.do(source, "experts_down", (pairs * -(-width // matmul_launch.WARPS),), threads, *told, *sizes_down)
    for address in {inner, between}:
        e.arena.give(address)


def _many(
    e: CudaEmitter,
    op: Op,
    a: Moe,
    weights: Three,
    more: More,
    chosen: Address,
    shares: Address,
    outs: Address,
) -> None:
    """Pairs sorted by expert, in tiles: of bytes where results need not be exact, else of bf16."""
    (gate, up, down), x, width, (first, held) = weights, op.inputs[0], op.out.width, _held(a)
    pairs, in_bytes = e.rows(op.out) * a.n_used, experts_in_bytes(e, op)
    most = grouped_launch.most_tiles(pairs, held)
    order = e.arena.take(FLOAT_BYTES * pairs, op.scope)
    tiles = e.arena.take(grouped_launch.TILE_DTYPE.itemsize * most, op.scope)
    inner = e.arena.take(pairs * (matmul_launch.int8_row(a.n_ff) if in_bytes else 2 * a.n_ff), op.scope)
    threads = grouped_launch.THREADS
    e.do(
        grouped_launch.GROUPING,
        "group_pairs",
        grouped_launch.grouping_grid(held),
        threads,
        at(chosen),
        number(first),
        number(held),
        number(pairs),
        at(order),
        at(tiles),
        number(most),
        shared=grouped_launch.grouping_shared(held),
    )
    begin, told = e.in_bytes(x)[0] if in_bytes else e.rounded(x), (at(order), at(tiles), number(held))
    *gate_up_bias, down_bias = _biases(more)
    given = at(gate.address), at(up.address), *gate_up_bias, *told, at(inner), at(begin)
    sizes = number(a.n_ff), number(width), number(a.n_used), number(ACTIVATIONS[a.activation])
    kernel, shared = grouped_launch.gated(gate.quant.name, in_bytes)
    e.do(*kernel, grouped_launch.gated_grid(pairs, held, a.n_ff), threads, *given, *sizes, shared=shared)
    given_down = at(down.address), down_bias, *told, at(shares), at(outs), at(inner)
    sizes_down, grid = (number(width), number(a.n_ff)), grouped_launch.down_grid(pairs, held, width)
    kernel, shared = grouped_launch.down(down.quant.name, in_bytes)
    e.do(*kernel, grid, threads, *given_down, *sizes_down, shared=shared)
    for address in (*(() if in_bytes else (begin,)), inner, tiles, order):
        e.arena.give(address)


def experts_in_bytes(e: CudaEmitter, op: Op) -> bool:
    """Whether experts of many tokens multiply bytes."""
    _, gate, _, down, *_ = e.held(op)
    fit = all(int8.takes(w.quant.name, e.rows(op.out), w.shape[1]) for w in (gate, down))
    return fit and not e.place.exact
