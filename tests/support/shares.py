"""Scopes of a model that are shared out between backends."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.graph import Graph, in_scope
from hetrun.graph.ops import Attention, Moe
from hetrun.graph.sharding import Kind, Share, shared_by_heads
from hetrun.planner.plan import Placement


def shared(scope: str, kind: Kind, borders: Sequence[int], names: Sequence[str]) -> tuple[Placement, ...]:
    """A scope shared out at these borders, the first of them 0, the last one all."""
    parts = zip(borders, borders[1:], names, strict=False)
    return tuple(Placement(scope, name, "a test", Share(kind, a, b, borders[-1])) for a, b, name in parts)


def everywhere(name: str, *others: Placement) -> tuple[Placement, ...]:
    return (Placement("", name, "a test"), *others)


def shareable(graph: Graph, step: int = 1) -> list[tuple[str, Kind, int, int]]:
    """Every scope with something to share: the kind, of how many, and what the borders are multiples of."""
    found: list[tuple[str, Kind, int, int]] = []
    for op in graph.ops:
        if op.kind in ("linear", "head") and op.out.width > step:
            found.append((op.scope, "rows", op.out.width, step))
        elif isinstance(op.attrs, Attention) and op.attrs.n_kv_heads > 1:
            scope = op.scope.removesuffix(".score")
            if shared_by_heads([other for other in graph.ops if in_scope(other.scope, scope)], scope):
                found.append((scope, "heads", op.attrs.n_kv_heads, 1))
        elif isinstance(op.attrs, Moe):
            found.append((op.scope, "experts", op.attrs.n_experts, 1))
    return found
