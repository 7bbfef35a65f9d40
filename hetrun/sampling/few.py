"""The usual rules on a handful of ranked logits, as plain floats.

Behind a decode step all caches are cold, and each of numpy's functions costs microseconds before it does
anything: forty candidates are through here before numpy has begun.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from hetrun.sampling import rules
from hetrun.sampling.candidates import Rule
from hetrun.sampling.draw import falls_on

FEW = 128

Ranked: TypeAlias = list[float]
Short: TypeAlias = Callable[[Ranked], Ranked]


def top_k(logits: Ranked, *, k: int) -> Ranked:
    return logits[:k]


def top_p(logits: Ranked, *, p: float, min_keep: int) -> Ranked:
    ends = _ends(logits)
    return logits[: max(bisect_left(ends, p * ends[-1]) + 1, min_keep)]


def min_p(logits: Ranked, *, p: float, min_keep: int) -> Ranked:
    least = logits[0] + math.log(p)
    kept = len(logits)
    while kept > min_keep and logits[kept - 1] < least:
        kept -= 1
    return logits[:kept]


def temperature(logits: Ranked, *, value: float) -> Ranked:
    return [logit / value for logit in logits] if value > 0 else logits[:1]


def draw(logits: Ranked, u: float) -> int:
    """The place of the one drawn."""
    if len(logits) == 1:
        return 0
    ends = _ends(logits)
    return falls_on(ends, u * ends[-1])


def _ends(logits: Ranked) -> list[float]:
    peak, exp = logits[0], math.exp
    return list(accumulate([exp(logit - peak) for logit in logits]))


SHORT: dict[Callable[..., Any], Callable[..., Ranked]] = {
    rules.top_k: top_k,
    rules.top_p: top_p,
    rules.min_p: min_p,
    rules.temperature: temperature,
}


def shorten(chain: Sequence[Rule]) -> tuple[int, list[Short]] | None:
    """Of a chain that begins with top-k, its k and what follows; None where that is no matter of a few."""
    known = [rule for rule in chain if isinstance(rule, partial) and rule.func in SHORT]
    if not known or len(known) < len(chain) or known[0].func is not rules.top_k:
        return None
    k: int = known[0].keywords["k"]
    return (k, [partial(SHORT[rule.func], **rule.keywords) for rule in known[1:]]) if k <= FEW else None
