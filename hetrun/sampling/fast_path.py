"""The usual chain (top-k, then top-p, min-p and temperature) on a handful of logits, as plain floats.

Behind a decode step all caches are cold, and each function of a library costs microseconds before it does
anything: in one plain function forty candidates are through before numpy has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log

from hetrun.sampling import filters
from hetrun.sampling.candidates import Rule

MOST = 128  # candidates; beyond it numpy is faster

ORDER = (filters.top_k, filters.top_p, filters.min_p, filters.temperature)


@dataclass(frozen=True, slots=True)
class FastPath:
    """What the rules in `filters.py` and the draw do, for candidates in descending order of logits."""

    k: int
    p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    temperature: float = 1.0

    def draw(self, logits: list[float], u: float) -> int:
        """The place of the one chosen; u is in [0, 1)."""
        peak, kept = logits[0], len(logits)
        if self.p < 1:
            total, ends = 0.0, []
            for logit in logits:
                total += exp(logit - peak)
                ends.append(total)
            bar, kept = self.p * total, 1
            while ends[kept - 1] < bar:
                kept += 1
        if self.min_p > 0:
            least = peak + log(self.min_p)
            while logits[kept - 1] < least:
                kept -= 1
        total, ends = 0.0, []
        for logit in logits[:kept]:
            total += exp((logit - peak) / self.temperature)
            ends.append(total)
        point, place = u * total, 0
        if point >= total:  # by rounding: the last that has a width
            return ends.index(total)
        while ends[place] <= point:
            place += 1
        return place


def usual(chain: Sequence[Rule]) -> FastPath | None:
    """The chain, if it is one of these."""
    known = {rule.func: rule.keywords for rule in chain if isinstance(rule, partial)}
    there = [function for function in ORDER if function in known]
    if len(there) < len(chain) or list(known) != there or there[:1] != [filters.top_k]:
        return None
    k, top_p, min_p, temperature = (known.get(function, {}) for function in ORDER)
    if k["k"] > MOST or top_p.get("min_keep") or min_p.get("min_keep"):
        return None
    return FastPath(k["k"], top_p.get("p", 1.0), min_p.get("p", 0.0), temperature.get("value", 1.0))
