"""Closer results for a little time: what `--precision exact` adds to a plan that is fast.

The fastest plan of a prompt may run a few units on a backend that rounds more than the others, the head among
them, and a few units can make most of what all rounding does to the logits. So each bucket is also placed
with only those backends that round least, and that is what runs if it takes hardly longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from hetrun.backend import Precision
from hetrun.planner.residency import BucketDemand, BucketPlacement, Copies, best_of, used_by
from hetrun.planner.shortest_path import Chain
from hetrun.system.cpu_flags import cpu_flags

PRICE = 0.1  # of a pass: more time is not given
BF16 = "amx_bf16"  # instructions that multiply such numbers as fast as those of 8 bits


def precision_of(asked: str | None) -> Precision:
    """What was asked for; else exact where that costs little: elsewhere prompts are read half as fast."""
    if asked is not None:
        return cast("Precision", asked)
    return "exact" if BF16 in cpu_flags() else "fast"


def closer(
    demands: Sequence[BucketDemand],
    placed: Sequence[BucketPlacement],
    copies: Copies,
    rounding: Sequence[Mapping[str, float]],
) -> list[BucketPlacement]:
    """The same placements, or closer ones that take little longer and fit into memory beside the others.

    `rounding` is for each unit the error that each backend makes in its results.
    """
    found, levels = list(placed), sorted({r for row in rounding for r in row.values()})
    for i, (demand, fast) in enumerate(zip(demands, placed, strict=True)):
        rest = used_by(found[:i] + found[i + 1 :])
        for level in levels:
            ways = {t: _within(chain, level, rounding) for t, chain in demand.ways.items()}
            near = best_of(replace(demand, ways=ways))
            if near.seconds > (1 + PRICE) * fast.seconds:
                continue
            if copies.fit(rest | used_by([near])):
                found[i] = replace(near, given=max(0.0, near.seconds - fast.seconds))
                break
    return found


def _within(chain: Chain, level: float, rounding: Sequence[Mapping[str, float]]) -> Chain:
    """The chain with backends that round no more than that; a unit that has none keeps its closest."""
    allowed = []
    for times, errors in zip(chain.times, rounding, strict=True):
        least = max(level, min((errors[b] for b in times), default=level))
        allowed.append(frozenset(b for b in times if errors[b] <= least))
    return chain.only(allowed)
