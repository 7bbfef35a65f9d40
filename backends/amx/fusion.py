"""What is run as one: products of one input, an activation inside a product, rotations of q and k.

The uses of weights follow from the ops alone, so that `wants` and `compile` agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.backend import Use, WeightUse, fusion
from hetrun.backend.fusion import Common, GatedProduct, Rotation, Slices
from hetrun.graph import Op, Value, Weight, stack

GATES = ("swiglu", "geglu")
ACTIVATIONS = ("relu", "gelu")


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Linear ops of one input as one product of their weights; each result is a slice of columns."""

    ops: tuple[Op, ...]
    weight: Weight


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """A linear op, and what its result goes through."""

    linear: Op
    act: Op


Fused = Op | StackedLinear | ActivatedLinear | GatedProduct | Rotation


def fuse(ops: Sequence[Op], kept: Sequence[Value], inside: bool) -> list[Fused]:
    """The ops with what belongs together in one place.

    Results in `kept` are made as they stand. `inside`: activations may run inside of products.
    """
    return _AmxFusion(ops, frozenset(kept), inside).run()


def wants(ops: Sequence[Op], inside: bool) -> tuple[WeightUse, ...]:
    """The weights of a segment as the fused ops read them."""
    return tuple(dict.fromkeys(use for item in fuse(ops, (), inside) for use in uses(item)))


def uses(item: Fused) -> tuple[WeightUse, ...]:
    """The weights of an item: matrices first, then for each of them the bias that it may have."""
    match item:
        case StackedLinear():
            use: Use = "logits" if item.ops[0].kind == "head" else "product"
            return (WeightUse(item.weight, use), *(b for op in item.ops for b in _bias(op)))
        case ActivatedLinear():
            return _linear_uses(item.linear)
        case GatedProduct():
            return (*_linear_uses(item.gate), *_linear_uses(item.up))
        case Rotation():
            return uses(item.ops[0])
    return fusion.uses(item)


def members(item: Fused) -> tuple[Op, ...]:
    """The ops that an item is made of."""
    match item:
        case StackedLinear() | Rotation():
            return item.ops
        case ActivatedLinear():
            return (item.linear, item.act)
        case GatedProduct():
            return (item.gate, item.up, item.act)
    return (item,)


def _linear_uses(op: Op) -> tuple[WeightUse, ...]:
    return (WeightUse(op.weights[0], "product"), *_bias(op))


def _bias(op: Op) -> tuple[WeightUse, ...]:
    return tuple(WeightUse(w, "vector") for w in op.weights[1:])


class _AmxFusion:
    """One trip over the ops of a segment."""

    def __init__(self, ops: Sequence[Op], kept: frozenset[Value], inside: bool) -> None:
        self._ops = ops
        self._kept = kept
        self._inside = inside
        self._flow = fusion.dataflow(ops)
        self._within = self._find_within() if inside else {}
        self._stacks = self._find_stacks()
        self._slices = Slices()
        self._taken: set[Value] = set()

    def run(self) -> list[Fused]:
        out: list[Fused] = []
        for op in self._ops:
            if op.out not in self._taken:
                for item in self._items(op):
                    out.append(item)
                    self._taken.update(member.out for member in members(item))
        return out

    def _items(self, op: Op) -> Sequence[Fused]:
        """What stands where the op stood; nothing if its reader makes it."""
        if op.kind in ("linear", "head"):
            if reader := self._within.get(op.out):
                return () if self._hidden(reader) else (StackedLinear((op,), op.weights[0]),)
            group = self._stacks.get(_common(op), (op,)) if op.kind == "linear" else (op,)
            return (self._stack(group),)
        if op.kind == "rope":
            return (self._slices.rotation(op, self._ops, self._taken),)
        makers = [m for v in op.inputs if self._within.get(v) is op and (m := self._flow.maker(v))]
        if makers and self._hidden(op):
            return (
                ActivatedLinear(makers[0], op)
                if len(makers) == 1
                else GatedProduct(makers[0], makers[1], op),
            )
        return (op,)

    def _hidden(self, act: Op) -> bool:
        """Whether what an activation reads is not kept for others."""
        return not self._kept.intersection(act.inputs)

    def _find_within(self) -> dict[Value, Op]:
        """Products that only an activation reads, by result."""
        found: dict[Value, Op] = {}
        for op in self._ops:
            if op.kind in GATES + ACTIVATIONS and len(set(op.inputs)) == len(op.inputs):
                if all(self._only_read_by(op, value) for value in op.inputs):
                    found.update(dict.fromkeys(op.inputs, op))
        return found

    def _only_read_by(self, op: Op, value: Value) -> bool:
        maker = self._flow.maker(value)
        return maker is not None and maker.kind == "linear" and self._flow.only_reader(value) is op

    def _find_stacks(self) -> dict[Common, tuple[Op, ...]]:
        """The products that can be one, by what they have in common; those to be turned come first."""
        free = [op for op in self._ops if op.kind == "linear" and op.out not in self._within]
        return {
            common: tuple(sorted(ops, key=lambda op: not self._is_turned(op)))
            for common, ops in fusion.kin(free, _common).items()
        }

    def _is_turned(self, op: Op) -> bool:
        return any(reader.kind == "rope" for reader in self._flow.readers(op.out))

    def _stack(self, ops: tuple[Op, ...]) -> StackedLinear:
        self._slices.add(ops)
        return StackedLinear(ops, stack([op.weights[0] for op in ops]))


def _common(op: Op) -> Common:
    """What products must have in common to be stacked."""
    return (op.inputs, op.weights[0].quant)
