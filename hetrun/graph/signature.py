"""Forms: what work is, wherever in a model it stands. Two layers of one shape have one form, and share what
was measured of either."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.graph.identity_cache import IdentityCache
from hetrun.graph.ir import Graph, Op, Value
from hetrun.graph.ops import Attention, Attrs, Moe, Stateful


@dataclass(frozen=True, slots=True)
class Unit:
    """What a planner places as one: `blk.3.attn`, `blk.3.ffn`, `embed`, `output`."""

    scope: str
    ops: tuple[Op, ...]
    form: str


def units(graph: Graph) -> tuple[Unit, ...]:
    """A graph at the coarse level, in order."""
    members: dict[str, list[Op]] = {}
    for op in graph.ops:
        members.setdefault(coarse(op.scope), []).append(op)
    return tuple(Unit(scope, tuple(ops), form_of(ops)) for scope, ops in members.items())


def coarse(scope: str) -> str:
    """The scope that is placed as one: a layer's attention, its feed-forward part, or what stands outside."""
    parts = scope.split(".")
    return ".".join(parts[: 3 if parts[0] == "blk" else 1])


def form_of(ops: Sequence[Op]) -> str:
    """A name that is equal for equal work: a word for people, and a digest of what the time depends on."""
    numbers: dict[Value, int] = {}
    facts = []
    for op in ops:
        inputs = tuple(numbers.setdefault(v, len(numbers)) for v in op.inputs)
        numbers.setdefault(op.out, len(numbers))
        weights = tuple((w.shape, w.quant.name) for w in op.weights)
        widths = tuple((v.width, v.rows) for v in (*op.inputs, op.out))
        facts.append((op.kind, inputs, widths, weights, repr(_anywhere(op.attrs))))
    return f"{_word(ops)}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def _anywhere(attrs: Attrs) -> Attrs:
    if isinstance(attrs, Attention):
        return replace(attrs, layer=0, first=0)
    if isinstance(attrs, Stateful):
        return replace(attrs, layer=0)
    if isinstance(attrs, Moe):
        # Which experts are left out differs from layer to layer; what it takes depends on how many there are.
        return replace(
            attrs,
            first=0,
            without=tuple(range(len(attrs.without))),
            numbers=(),
            slots=tuple(range(len(attrs.slots))),
        )
    return attrs


def _word(ops: Sequence[Op]) -> str:
    scopes = list(dict.fromkeys(coarse(op.scope).split(".")[-1] for op in ops))
    layers = {op.scope.split(".")[1] for op in ops if op.scope.startswith("blk.")}
    if len(layers) > 1:
        return f"{len(layers)}layers"
    return "+".join(scopes)


def of_wanted_rows(ops: Sequence[Op]) -> bool:
    """Whether only wanted rows go in and come out: what the ops take does not grow with the pass."""
    return all(v.rows == "wanted" for op in ops for v in (*op.inputs, op.out))


class Forms:
    """Forms of ops that live on, each computed once; by identity, because equality costs as much."""

    def __init__(self) -> None:
        self._known = IdentityCache[Sequence[Op], str]()

    def of(self, ops: Sequence[Op]) -> str:
        """The form of some ops."""
        return self._known.get(ops, form_of)
