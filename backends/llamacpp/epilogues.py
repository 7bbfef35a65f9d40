"""What our own products compute on the way: the norm of what goes in, the gate between two halves of what
comes out, and what is added to that. Each of these was a node of ggml's, at whose end all threads meet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from hetrun.backend import WeightUse
from hetrun.backend.fusion import Dataflow
from hetrun.backends.llamacpp.fusion import Fused, StackedProduct, members
from hetrun.backends.llamacpp.kernels.matmul import ROWS
from hetrun.graph import Op, Value
from hetrun.graph.ops import RmsNorm

Takes = Callable[[WeightUse], bool]


def join(items: Sequence[Fused], kept: Collection[Value], takes: Takes) -> list[Fused]:
    """The items with what can be computed inside of products there; `kept` values must come out as they are.

    `takes` says which weights our products multiply by.
    """
    joiner = Joiner(items, kept, takes)
    for i, item in enumerate(items):
        if isinstance(item, StackedProduct) and takes(item.use):
            joiner.gate(i)
            joiner.add(i)
    for i, item in enumerate(items):
        if isinstance(item, Op) and isinstance(item.attrs, RmsNorm) and item.attrs.heads == 1:
            joiner.norm(i, item)
    return [item for item in joiner.items if item is not None]


class Joiner:
    """The items while they are joined: an item that is part of another now is None."""

    def __init__(self, items: Sequence[Fused], kept: Collection[Value], takes: Takes) -> None:
        self.items: list[Fused | None] = list(items)
        self._kept, self._takes = kept, takes
        self._flow = Dataflow(range(len(items)), lambda i: members(items[i]), kept)

    def gate(self, i: int) -> None:
        """A gate that alone reads the two halves of a product becomes part of the product."""
        product = self.items[i]
        assert isinstance(product, StackedProduct)
        if len(product.ops) != 2 or product.bias:
            return
        halves = tuple(op.out for op in product.ops)
        at = self._flow.only_reader(halves[0])
        if at is None or self._flow.only_reader(halves[1]) != at:
            return
        gate = self.items[at]
        fits = halves[0].width == halves[1].width and halves[0].width % ROWS == 0
        if fits and isinstance(gate, Op) and gate.kind in ("swiglu", "geglu") and gate.inputs == halves:
            self.items[i], self.items[at] = replace(product, gate=gate), None

    def add(self, i: int) -> None:
        """A sum goes into the product whose result it adds to something that is there before it."""
        product = self.items[i]
        assert isinstance(product, StackedProduct)
        result = product.last.out
        at = self._flow.only_reader(result) if len(product.ops) == 1 or product.gate else None
        total = None if at is None else self.items[at]
        if at is None or not isinstance(total, Op) or total.kind != "add":
            return
        others = [v for v in total.inputs if v != result]
        if len(others) == 1 and ((made := self._flow.maker(others[0])) is None or made < i):
            self.items[i], self.items[at] = replace(product, sum=total), None

    def norm(self, i: int, norm: Op) -> None:
        """A norm goes into all who read it, if these are products: computing it twice is cheap."""
        readers = {at: self.items[at] for at in self._flow.readers(norm.out)}
        products = {
            at: p
            for at, p in readers.items()
            if isinstance(p, StackedProduct) and self._takes(p.use) and p.added != norm.out
        }
        if norm.out in self._kept or not readers or len(products) < len(readers):
            return
        self.items[i] = None
        for at, product in products.items():
            self.items[at] = replace(product, norm=norm)
