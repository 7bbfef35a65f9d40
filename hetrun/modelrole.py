"""What the engine knows of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from hetrun.backend import Floats, Rows
from hetrun.budget import Budgeted
from hetrun.executor import Between, Step
from hetrun.plan import PlanSet
from hetrun.questions import LayerPlace
from hetrun.stats import Stats


@runtime_checkable
class Chooses(Protocol):
    """A model that can leave logits out which nobody looks at."""

    def choose(self, step: Step, k: int, between: Between | None = None) -> Rows:
        """The k greatest logits of each wanted token, or all of them."""
        ...


class Model(Budgeted, Protocol):
    """What the engine knows of a model."""

    n_vocab: int
    width: int  # of hidden states; 0: it does not give them
    context: int
    max_sequences: int  # that may run together
    stands_aside: bool  # whether steps of others can run in the middle of a long one
    stats: Stats

    @property
    def segment(self) -> str:
        """What runs now, in words; from any thread."""
        ...

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        ...

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer's weights lie and what computes with them, if known; from any thread."""
        ...

    @property
    def crossed(self) -> Mapping[str, int]:
        """Bytes of weights that came over each device's link so far, for passes; from any thread."""
        ...

    @property
    def in_use(self) -> Mapping[str, int]:
        """Memory in use of late, by what it is for; from any thread."""
        ...

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens, or their hidden states where the step says so; `between` may run
        steps of other sequences in the middle of it."""
        ...

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step of so many tokens of each sequence, each behind so many others; None: unknown."""
        ...

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether there is memory for so many more tokens of each of these sequences."""
        ...

    def shareable(self, seq: int, n: int) -> int:
        """How many of a sequence's first n tokens a new one could begin with."""
        ...

    @property
    def alike(self) -> int:
        """The most tokens of a step whose rows have the bits that they have one by one; 0: several at once
        are no use."""
        ...

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        ...

    def alloc(self) -> int: ...
    def fork(self, seq: int, n: int | None = None) -> int: ...
    def truncate(self, seq: int, n: int) -> None: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        ...

    def rearm(self) -> None:
        """Let the next step run."""
        ...

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """So many tokens of prompts wait: prepare for them. Where that takes long, `between` is called."""
        ...

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan, with `between` in the same way."""
        ...

    def rest(self) -> None:
        """Nothing has come for a while: what only costs time to have again is given back."""
        ...

    def close(self) -> None: ...
