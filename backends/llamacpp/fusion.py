"""What `compile` fuses: products that share an input become one, and so do the rotations of q and k.

The graph itself stays unfused; this is a peephole over the ops of one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse, use_of
from hetrun.graph import Op, Value, Weight, stack
from hetrun.ops import Rope


@dataclass(frozen=True, slots=True)
class Product:
    """Linear ops of one input as one product of their stacked weights; each result is a slice of columns."""

    ops: tuple[Op, ...]
    weight: Weight


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rope ops with the same angles on neighbouring slices of one product."""

    ops: tuple[Op, ...]


Fused = Op | Product | Rotation


def fuse(ops: Sequence[Op]) -> list[Fused]:
    """The segment's ops with what belongs together in one place."""
    taken: set[int] = set()
    slices: dict[Value, tuple[Product, int]] = {}
    out: list[Fused] = []
    for i, op in enumerate(ops):
        if i in taken:
            continue
        if op.kind in ("linear", "head"):
            members = _with_same_input(ops, i)
            taken.update(members)
            group = tuple(ops[m] for m in members)
            product = Product(group, stack([m.weights[0] for m in group]))
            slices.update({m.out: (product, n) for n, m in enumerate(group)})
            out.append(product)
        elif op.kind == "rope":
            members = _with_same_angles(ops, i, slices)
            taken.update(members)
            out.append(Rotation(tuple(ops[m] for m in members)))
        else:
            out.append(op)
    return out


def wants(ops: Sequence[Op]) -> tuple[WeightUse, ...]:
    """The weights of a segment as the fused graph reads them."""
    found: dict[WeightUse, None] = {}
    for item in fuse(ops):
        if isinstance(item, Product):
            found[WeightUse(item.weight, "product")] = None
            found.update({WeightUse(op.weights[1], "vector"): None for op in item.ops if len(op.weights) > 1})
        else:
            members = item.ops if isinstance(item, Rotation) else (item,)
            found.update(
                {WeightUse(w, use_of(op, i)): None for op in members for i, w in enumerate(op.weights)}
            )
    return tuple(found)


def _with_same_input(ops: Sequence[Op], first: int) -> list[int]:
    """This product and the later ones that can be stacked under it."""
    op = ops[first]
    if len(op.weights) != 1 or op.kind != "linear":
        return [first]
    return [first] + [
        i
        for i in range(first + 1, len(ops))
        if ops[i].kind == "linear"
        and ops[i].inputs == op.inputs
        and len(ops[i].weights) == 1
        and ops[i].weights[0].quant is op.weights[0].quant
    ]


def _with_same_angles(ops: Sequence[Op], first: int, slices: dict[Value, tuple[Product, int]]) -> list[int]:
    """This rope and the next one, where both rotate neighbouring slices of one product in the same way."""
    op = ops[first]
    for i in range(first + 1, len(ops)):
        other = ops[i]
        if other.kind != "rope":
            continue
        a, b = slices.get(op.inputs[0]), slices.get(other.inputs[0])
        neighbours = a is not None and b is not None and a[0] is b[0] and b[1] == a[1] + 1
        if neighbours and other.weights == op.weights and _angles(other) == _angles(op):
            return [first, i]
        return [first]
    return [first]


def _angles(op: Op) -> Rope:
    assert isinstance(op.attrs, Rope)
    return replace(op.attrs, n_heads=0)
