"""What is given to the device as one: products of one input, a gate inside of its products, a sum behind one.

The weights stay what they are: nothing is stacked, so what a segment wants does not depend on what is fused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import Segment, WeightUse, fusion
from hetrun.backend.fusion import GatedProduct
from hetrun.backends.cuda.weights import held_as
from hetrun.graph import Op, Value
from hetrun.graph.ops import BY_ROUTER, MIXTURE, Moe, Rope

MOST = 3  # products of one launch
GATES = ("swiglu", "geglu")
MOST_FUSED = 64  # segments: more than those of all plans that are in use


@dataclass(frozen=True, slots=True)
class SiblingProducts:
    """Linear ops with one input and one type of weights; what each of them is added to, if it is."""

    ops: tuple[Op, ...]
    sums: tuple[Op | None, ...]

    @property
    def outs(self) -> tuple[Value, ...]:
        """The results."""
        return tuple(s.out if s else op.out for op, s in zip(self.ops, self.sums, strict=True))

    def addend(self, i: int) -> Value | None:
        """What the i-th product is added to."""
        found = self.sums[i]
        if found is None:
            return None
        return next(v for v in found.inputs if v != self.ops[i].out)


@dataclass(frozen=True, slots=True)
class RotatedAttention:
    """An attention whose queries and keys are turned alike, for no other op, and whose keys are its own."""

    query: Op
    key: Op
    attention: Op


Item = Op | SiblingProducts | GatedProduct | RotatedAttention


def members(item: Item) -> tuple[Op, ...]:
    """The ops that an item is made of."""
    match item:
        case SiblingProducts():
            return (*item.ops, *[s for s in item.sums if s])
        case GatedProduct():
            return (item.gate, item.up, item.act)
        case RotatedAttention():
            return (item.query, item.key, item.attention)
    return (item,)


def uses(op: Op) -> tuple[WeightUse, ...]:
    """The weights of an op as this backend reads them."""
    return fusion.uses(op) if op.kind != "moe" else tuple(_expert_uses(op))


def _expert_uses(op: Op) -> list[WeightUse]:
    """A router is multiplied as any other matrix. What each expert has of its own may lie in slots."""
    a, (first, *others) = op.attrs, fusion.uses(op)
    assert isinstance(a, Moe)
    if a.slots:
        per_expert = [True] * (MIXTURE - 1) + [name not in BY_ROUTER for name in a.more]
        others = [
            replace(use, matrices=a.n_experts, slots=a.slots) if mine else use
            for use, mine in zip(others, per_expert, strict=True)
        ]
    return [replace(first, use="product"), *others]


@dataclass(frozen=True, slots=True)
class FusedSegment:
    """The items of a segment, what their ops read, and after which of them a value that the segment keeps to
    itself is not read any more."""

    segment: Segment
    items: Sequence[Item]
    ends: Mapping[int, Sequence[Value]]  # by the number of the last item that reads them
    uses: Mapping[int, Sequence[WeightUse]]  # the weights of an op, by its id
    turning: Mapping[int, int]  # which ropes turn alike: a number, by the id of the op


class Fusions:
    """The items of the last segments: the same for passes of any shape, so they are found out once."""

    def __init__(self) -> None:
        self._found: dict[int, FusedSegment] = {}

    def of(self, segment: Segment) -> FusedSegment:
        """Those of a segment."""
        found = self._found.get(id(segment))
        if found is None or found.segment is not segment:
            items = fuse(segment.ops, segment.writes)
            ends, weights = _ends(items, segment.writes), {id(op): uses(op) for op in segment.ops}
            found = FusedSegment(segment, items, ends, weights, _turning(segment.ops))
            self._found[id(segment)] = found
            while len(self._found) > MOST_FUSED:
                del self._found[next(iter(self._found))]
        return found


def _turning(ops: Sequence[Op]) -> Mapping[int, int]:
    numbers, found = dict[Op, int](), dict[int, int]()
    for op in ops:
        if isinstance(a := op.attrs, Rope):
            alike = replace(op, inputs=(), out=Value("", 0, "tokens"), attrs=replace(a, n_heads=1), scope="")
            found[id(op)] = numbers.setdefault(alike, len(numbers))
    return found


def _ends(items: Sequence[Item], kept: Sequence[Value]) -> Mapping[int, Sequence[Value]]:
    last: dict[Value, int] = {}
    for i, item in enumerate(items):
        for op in members(item):
            last.update(dict.fromkeys((*op.inputs, op.out), i))
    found: dict[int, list[Value]] = {}
    for value, i in last.items():
        if value not in kept:
            found.setdefault(i, []).append(value)
    return found


def fuse(ops: Sequence[Op], kept: Collection[Value]) -> list[Item]:
    """The ops in order, with what belongs together where its last member stood; values in `kept` are made."""
    found = _CudaFusion(ops, frozenset(kept))
    return found.run()


class _CudaFusion:
    """One trip over the ops of a segment."""

    def __init__(self, ops: Sequence[Op], kept: frozenset[Value]) -> None:
        self._ops = ops
        self._flow = fusion.dataflow(ops, kept)
        self._inside: dict[Value, Op] = {}  # products that are made inside of another op, by their results
        for op in ops:
            if op.kind in GATES and self._is_gated(op):
                self._inside.update(dict.fromkeys(op.inputs, op))
            elif op.kind == "add" and (product := self._summed(op)):
                self._inside[product.out] = op
            elif op.kind == "attention" and self._is_turned(op):
                self._inside.update(dict.fromkeys(op.inputs[:2], op))

    def run(self) -> list[Item]:
        items: list[Item] = []
        taken: set[Value] = set()
        for op in self._ops:
            if op.out in taken or op.out in self._inside:
                continue
            if op.kind in GATES and self._inside.get(op.inputs[0]) is op:
                gate, up = self._makers(op.inputs)
                items.append(GatedProduct(gate, up, op))
            elif op.kind == "add" and (product := self._hidden(op)):
                items.append(SiblingProducts((product,), (op,)))
            elif op.kind == "attention" and self._inside.get(op.inputs[0]) is op:
                query, key = self._makers(op.inputs[:2])
                items.append(RotatedAttention(query, key, op))
            elif op.kind in ("linear", "head"):
                kin = [k for k in self._kin(op) if k.out not in taken][:MOST]
                taken.update(k.out for k in kin)
                items.append(SiblingProducts(tuple(kin), (None,) * len(kin)))
            else:
                items.append(op)
        return items

    def _kin(self, op: Op) -> list[Op]:
        """Products of the same input and type, the op first; of this kind only what stands by itself."""
        others = [
            other
            for other in self._flow.readers(op.inputs[0])
            if other is not op
            and (other.kind, other.inputs) == (op.kind, op.inputs)
            and other.out not in self._inside
            and _type(other) == _type(op)
        ]
        return [op, *others]

    def _is_gated(self, op: Op) -> bool:
        gate, up = (self._flow.maker(v) for v in op.inputs)
        if gate is None or up is None or gate is up or {gate.kind, up.kind} != {"linear"}:
            return False
        same = gate.inputs == up.inputs and _type(gate) == _type(up)
        return same and all(self._flow.only_reader(v) is op for v in op.inputs)

    def _is_turned(self, op: Op) -> bool:
        makers = [self._flow.maker(v) for v in op.inputs[:2]]
        alike = {
            (m.attrs.head_dim, m.attrs.n_rot, m.attrs.interleaved)
            if m and isinstance(m.attrs, Rope)
            else None
            for m in makers
        }
        own = len(op.inputs) == 3 and len(set(op.inputs)) == 3  # queries, keys and values
        return (
            own
            and len(alike) == 1
            and None not in alike
            and all(self._flow.only_reader(v) is op for v in op.inputs[:2])
        )

    def _summed(self, op: Op) -> Op | None:
        """The product that a sum is made inside of: the last one, whose other addend is there by then."""
        for value in reversed(op.inputs):
            maker = self._flow.maker(value)
            other = next((v for v in op.inputs if v != value), None)
            if other is None or maker is None or maker.kind != "linear" or other in self._inside:
                continue
            if self._flow.only_reader(value) is op:
                return maker
        return None

    def _hidden(self, op: Op) -> Op | None:
        return next(iter(self._makers(v for v in op.inputs if self._inside.get(v) is op)), None)

    def _makers(self, values: Iterable[Value]) -> list[Op]:
        """Of values that ops of the segment make."""
        return [op for value in values if (op := self._flow.maker(value))]


def _type(op: Op) -> str:
    return held_as(uses(op)[0]).name
