"""Mirostat, instead of the other rules: keep tokens such that those chosen surprise by `tau` bits on average.

Its state is mu, a running target of surprise. Each token accepted adds a value, so that taking tokens back
finds the old one; what was taken back is kept, as the same tokens may come again without being sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hetrun.client.sampling_params import SamplingParams
from hetrun.sampling.candidates import Candidates
from hetrun.sampling.top_k import best

LOOKED_AT = 100  # best tokens from which the first version estimates the distribution's shape


def first(c: Candidates, mu: float) -> Candidates:
    """Mirostat 1: as many of the best as Zipf's law, fitted to the best hundred, calls for."""
    head = c.pick(best(c.logits, LOOKED_AT), min(LOOKED_AT, c.size), ranked=True)
    weights = head.weights()
    chances = (weights / c.weights().sum()).astype(np.float32)
    if head.size < 2 or head.impossible or chances[-1] == 0:  # llama.cpp's fit is infinitely steep then
        return head.pick(slice(1))
    i = np.arange(1.0, len(weights))
    steps = np.log((i + 1) / i)
    with np.errstate(all="ignore"):
        slope = np.dot(steps, -np.diff(head.logits.astype(np.float64))) / np.dot(steps, steps)
        above = slope - 1
        k = (above * np.exp2(mu) / (1 - float(c.size) ** -above)) ** (1 / slope)
    if not k >= 2:  # NaN too
        return head.pick(slice(1))
    return c.pick(best(c.logits, int(min(k, c.size))), ranked=True)


def second(c: Candidates, mu: float) -> Candidates:
    """Mirostat 2: those that surprise by mu bits at most, or else the best."""
    weights = c.weights()
    with np.errstate(over="ignore"):
        kept = ((weights > 0) & (weights >= weights.sum() * np.exp2(-mu))).nonzero()[0]
    return c.pick(kept if len(kept) else best(c.logits, 1))


@dataclass
class Mirostat:
    """What it remembers of one sequence."""

    cut: Callable[[Candidates, float], Candidates]
    tau: float
    eta: float
    _past: list[tuple[int, float]] = field(default_factory=list)  # tokens, and mu behind each
    _position: int = 0  # how many of them are accepted
    _seen: Candidates | None = None  # what was kept for the next token

    @property
    def mu(self) -> float:
        return self._past[self._position - 1][1] if self._position else 2 * self.tau

    def __call__(self, c: Candidates) -> Candidates:
        """The tokens to draw from."""
        self._seen = self.cut(c, self.mu)
        return self._seen

    def accept(self, token: int) -> None:
        """The next token; one that was never sampled says nothing about surprises."""
        again = self._past[self._position][0] == token if self._position < len(self._past) else False
        if not again:
            del self._past[self._position :]
            self._past.append((token, self._after(token)))
        self._position += 1
        self._seen = None

    def rollback(self, n: int) -> None:
        self._position -= n
        self._seen = None

    def clone(self) -> Mirostat:
        return Mirostat(self.cut, self.tau, self.eta, self._past[:], self._position, self._seen)

    def _after(self, token: int) -> float:
        kept = self._seen
        if kept is None or kept.ids is None or token not in kept.ids:
            return self.mu
        weights = kept.weights()
        surprise = math.log2(weights.sum() / weights[kept.ids == token][0])
        return self.mu - self.eta * (surprise - self.tau)


def make_mirostat(params: SamplingParams) -> Mirostat | None:
    """The version that was asked for."""
    if params.mirostat == 0:
        return None
    return Mirostat(first if params.mirostat == 1 else second, params.mirostat_tau, params.mirostat_eta)
