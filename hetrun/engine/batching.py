"""What goes into a step: running answers, prompts, or both; and what runs while a long pass stands aside.

Texts for embeddings go through the model by themselves, because all others need logits. They take turns with
prompts, as prompts do with each other, and stand aside for answers. If a pass cannot stand aside, they take
turns with answers as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import perf_counter

from hetrun.engine.request import ActiveRequest, Chosen
from hetrun.engine.scheduler import Shares, share_out, split
from hetrun.engine.step_time import STRETCH, StepTimes, shape_of
from hetrun.executor.interface import Model

FEW = 16  # tokens of prompts that never need a pass of their own
SHORT = 128  # tokens; so short a prompt may be computed beside answers while a long pass stands aside
BESIDE = (64, 32, 16)  # how many of these tokens at a time
ALONE_S = 0.1  # how long that may take where no answer waits for it
NOTICE_S = 0.01  # how often a long pass checks for new requests


class BatchComposer:
    """Keeps answers smooth and prompts in passes as large as that allows."""

    def __init__(self, model: Model, shares: Shares, times: StepTimes) -> None:
        self._model = model
        self._shares = shares
        self._times = times
        self._embedded = False  # the last step was one of embeddings

    def next(self, running: Sequence[ActiveRequest]) -> tuple[Chosen, bool]:
        """The next step, and whether it is a long pass that is to stand aside for the others."""
        answers, prompts = split(_generating(running))
        if embeddings := self._whose_turn(running, bool(answers), prompts):
            return embeddings, self._model.stands_aside
        budget = self._model.plans.ubatch
        if not prompts or len(answers) >= budget:
            return share_out(answers, prompts, budget), False
        prompts = self._shares.ordered(prompts)
        together = share_out(answers, prompts, budget)
        if answers and self._smooth(answers, together):
            return together, False
        if self._model.stands_aside:
            return share_out((), prompts, budget), True
        if not answers and self._model.streaming():  # a pass reads as much, however few tokens it has
            return together, False
        return self._with_few(answers, prompts, (budget, *BESIDE)), False

    def _whose_turn(
        self, running: Sequence[ActiveRequest], answering: bool, prompts: Sequence[ActiveRequest]
    ) -> Chosen:
        """A step of embeddings, if these are next; else an empty one."""
        waited, self._embedded = self._embedded, False
        embeddings = self._shares.ordered(r for r in running if r.pooled)
        if not embeddings or self._shares.ordered([*prompts, *embeddings])[0].pooled is None:
            return []
        if waited and answering and not self._model.stands_aside:
            return []
        self._embedded = True
        budget = self._model.plans.ubatch
        if self._model.stands_aside or self._model.streaming():
            return share_out((), embeddings, budget)
        return self._with_few((), embeddings, (budget, *BESIDE))

    def beside(self, running: Sequence[ActiveRequest], standing: Collection[int]) -> Chosen:
        """A step of those who are not in the pass that stands aside; it may be empty."""
        answers, prompts = split(_generating(r for r in running if r.id not in standing))
        short = [r for r in self._shares.ordered(prompts) if r.missing <= SHORT]
        if not short:
            return share_out(answers, (), self._model.plans.ubatch)
        return self._with_few(answers, short, BESIDE)

    def patience(self, running: Sequence[ActiveRequest], standing: Collection[int]) -> float:
        """How long a pass may go on before it stands aside once more."""
        others = _generating(r for r in running if r.id not in standing)
        if not others:
            return NOTICE_S
        joining = _generating(r for r in running if r.id in standing)
        # Many who join together are not held up by the few who have begun.
        return (STRETCH - 1) * self._times.quiet(others, joining if len(joining) > len(others) else ())

    def _smooth(self, answers: Sequence[ActiveRequest], together: Chosen) -> bool:
        """Whether a step of answers and prompts is short enough for the answers."""
        if sum(n for _, n in together) <= len(answers) + FEW:
            return True
        joining = [r for r, _ in together[len(answers) :]]
        seconds = self._times.seconds(shape_of(together))
        return seconds is not None and seconds <= STRETCH * self._times.quiet(answers, joining)

    def _with_few(
        self, answers: Sequence[ActiveRequest], prompts: Sequence[ActiveRequest], sizes: Sequence[int]
    ) -> Chosen:
        """All answers, and as much of prompts as their next tokens can wait for."""
        budget = self._model.plans.ubatch
        quiet = self._times.quiet(answers, prompts[:1]) if answers else 0.0
        limit = STRETCH * quiet if answers else ALONE_S
        for n in sizes:
            chosen = share_out(answers, prompts, min(budget, len(answers) + n))
            if (self._times.seconds(shape_of(chosen)) or 0.0) <= limit:
                return chosen
        return share_out(answers, prompts, min(budget, len(answers) + FEW))


class LongPass:
    """The pass of prompts that stands aside, while one runs: whose it is, and when answers are next due."""

    def __init__(self, mixing: BatchComposer, running: Sequence[ActiveRequest]) -> None:
        self._mixing = mixing
        self._running = running
        self.ids: frozenset[int] = frozenset()  # requests in it
        self._answered = 0.0  # when answers last had a step
        self._due = 0.0  # when what takes long is to stand aside

    @property
    def is_due(self) -> bool:
        """Whether it is to stand aside now; so is whatever else takes long."""
        return perf_counter() >= self._due

    def begin(self, ids: frozenset[int]) -> None:
        """A pass of these requests begins."""
        self.ids = ids
        self._due = self._answered + self._mixing.patience(self._running, ids)

    def resume(self) -> None:
        """It stood aside, and goes on."""
        self._due = perf_counter() + self._mixing.patience(self._running, self.ids)

    def mark_answered(self) -> None:
        """Answers had a step."""
        self._answered = perf_counter()


def _generating(running: Iterable[ActiveRequest]) -> list[ActiveRequest]:
    """Those of which tokens are wanted."""
    return [r for r in running if r.pooled is None]
