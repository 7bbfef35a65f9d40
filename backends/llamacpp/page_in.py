"""Nodes in front of products by mapped weights: they bring what these are about to read (kernels/pages.c)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.kernels.paging import NONE, BringNode, Visit
from hetrun.backends.llamacpp.mapped_weights import MappedPages

if TYPE_CHECKING:
    from hetrun.backends.llamacpp.lowering import GgmlEmitter

ALL_THREADS = -1


@dataclass(slots=True)
class PagedInNodes:
    """The nodes in front of the products of one op; ggml has only the addresses of their structures."""

    visit: Visit
    brings: tuple[BringNode, ...]
    chosen: int | None  # a tensor: the experts of each row

    def point(self) -> None:
        """Write down where the chosen experts will stand; ggml has given the graph its memory."""
        if self.chosen is not None:
            self.visit.ids = ggml_api.tensor_at(self.chosen).data


def bring_experts(
    e: GgmlEmitter, mapped: MappedPages, uses: tuple[WeightUse, ...], chosen: int
) -> tuple[int, int]:
    """The chosen experts twice: as the products by the first two weights take them, gate and up, and as that
    by the last one, which is read from disk while the others compute."""
    if (pager := mapped.pager) is None:
        return chosen, chosen
    fields = ggml_api.tensor_at(chosen)
    visit = Visit(
        pool=addressof(mapped.pool),
        rows=fields.ne[1],
        used=fields.ne[0],
        stride=fields.nb[1] // 4,
        unit=mapped.units(uses),
        units=uses[0].matrices,
        next=NONE,
    )
    late = len(uses) - 1
    first, last = BringNode(addressof(visit), 0, late), BringNode(addressof(visit), late, len(uses))
    e.inputs.brought.append(PagedInNodes(visit, (first, last), chosen))
    early = _node(e, _node(e, chosen, pager.visit, visit), pager.bring, first)
    return early, _node(e, early, pager.bring, last)


def bring_weight(e: GgmlEmitter, mapped: MappedPages, use: WeightUse, x: int) -> int:
    """What the product takes for x."""
    if (pager := mapped.pager) is None:
        return x
    visit = Visit(pool=addressof(mapped.pool), unit=mapped.units((use,)), units=1, next=NONE)
    bring = BringNode(addressof(visit), 0, 1)
    e.inputs.brought.append(PagedInNodes(visit, (bring,), None))
    return _node(e, _node(e, x, pager.visit, visit), pager.bring, bring)


def connect(brought: Sequence[PagedInNodes]) -> None:
    """Once a graph has its memory. Weights that every pass reads are asked for one ahead, in a circle."""
    for each in brought:
        each.point()
    whole = [each.visit for each in brought if each.chosen is None]
    for visit, after in zip(whole, [*whole[1:], *whole[:1]], strict=True):
        visit.next = after.unit if after.unit != visit.unit else NONE


def _node(e: GgmlEmitter, x: int, function: int, data: Visit | BringNode) -> int:
    """The same tensor, behind a call."""
    none = (c_void_p * 1)()
    node: int = e.lib.ggml_custom_inplace(e.ctx, x, none, 0, function, ALL_THREADS, addressof(data))
    ggml_api.tensor_at(node).name = ggml_api.PAGES.encode()
    return node
