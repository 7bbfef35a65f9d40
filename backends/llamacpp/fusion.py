"""What `compile` fuses: products that share an input become one, and so do the rotations of q and k.

The graph itself stays unfused; this is a peephole over the ops of one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import WeightUse, use_of
from hetrun.graph import Constant, Op, Value, Weight, stack
from hetrun.ops import Moe, RmsNorm, Rope


@dataclass(frozen=True, slots=True)
class Product:
    """Linear ops of one input as one product of their stacked weights; each result is a slice of columns."""

    ops: tuple[Op, ...]
    weight: Weight
    bias: Weight | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rope ops with the same angles on neighbouring slices of one product."""

    ops: tuple[Op, ...]


Fused = Op | Product | Rotation


def fuse(ops: Sequence[Op]) -> list[Fused]:
    """The segment's ops with what belongs together in one place."""
    kin = _kin(ops)
    taken: set[int] = set()
    slices: dict[Value, tuple[Product, int]] = {}
    out: list[Fused] = []
    for i, op in enumerate(ops):
        if i in taken:
            continue
        if op.kind in ("linear", "head"):
            members = kin.get(_stacks_with(op), [i])
            taken.update(members)
            group = tuple(ops[m] for m in members)
            product = _product(group)
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
    return tuple(dict.fromkeys(use for item in fuse(ops) for use in uses(item)))


def uses(item: Fused) -> tuple[WeightUse, ...]:
    """The weights of one op, or of several that were fused, in the order in which they are written."""
    if isinstance(item, Product):
        bias = (WeightUse(item.bias, "vector"),) if item.bias else ()
        return (WeightUse(item.weight, "product"), *bias)
    op = item.ops[0] if isinstance(item, Rotation) else item
    found = tuple(use_of(op, i) for i in range(len(op.weights)))
    if isinstance(op.attrs, RmsNorm):
        return (replace(found[0], offset=op.attrs.offset),)
    if isinstance(op.attrs, Moe):
        # Rounding in its product would send tokens to other experts.
        return (replace(found[0], use="vector"), *found[1:])
    return found


def _kin(ops: Sequence[Op]) -> Mapping[tuple[object, ...], list[int]]:
    """The products that can be stacked, by what they have in common."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if common := _stacks_with(op):
            found[common].append(i)
    return found


def _stacks_with(op: Op) -> tuple[object, ...]:
    """What products must have in common to be stacked; nothing for an op that cannot be."""
    if op.kind != "linear":
        return ()
    weight, *biases = op.weights
    if any(b.quant.block > 1 for b in biases):
        return ()
    return (op.inputs, weight.quant, *(b.quant for b in biases))


def _product(ops: tuple[Op, ...]) -> Product:
    biases = [op.weights[1] for op in ops if len(op.weights) > 1]
    if len(biases) > 1:
        biases = [stack([_column(b) for b in biases])]
    return Product(ops, stack([op.weights[0] for op in ops]), biases[0] if biases else None)


def _column(vector: Weight) -> Weight:
    """A vector as a matrix of one column: those can be stacked."""
    n, size = vector.shape[1], vector.quant.row_bytes(1)
    parts = tuple(
        replace(p, rows=n) if isinstance(p, Constant) else replace(p, rows=n, row_bytes=size, stride=size)
        for p in vector.parts
    )
    return replace(vector, shape=(n, 1), parts=parts)


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
