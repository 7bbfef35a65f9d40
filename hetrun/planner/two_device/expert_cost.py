"""What some experts of a mixture take, by how likely tokens choose them.

An expert takes time when some token of a pass has chosen it, as its weights have to be read, and more for
each token that goes through it. Both are found from what passes of one token and of more take with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats
from hetrun.graph import Op
from hetrun.graph.ops import Moe
from hetrun.planner.online import Likely
from hetrun.planner.two_device.balance import OpGroup

Seconds = NDArray[np.float64]
SAME = 1e-3  # of the experts: so few tokens meet that nothing says what a second one takes


@dataclass(frozen=True, slots=True)
class OperationCost:
    """What an operation takes on one side."""

    seconds: float  # in the chain: computing, and what crosses the link for it
    fixed: float  # of these, what every part of it takes again
    load: float = 0.0  # on the link, ahead of time

    def part(self, some: float) -> float:
        """What a part of it takes in the chain."""
        return self.fixed + some * (self.seconds - self.fixed)


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """What a mixture takes on one side besides what is fixed: seconds of each expert that was chosen,
    and of each token that goes through one."""

    fixed: float
    expert: float
    token: float

    def seconds(self, heat: Floats, tokens: int) -> float:
        """Seconds of `tokens` tokens, by some experts."""
        hit, pairs = float(hits(heat, tokens).sum()), tokens * float(heat.sum())
        return self.fixed + self.expert * hit + self.token * pairs

    def up_to(self, heat: Floats, tokens: int) -> Seconds:
        """The same of no expert, of the first, of the first two and so on."""
        each = self.expert * hits(heat, tokens) + self.token * tokens * heat
        return self.fixed + np.concatenate(([0.0], np.cumsum(each)))

    def part(self, heat: Floats, experts: Sequence[int], tokens: int) -> float:
        """The part of its work that some experts have."""
        whole = self.seconds(heat, tokens) - self.fixed
        return (self.seconds(heat[experts], tokens) - self.fixed) / whole if whole else 0.0


def hits(heat: Floats, tokens: int) -> Floats:
    """How likely some token of a pass chooses each expert."""
    found: Floats = 1 - (1 - heat) ** tokens
    return found


def rates_of(one: OperationCost, many: OperationCost, heat: Floats, tokens: int) -> ExpertRates:
    """From what a pass of one token takes, and one of `tokens`."""
    used, work = float(heat.sum()), many.seconds - many.fixed
    hit, pairs = float(hits(heat, tokens).sum()), tokens * used
    if pairs - hit < SAME * hit:
        return ExpertRates(many.fixed, work / hit, 0.0)
    first = (one.seconds - one.fixed) / used  # an expert with its first token
    token = min(max((work - first * hit) / (pairs - hit), 0.0), first, work / pairs)
    return ExpertRates(many.fixed, (work - token * pairs) / hit, token)


def unknown(router: str) -> Floats | None:
    """Nothing was counted."""
    return None


def heat_of(op: Op, likely: Likely) -> Floats:
    """How likely a token chooses each expert of a whole mixture; all alike while that is not known."""
    a = op.attrs
    assert isinstance(a, Moe)
    found = likely(op.weights[0].name)
    return np.full(a.n_experts, a.n_used / a.n_experts, np.float32) if found is None else found


def by_heat(heat: Floats) -> list[int]:
    """Experts, those first that are chosen most."""
    return [int(i) for i in np.argsort(-heat, kind="stable")]


def mixture_of(o: OpGroup) -> Op:
    """The mixture of an operation that has one."""
    return next(op for op in o.ops if isinstance(op.attrs, Moe))


def is_share(a: Moe) -> bool:
    """Whether it is a part of a mixture."""
    return bool(a.held or a.without or a.slots)


def computed(a: Moe, heat: Floats) -> list[int]:
    """The experts whose part a share gives; of slots those that lie there once they follow the text."""
    if not a.slots:
        return a.computed
    order = by_heat(heat)
    return order[len(a.slots) :] if a.rest else order[: len(a.slots)]
