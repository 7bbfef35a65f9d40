"""What backends that fuse ops share: which op alone reads a value, which products and rotations can be one,
and what a lone op reads.

The graph stays unfused. What a backend makes of these, and of activations, its own `fusion.py` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from hetrun.backend.interface import WeightUse, use_of, writes_rows
from hetrun.graph import Op, Value
from hetrun.graph.ops import Moe, RmsNorm, Rope

Common = tuple[object, ...]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rope ops with the same angles on neighbouring slices of one product."""

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """act(gate(x)) * up(x)."""

    gate: Op
    up: Op
    act: Op


class Dataflow(Generic[Item]):
    """Which item of a segment makes each value, and which read it; an item is one op, or several that are
    fused."""

    def __init__(
        self, items: Iterable[Item], members: Callable[[Item], Sequence[Op]], kept: Collection[Value] = ()
    ) -> None:
        """`members` are the ops of an item. Values in `kept` are read by others too."""
        self._kept = kept
        self._makers: dict[Value, Item] = {}
        self._readers: dict[Value, list[Item]] = defaultdict(list)
        for item in items:
            ops = members(item)
            self._makers.update((op.out, item) for op in ops)
            for value in {v for op in ops for v in op.inputs}:
                self._readers[value].append(item)

    def maker(self, value: Value) -> Item | None:
        """The item whose result a value is; None: it comes from outside."""
        return self._makers.get(value)

    def readers(self, value: Value) -> Sequence[Item]:
        """The items that read a value, in their order."""
        return self._readers.get(value, ())

    def only_reader(self, value: Value) -> Item | None:
        """The item for which alone a value is made."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and value not in self._kept else None


def dataflow(ops: Iterable[Op], kept: Collection[Value] = ()) -> Dataflow[Op]:
    """That of ops before they are fused."""
    return Dataflow(ops, lambda op: (op,), kept)


def has_token_rows(ops: Iterable[Op]) -> bool:
    """Whether one of these must run even if no row is wanted: attention fills the cache all the same."""
    return any(op.out.rows == "tokens" or writes_rows(op) for op in ops)


def kin(ops: Sequence[Op], common: Callable[[Op], Common]) -> Mapping[Common, tuple[Op, ...]]:
    """Ops by what they have in common; one that has nothing belongs to no other."""
    found: dict[Common, list[Op]] = defaultdict(list)
    for op in ops:
        if key := common(op):
            found[key].append(op)
    return {key: tuple(members) for key, members in found.items()}


class Slices:
    """Which values are slices of one product, and in which order they lie there."""

    def __init__(self) -> None:
        self._places: dict[Value, tuple[Value, int]] = {}

    def add(self, ops: Sequence[Op]) -> None:
        """The results of these ops lie next to each other, in this order."""
        self._places.update({op.out: (ops[0].out, n) for n, op in enumerate(ops)})

    def rotation(self, op: Op, ops: Sequence[Op], taken: Collection[Value]) -> Rotation:
        """A rope op, with one on a slice next to its own that turns by the same angles, if one is left."""
        for other in ops:
            if other.kind == "rope" and other is not op and other.out not in taken:
                step = self._step(op.inputs[0], other.inputs[0])
                if abs(step) == 1 and _same_angles(op, other):
                    return Rotation((op, other) if step > 0 else (other, op))
        return Rotation((op,))

    def _step(self, a: Value, b: Value) -> int:
        """How many slices lie from one to another; 0 if they are of different products."""
        (product, mine), (of, its) = self._places.get(a, (a, 0)), self._places.get(b, (b, 0))
        return its - mine if product == of else 0


def uses(op: Op) -> tuple[WeightUse, ...]:
    """The weights of an op that stands alone, as fusing backends read them."""
    found = tuple(use_of(op, i) for i in range(len(op.weights)))
    if isinstance(op.attrs, RmsNorm):
        return (replace(found[0], offset=op.attrs.offset),)
    if isinstance(op.attrs, Moe):
        # Rounding in its product would send tokens to other experts.
        return (replace(found[0], use="vector"), *found[1:])
    return found


def _same_angles(a: Op, b: Op) -> bool:
    assert isinstance(a.attrs, Rope)
    assert isinstance(b.attrs, Rope)
    return a.weights == b.weights and replace(a.attrs, n_heads=0) == replace(b.attrs, n_heads=0)
