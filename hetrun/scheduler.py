"""Which sequences run in the next step, and how many tokens of each.

There is no prefill and no decode: each sequence has tokens that the model has not seen, and each step closes
that gap within a budget. Running answers lack one token each and go first, so that a long prompt beside them
does not stop them; prompts share what is left, the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hetrun.events import Event, GenerateRequest, Timings, Usage
from hetrun.sampling import Sampler
from hetrun.textstream import StreamDecoder

OnEvent = Callable[[Event], None]


@dataclass(slots=True)
class Running:
    """A request that has a place in the KV cache."""

    id: int
    request: GenerateRequest
    on_event: OnEvent
    seq: int
    tokens: list[int]  # prompt and answer
    n_prompt: int
    limit: int  # tokens of the answer
    most: int  # tokens that a step may have of it
    sampler: Sampler
    decoder: StreamDecoder
    arrived: float
    began: float  # when it got its place
    computed: int = 0
    turn: int = 0  # grows whenever a sequence has its turn
    first: float = 0.0  # when the first token came
    last: float = 0.0

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.tokens) - self.computed

    @property
    def scored(self) -> bool:
        """Whether the prompt's own tokens want their log-probabilities."""
        return self.request.params.prompt_logprobs is not None

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.n_prompt

    def usage(self) -> Usage:
        """Tokens counted."""
        return Usage(self.n_prompt, self.generated)

    def timings(self, load_s: float) -> Timings:
        """Rates measured."""
        prompt_s, decode_s = self.first - self.began, self.last - self.first
        return Timings(
            load_s=load_s,
            ttft_s=self.first - self.arrived if self.first else 0.0,
            prompt_tok_s=self.n_prompt / prompt_s if prompt_s > 0 else 0.0,
            decode_tok_s=(self.generated - 1) / decode_s if self.generated > 1 and decode_s > 0 else 0.0,
        )


class Pending(Protocol):
    """What the scheduler knows of a sequence."""

    turn: int  # the number of its last turn; each turn of any sequence has the next number

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        ...

    @property
    def most(self) -> int:
        """How many of them a step may have."""
        ...


P = TypeVar("P", bound=Pending)


def schedule(sequences: Sequence[P], budget: int) -> list[tuple[P, int]]:
    """Tokens of the next step, at most `budget` of them; sequences come in order of arrival."""
    running = [s for s in sequences if s.missing == 1]
    prompts = [s for s in sequences if s.missing > 1]
    left = budget - len(running)
    if left < bool(prompts):  # too few places for all: whoever waited longest goes first
        waited = sorted([*running, *prompts[:1]], key=lambda s: s.turn)
        return [(s, 1) for s in waited[:budget]]
    chosen = [(s, 1) for s in running]
    for s in prompts:
        n = min(s.missing, s.most, left)
        if n:
            chosen.append((s, n))
            left -= n
    return chosen
