"""Where each layer's weights lie and what computes with them: a map for people."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hetrun.client.queries import LayerPlace

if TYPE_CHECKING:  # fronts have no numpy
    from hetrun.backend.weight_streaming import Piece
    from hetrun.graph import Op
    from hetrun.planner.plan import PlanSet

_LAYER = re.compile(r"blk\.\d+")


def layer_of(scope: str) -> str:
    """The part of a scope that names a layer."""
    found = _LAYER.match(scope)
    return found[0] if found else scope.partition(".")[0]


Crosses = Callable[["Op", str], int]  # bytes of an op's weights that come over a link to this backend


def places_of(
    plans: PlanSet, streamed: Iterable[Piece] = (), crosses: Crosses = lambda op, backend: 0
) -> tuple[LayerPlace, ...]:
    """All layers, in the order in which a pass takes them."""
    buckets = list(plans.plans)
    if not buckets:
        return ()
    nbytes = _bytes_of_layers(plans)
    from_disk = Counter[str]()
    for piece in streamed:
        from_disk[layer_of(piece.scope)] += piece.nbytes
    over_links = Counter[str]()
    for segment in plans.plans[buckets[0]].segments:
        for op in segment.ops:
            over_links[layer_of(op.scope)] += crosses(op, segment.backend)
    one, many = _ops_of_layers(plans, buckets[0]), _ops_of_layers(plans, buckets[-1])
    return tuple(
        LayerPlace(
            layer, nbytes[layer], from_disk[layer], over_links[layer], one.get(layer, {}), many.get(layer, {})
        )
        for layer in dict.fromkeys([*one, *many])
    )


def _ops_of_layers(plans: PlanSet, bucket: str) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for segment in plans.plans[bucket].segments:
        for op in segment.ops:
            found[layer_of(op.scope)][segment.backend] += 1
    return {layer: dict(backends) for layer, backends in found.items()}


def _bytes_of_layers(plans: PlanSet) -> Mapping[str, int]:
    """Each weight once, however many plans have it: in the first of them."""
    found = Counter[str]()
    first = next(iter(plans.plans.values()))
    weights = {
        w.name: (layer_of(op.scope), w.nbytes) for s in first.segments for op in s.ops for w in op.weights
    }
    for layer, nbytes in weights.values():
        found[layer] += nbytes
    return found
