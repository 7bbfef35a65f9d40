"""Drafts in every step that can have one, three of four guesses right: what is taken back must leave no
trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from hetrun.api.local_model import LocalModel
from hetrun.engine.speculation import speculator
from hetrun.engine.speculation.draft_length import LENGTHS, NOTHING, Decision, DraftCandidate
from hetrun.engine.speculation.draft_model import DraftModel
from hetrun.engine.speculation.mtp import MtpSequence
from hetrun.engine.speculation.prompt_lookup import PromptLookup
from tests.truth.subjects import GREEDY
from tests.truth.verdicts import NotApplicable, Said

RIGHT = 0.75


class Guesses:
    """What knows the texts, and is wrong now and then."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        self._texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=False)]
        self._random = random.Random(1)

    def of(self, tokens: Sequence[int], n: int) -> list[int]:
        """The next n tokens of a text."""
        known = next((t for t in self._texts if t[: len(tokens)] == list(tokens)), [])
        coming = [*known[len(tokens) :], *[0] * n][:n]
        return self.spoil(coming)

    def spoil(self, tokens: Sequence[int]) -> list[int]:
        """The same tokens, but for some."""
        return [token if self._random.random() < RIGHT else token ^ 1 for token in tokens]

    def length(self) -> int:
        return self._random.choice(LENGTHS)


@contextmanager
def drafts(guesses: Guesses) -> Iterator[None]:
    """Every step has drafts, of lengths that change."""

    def decide(
        candidates: Sequence[DraftCandidate], depths: object, costs: object, most: int, *rest: object
    ) -> Decision:
        length = guesses.length()
        able = tuple(c.place for c in candidates if c.chances and c.most >= length)[: most // length]
        return Decision(able, length, float(len(able))) if able else NOTHING

    with mock.patch.object(speculator, "decide", decide), mock.patch.object(speculator, "IDLE", 1 << 30):
        yield


def answers(llm: LocalModel, prompts: Sequence[Sequence[int]]) -> Said:
    """To prompts one by one, and then together; drafts must have been right and wrong."""
    if llm.settings.deterministic and llm.call(lambda loaded: loaded.model.alike) <= 1:
        raise NotApplicable("ggml multiplies by some of its weights: no drafts where the same bits are asked")
    alone = [llm.generate([list(p)], GREEDY)[0] for p in prompts]
    both = llm.generate([list(p) for p in prompts], GREEDY)
    drafted = sum(c.timings.drafted for c in (*alone, *both))
    right = sum(c.timings.accepted for c in (*alone, *both))
    assert 0 < right < drafted, f"{right} of {drafted} guesses were right"
    assert [c.tokens for c in both] == [c.tokens for c in alone], "together other answers than alone"
    return Said(tuple(tuple(c.tokens) for c in alone))


@contextmanager
def by_lookup(guesses: Guesses) -> Iterator[None]:
    """Guesses as from the text itself."""

    def propose(mine: PromptLookup, n: int) -> list[int]:
        return guesses.of(mine._tokens, n)

    with (
        drafts(guesses),
        mock.patch.object(PromptLookup, "chances", lambda mine, n: [RIGHT] * n),
        mock.patch.object(PromptLookup, "propose", propose),
    ):
        yield


@contextmanager
def by_model(guesses: Guesses) -> Iterator[None]:
    """Guesses of a draft model, which runs, some of them changed."""
    real = DraftModel.propose

    def propose(mine: DraftModel, seq: int, tokens: list[int], n: int) -> list[int]:
        return guesses.spoil(real(mine, seq, tokens, n))

    with (
        drafts(guesses),
        mock.patch.object(PromptLookup, "chances", return_value=()),
        mock.patch.object(PromptLookup, "propose", return_value=[]),
        mock.patch.object(DraftModel, "propose", propose),
    ):
        yield


@contextmanager
def by_block(guesses: Guesses) -> Iterator[None]:
    """Guesses of the block in the model's file, which runs; its weights are random, so that the text's own
    tokens take the place of what it says."""
    real = MtpSequence.propose

    def propose(mine: MtpSequence, n: int) -> list[int]:
        return guesses.of(mine._tokens, n) if real(mine, n) else []

    with (
        drafts(guesses),
        mock.patch.object(PromptLookup, "chances", return_value=()),
        mock.patch.object(PromptLookup, "propose", return_value=[]),
        mock.patch.object(MtpSequence, "propose", propose),
    ):
        yield
