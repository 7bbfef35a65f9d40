"""Answers whose tokens are known before: the model computes, its sampler looks, and the script is taken."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.graph.top_logits import TopCandidates
from hetrun.sampling.interface import SampledToken, Sampler
from hetrun.sampling.rng import Floats


class ForcedSampler:
    """A sampler that does all that the real one does, and then takes the script's next token. Behind the end
    of the script it takes what the real one chose."""

    greedy = False  # rows of several sequences are not looked at together, since each has its own script

    def __init__(self, real: Sampler, script: Sequence[int], at: int = 0) -> None:
        """`at`: how many tokens of the script were taken before."""
        self._real, self._script, self._at = real, script, at

    @property
    def seed(self) -> int:
        """The real one's."""
        return self._real.seed

    @property
    def enough(self) -> int:
        """As many of the greatest logits as the real one wants: a step is the same as for users."""
        return self._real.enough

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self._real.finished

    def sample(self, logits: Floats | TopCandidates) -> SampledToken:
        """The script's next token; log-probabilities are those of the token that the real one chose."""
        choice = self._real.sample(logits)
        return choice._replace(token=self._script[self._at]) if self._at < len(self._script) else choice

    def accept(self, token: int) -> None:
        """A token was taken."""
        self._real.accept(token)
        self._at += 1

    def rollback(self, n: int) -> None:
        """The last n were taken back."""
        self._real.rollback(n)
        self._at -= n

    def clone(self) -> Sampler:
        """One that goes on from here by itself."""
        return ForcedSampler(self._real.clone(), self._script, self._at)
