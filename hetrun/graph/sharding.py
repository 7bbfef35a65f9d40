"""Shares: the work of one scope for several backends, by rows of its products, heads of its attention or
experts of its mixture.

A share is a rewrite of the graph before it is cut: the ops of the scope are replaced by one smaller op for
each share, in a scope of its own (`blk.0.ffn.up.rows0-64`), and by an op that puts the results together. For
cutting, compiling and running that is nothing new: the smaller ops are ops with smaller weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from hetrun.errors import OptionError
from hetrun.graph.ir import Graph, Op, Value, Weight, in_scope
from hetrun.graph.ops import BY_ROUTER, MIXTURE, NONE, Attention, Moe, RmsNorm, Rope

Kind = Literal["rows", "heads", "experts"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Share:
    """From `a` to `b` of the `of` rows, KV heads or experts that a scope has.

    rows: of the results of its products; those of all shares are put side by side.
    heads: of its attention: their rows of the projections to q, k and v, their columns of the KV rows and of
    the projection behind; the results of that are added.
    experts: of its mixture, behind the whole router; the results are added. Those with an `order` are a to b
    of it, and not experts of these numbers: so a share can have the ones that are chosen most. One of them
    may be `whole`: it has the weights of all, and leaves those of the others unused. That takes no memory
    where they lie anyway. Of two such shares the experts may be `moving`: they are those of the shares only
    at first, and change places while the model runs.
    """

    kind: Kind
    a: int
    b: int
    of: int
    order: tuple[int, ...] = ()  # every expert once
    whole: bool = False
    moving: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.a}-{self.b}"

    def scope(self, of: str) -> str:
        """Where its ops lie: below the scope that is shared out."""
        return f"{of}.{self}"


class _Ops:
    """The ops of a graph, found by scope and value; looked through once for all that is shared out."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.all = ops
        self.makers: dict[Value, Op] = {}
        self.readers: dict[Value, list[Op]] = {}
        self._by_scope: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            self.makers[op.out] = op
            self._by_scope.setdefault(op.scope, []).append(i)
            for value in op.inputs:
                self.readers.setdefault(value, []).append(op)

    def within(self, scope: str) -> list[Op]:
        """Those of a scope, in order."""
        found = [i for name, some in self._by_scope.items() if in_scope(name, scope) for i in some]
        return [self.all[i] for i in sorted(found)]


Pieces = dict[Value, list[Op]]  # by what an op makes: the ops that take its place
Split = Callable[[_Ops, str, Sequence[Share]], Pieces]


def divide(graph: Graph, shares: Mapping[str, Sequence[Share]]) -> Graph:
    """The graph with the ops of some scopes shared out; its outputs are the same values."""
    ops, pieces = _Ops(graph.ops), Pieces()
    for scope, parts in shares.items():
        found = _pieces(ops, scope, parts)
        if found.keys() & pieces.keys():  # a scope inside of one that is shared out already
            ops, pieces = _Ops(_in_place(ops, pieces)), {}
            found = _pieces(ops, scope, parts)
        pieces |= found
    graph = replace(graph, ops=_in_place(ops, pieces))
    graph.validate()
    return graph


def _in_place(ops: _Ops, pieces: Pieces) -> tuple[Op, ...]:
    return tuple(new for op in ops.all for new in pieces.get(op.out, (op,)))


def _pieces(ops: _Ops, scope: str, parts: Sequence[Share]) -> Pieces:
    """What takes the place of the ops of one scope that are shared out."""
    parts = sorted(parts, key=lambda s: s.a)
    _check(scope, parts)
    splits: dict[Kind, Split] = {"rows": _rows, "heads": _heads, "experts": _experts}
    try:
        return splits[parts[0].kind](ops, scope, parts)
    except ValueError as e:  # a border inside a block of quantised numbers
        raise OptionError(f"the plan shares out {scope} where it cannot be cut: {e}") from e


def _check(scope: str, parts: Sequence[Share]) -> None:
    """Whether the shares of a scope have everything once."""
    first = parts[0]
    if any((p.kind, p.of, p.order) != (first.kind, first.of, first.order) for p in parts):
        raise OptionError(
            f"the plan shares out {scope} in several ways; its shares must be of one kind, number and order"
        )
    if any(p.kind != "experts" and (p.order or p.whole) for p in parts):
        raise OptionError(f"the plan shares out {first.kind} of {scope} in an order; only experts have one")
    if any(p.moving for p in parts) and [p.moving and p.whole for p in parts] not in (
        [True, False],
        [False, True],
    ):
        raise OptionError(f"the experts of {scope} can only move between two shares, one of which is whole")
    if first.order and sorted(first.order) != list(range(first.of)):
        raise OptionError(f"the order of the experts of {scope} must have each of {first.of} once")
    gaps = [p.a != before.b for before, p in pairwise(parts)]
    if first.a != 0 or parts[-1].b != first.of or any(gaps) or any(p.a >= p.b for p in parts):
        ranges = ", ".join(f"{p.a}-{p.b}" for p in parts)
        raise OptionError(
            f"the plan shares out the {first.of} {first.kind} of {scope} as {ranges}; "
            "each must be in one share"
        )


def _nothing(scope: str, share: Share, what: str) -> OptionError:
    return OptionError(f"the plan shares out {share.of} {share.kind} of {scope}, which has {what}")


# --- rows


def _rows(ops: _Ops, scope: str, parts: Sequence[Share]) -> Pieces:
    """Every product of the scope with as many rows as the shares divide."""
    mine = [op for op in ops.within(scope) if op.kind in ("linear", "head")]
    if not any(op.out.width == parts[0].of for op in mine):
        found = ", ".join(str(n) for n in dict.fromkeys(op.out.width for op in mine))
        raise _nothing(scope, parts[0], f"products of {found} rows" if found else "no product")
    pieces = Pieces()
    for op in mine:
        if op.out.width == parts[0].of:
            smaller = [_part(op, scope, s, s.b - s.a, _some_rows(op.weights, s.a, s.b)) for s in parts]
            pieces[op.out] = [*_joined(op, smaller, "concat")]
    return pieces


def _some_rows(weights: Sequence[Weight], a: int, b: int) -> tuple[Weight, ...]:
    """Rows of a product's matrix, and the same columns of its bias."""
    matrix, *bias = weights
    return (matrix.rows(a, b), *(w.cols(a, b) for w in bias))


def _part(op: Op, scope: str, share: Share, width: int, weights: tuple[Weight, ...]) -> Op:
    """A share of an op."""
    out = replace(op.out, name=f"{op.out.name}.{share}", width=width)
    return replace(op, out=out, weights=weights, scope=share.scope(scope) + op.scope[len(scope) :])


def _joined(op: Op, parts: Sequence[Op], kind: Literal["concat", "add"]) -> Iterator[Op]:
    """The shares of an op, and how their results become the op's own."""
    if len(parts) == 1:
        yield replace(parts[0], out=op.out)
        return
    yield from parts
    values = [p.out for p in parts]
    if kind == "concat":
        yield Op("concat", tuple(values), op.out, (), NONE, op.scope)
        return
    total = values[0]
    for i, value in enumerate(values[1:], 2):
        last = i == len(values)
        out = op.out if last else replace(op.out, name=f"{op.out.name}.sum{i}")
        yield Op("add", (total, value), out, (), NONE, op.scope)
        total = out


# --- heads


def shared_by_heads(ops: Sequence[Op], scope: str) -> bool:
    """Whether the attention of a scope can be shared out by heads: there is one, and what stands around it is
    made head by head."""
    n = next((op.attrs.n_kv_heads for op in ops if isinstance(op.attrs, Attention)), 0)
    try:
        return bool(n) and _around_attention(_Ops(ops), scope, Share("heads", 0, n, n)) is not None
    except OptionError:
        return False


def _heads(ops: _Ops, scope: str, parts: Sequence[Share]) -> Pieces:
    """The attention of the scope, from its projections to the one behind it."""
    attention, before, behind = _around_attention(ops, scope, parts[0])
    a = attention.attrs
    assert isinstance(a, Attention)
    values: dict[Share, dict[Value, Value]] = {share: {} for share in parts}
    pieces = Pieces()
    for op in ops.within(scope):
        if op is attention or op in before:
            n_heads = a.n_heads if op is attention else before[op]
            pieces[op.out] = []
            for s in parts:
                part = _reading(_heads_of(op, scope, s, n_heads, a), values[s])
                values[s][op.out] = part.out
                pieces[op.out].append(part)
    smaller = []
    for s in parts:
        width = a.n_heads // a.n_kv_heads * a.head_dim
        matrix, *bias = behind.weights
        columns = matrix.cols(s.a * width, s.b * width)
        weights = (columns, *(bias if s is parts[0] else ()))  # a bias counts once
        smaller.append(_reading(_part(behind, scope, s, behind.out.width, weights), values[s]))
    pieces[behind.out] = [*_joined(behind, smaller, "add")]
    return pieces


def _reading(op: Op, values: Mapping[Value, Value]) -> Op:
    """The op, reading what its own share made."""
    return replace(op, inputs=tuple(values.get(v, v) for v in op.inputs))


def _around_attention(ops: _Ops, scope: str, share: Share) -> tuple[Op, dict[Op, int], Op]:
    """The attention of a scope; the ops between it and its projections, these included, with their heads;
    the projection behind it."""
    found = [op for op in ops.within(scope) if op.kind == "attention"]
    if len(found) != 1 or not isinstance(found[0].attrs, Attention):
        raise _nothing(scope, share, "no attention")
    attention, a = found[0], found[0].attrs
    if a.sharing:
        raise _nothing(scope, share, "an attention whose keys and values have more than one use")
    if a.n_kv_heads != share.of:
        raise _nothing(scope, share, f"an attention of {a.n_kv_heads} KV heads")
    before: dict[Op, int] = {}
    for value, n_heads in zip(attention.inputs, (a.n_heads, a.n_kv_heads, a.n_kv_heads), strict=True):
        while True:
            op = ops.makers[value]
            if len(ops.readers[value]) != 1 or not in_scope(op.scope, scope) or not _by_heads(op, n_heads):
                raise _nothing(
                    scope, share, f"a {op.kind} before its attention that is not made head by head"
                )
            before[op] = n_heads
            if op.kind == "linear":
                break
            value = op.inputs[0]
    behind = ops.readers.get(attention.out, [])
    if len(behind) != 1 or behind[0].kind != "linear" or not in_scope(behind[0].scope, scope):
        raise _nothing(scope, share, "no projection right behind its attention")
    return attention, before, behind[0]


def _by_heads(op: Op, n_heads: int) -> bool:
    """Whether each head of an op's result depends on the same head of its input, or is rows of a product."""
    if isinstance(op.attrs, RmsNorm):
        return op.attrs.heads == n_heads
    return op.kind in ("linear", "rope", "scale", "grow", "softcap")


def _heads_of(op: Op, scope: str, share: Share, n_heads: int, a: Attention) -> Op:
    """An op for the KV heads of a share, or for the heads of q that read them."""
    each = n_heads // a.n_kv_heads
    lo, hi, size = share.a * each, share.b * each, op.out.width // n_heads
    weights = op.weights
    if op.kind == "linear":
        weights = _some_rows(weights, lo * size, hi * size)
    elif op.kind == "attention":
        weights = tuple(sinks.cols(lo, hi) for sinks in weights)
    part = _part(op, scope, share, (hi - lo) * size, weights)
    if isinstance(op.attrs, Attention):
        mine = replace(a, n_heads=hi - lo, n_kv_heads=share.b - share.a, first=a.first + share.a)
        return replace(part, attrs=mine)
    if isinstance(op.attrs, Rope):
        return replace(part, attrs=replace(op.attrs, n_heads=hi - lo))
    if isinstance(op.attrs, RmsNorm):
        return replace(part, attrs=replace(op.attrs, heads=hi - lo))
    return part


# --- experts


def _experts(ops: _Ops, scope: str, parts: Sequence[Share]) -> Pieces:
    """Every mixture of the scope."""
    mine = [op for op in ops.within(scope) if isinstance(op.attrs, Moe)]
    counts = {op.attrs.matrices for op in mine if isinstance(op.attrs, Moe)}
    if counts != {parts[0].of}:
        found = ", ".join(map(str, sorted(counts)))
        raise _nothing(scope, parts[0], f"mixtures of {found} experts" if found else "no mixture")
    return {op.out: [*_joined(op, [_experts_of(op, scope, s) for s in parts], "add")] for op in mine}


def in_groups(op: Op, most: int) -> tuple[Op, ...]:
    """A mixture as several ones that have at most `most` of its experts each, and the sums of their results;
    itself, if it has no more experts than that, or if its experts are some that were chosen."""
    a = op.attrs
    assert isinstance(a, Moe)
    n = a.matrices
    if n <= most or a.without or a.numbers:
        return (op,)
    shares = [Share("experts", at, min(at + most, n), n) for at in range(0, n, most)]
    return tuple(_joined(op, [_experts_of(op, op.scope, share) for share in shares], "add"))


def _experts_of(op: Op, scope: str, share: Share) -> Op:
    a = op.attrs
    assert isinstance(a, Moe)
    if (share.order or share.whole or share.moving) and a.held:
        raise _nothing(scope, share, "not all of them itself, so they have no order")
    order = share.order or tuple(range(share.of))
    mine = order[share.a : share.b]
    if share.moving:
        slots = tuple(sorted({*order} - {*mine})) if share.whole else tuple(sorted(mine))
        part = _part(op, scope, share, op.out.width, op.weights)
        return replace(part, attrs=replace(a, slots=slots, rest=share.whole))
    if share.order and a.groups > 1:
        raise _nothing(scope, share, "groups of them, which an order would tear apart")
    if share.whole:
        part = _part(op, scope, share, op.out.width, op.weights)
        return replace(part, attrs=replace(a, without=tuple(sorted({*order} - {*mine}))))
    if not share.order:
        weights = tuple(
            w if i in _of_all(a) else w.rows(share.a * n, share.b * n)
            for i, (w, n) in enumerate((w, w.shape[0] // a.matrices) for w in op.weights)
        )
        part = _part(op, scope, share, op.out.width, weights)
        return replace(part, attrs=replace(a, first=a.first + share.a, held=share.b - share.a))
    # The experts get other numbers: its own come first, in the weights and in the router alike.
    rest = sorted({*order} - {*mine})
    weights = tuple(
        w.blocks((*mine, *rest), 1, "experts")
        if i in _of_all(a)
        else w.blocks(mine, w.shape[0] // a.matrices, "experts")
        for i, w in enumerate(op.weights)
    )
    part = _part(op, scope, share, op.out.width, weights)
    return replace(part, attrs=replace(a, held=len(mine), numbers=mine))


def of_router(op: Op) -> tuple[Weight, ...]:
    """The weights of a mixture that belong to no expert."""
    assert isinstance(op.attrs, Moe)
    return tuple(op.weights[i] for i in sorted(_of_all(op.attrs)))


def _of_all(a: Moe) -> set[int]:
    """Which weights have a row for every expert, also for those held elsewhere: the router's."""
    return {0, *(MIXTURE + i for i, name in enumerate(a.more) if name in BY_ROUTER)}
