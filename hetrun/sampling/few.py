"""The usual rules on a handful of ranked logits, as plain floats.

Behind a decode step all caches are cold, and each function of a library costs microseconds before it does
anything: with plain loops forty candidates are through here before numpy has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from typing import Any, TypeAlias

from hetrun.sampling import rules
from hetrun.sampling.candidates import Rule

FEW = 128

Ranked: TypeAlias = list[float]
Cut: TypeAlias = Callable[[Ranked], Ranked]


def top_k(k: int) -> Cut:
    return lambda logits: logits[:k]


def top_p(p: float, min_keep: int) -> Cut:
    def cut(logits: Ranked) -> Ranked:
        ends = masses(logits)
        bar = p * ends[-1]
        kept = 0
        while ends[kept] < bar:
            kept += 1
        return logits[: max(kept + 1, min_keep)]

    return cut


def min_p(p: float, min_keep: int) -> Cut:
    def cut(logits: Ranked) -> Ranked:
        least = logits[0] + log(p)
        kept = len(logits)
        while kept > min_keep and logits[kept - 1] < least:
            kept -= 1
        return logits[:kept]

    return cut


def temperature(value: float) -> Cut:
    return lambda logits: [logit / value for logit in logits]


def draw(logits: Ranked, u: float) -> int:
    """The place of the one on which u, in [0, 1), falls when they lie side by side."""
    ends = masses(logits)
    point = u * ends[-1]
    if point >= ends[-1]:  # by rounding
        return ends.index(ends[-1])
    place = 0
    while ends[place] <= point:
        place += 1
    return place


def masses(logits: Ranked) -> list[float]:
    """How probable each and those before it are together, in units of the best."""
    peak, total, ends = logits[0], 0.0, []
    for logit in logits:
        total += exp(logit - peak)
        ends.append(total)
    return ends


CUTS: dict[Callable[..., Any], Callable[..., Cut]] = {
    rules.top_k: top_k,
    rules.top_p: top_p,
    rules.min_p: min_p,
    rules.temperature: temperature,
}


def shorten(chain: Sequence[Rule]) -> tuple[int, list[Cut]] | None:
    """Of a chain that begins with top-k, its k and what follows; None where that is no matter of a few."""
    known = [rule for rule in chain if isinstance(rule, partial) and rule.func in CUTS]
    if not known or len(known) < len(chain) or known[0].func is not rules.top_k:
        return None
    k: int = known[0].keywords["k"]
    return (k, [CUTS[rule.func](**rule.keywords) for rule in known[1:]]) if k <= FEW else None
