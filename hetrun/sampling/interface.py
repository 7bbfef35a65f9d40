"""What a sampler gives, is, and may be bound by."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetrun.graph.top_logits import TopCandidates
from hetrun.sampling.rng import Floats


class SampledToken(NamedTuple):  # one for every token, and made sooner than a frozen dataclass
    """The token chosen; log-probabilities are the model's own, before any rule, and only when asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler(Protocol):
    """Chooses the tokens of one sequence.

    `sample` changes nothing; `accept` says that a token was taken, `rollback` takes the last n of them back.
    """

    @property
    def seed(self) -> int: ...

    @property
    def greedy(self) -> bool:
        """Whether it takes the greatest logit, whatever came before, and says nothing else of it."""
        ...

    @property
    def enough(self) -> int:
        """How many of the greatest logits it looks at, in any case; 0: it wants whole rows."""
        ...

    def sample(self, logits: Floats | TopCandidates) -> SampledToken: ...

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...

    def clone(self) -> Sampler: ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the grammar is at its end."""
        ...


class Constraint(Protocol):
    """Which tokens may come next, by a grammar. One for each sequence."""

    def begin(self) -> None:
        """Begin to work out the next token's mask beside what else is done, such as the model's step."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The mask of the next token, one for each token of the vocabulary; waits until it is there."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        ...

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...

    def clone(self) -> Constraint: ...
