"""What `compile` fuses: products that share an input become one, and so do the rotations of q and k.

The graph itself stays unfused; this is a peephole over the ops of one segment. `epilogues.py` is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse, fusion
from hetrun.backend.fusion import Common, Rotation, Slices
from hetrun.graph import Op, Value, Weight, stack


@dataclass(frozen=True, slots=True)
class StackedProduct:
    """Linear ops of one input as one product of their stacked weights; each result is a slice of columns."""

    ops: tuple[Op, ...]
    weight: Weight
    bias: Weight | None
    # What is computed on the way: the input's norm, a gate of the two halves, something added to the result.
    norm: Op | None = None
    gate: Op | None = None
    sum: Op | None = None

    @property
    def use(self) -> WeightUse:
        """Its weight."""
        return WeightUse(self.weight, "product")

    @property
    def input(self) -> Value:
        """What goes in."""
        return (self.norm or self.ops[0]).inputs[0]

    @property
    def last(self) -> Op:
        """Whose result comes out, where only one does."""
        return self.sum or self.gate or self.ops[0]

    @property
    def added(self) -> Value | None:
        """What is added to the result."""
        if self.sum is None:
            return None
        before = replace(self, sum=None).last.out
        return next(v for v in self.sum.inputs if v != before)


Fused = Op | StackedProduct | Rotation


def fuse(ops: Sequence[Op]) -> list[Fused]:
    """The segment's ops with what belongs together in one place."""
    kin = fusion.kin(ops, _common)
    taken: set[Value] = set()
    slices = Slices()
    out: list[Fused] = []
    for op in ops:
        if op.out in taken:
            continue
        item: Fused = op
        if op.kind in ("linear", "head"):
            item = _product(kin.get(_common(op), (op,)))
            slices.add(item.ops)
        elif op.kind == "rope":
            item = slices.rotation(op, ops, taken)
        out.append(item)
        taken.update(member.out for member in members(item))
    return out


def members(item: Fused) -> tuple[Op, ...]:
    """The ops that an item is made of."""
    if isinstance(item, StackedProduct):
        return (*item.ops, *[op for op in (item.norm, item.gate, item.sum) if op])
    return item.ops if isinstance(item, Rotation) else (item,)


def wants(ops: Sequence[Op]) -> tuple[WeightUse, ...]:
    """The weights of a segment as the fused graph reads them."""
    return tuple(dict.fromkeys(use for item in fuse(ops) for use in uses(item)))


def uses(item: Fused) -> tuple[WeightUse, ...]:
    """The weights of one op, or of several that were fused, in the order in which they are written."""
    if isinstance(item, StackedProduct):
        bias = (WeightUse(item.bias, "vector"),) if item.bias else ()
        return (item.use, *bias, *(fusion.uses(item.norm) if item.norm else ()))
    return fusion.uses(members(item)[0])


def _common(op: Op) -> Common:
    """What products must have in common to be stacked; nothing for an op that cannot be."""
    if op.kind != "linear":
        return ()
    weight, *biases = op.weights
    if any(b.quant.block > 1 for b in biases):
        return ()
    return (op.inputs, weight.quant, *(b.quant for b in biases))


def _product(ops: tuple[Op, ...]) -> StackedProduct:
    biases = [op.weights[1] for op in ops if len(op.weights) > 1]
    if len(biases) > 1:
        biases = [stack([b.upright for b in biases])]
    return StackedProduct(ops, stack([op.weights[0] for op in ops]), biases[0] if biases else None)
