"""Takes the steps of a model, by the host or a device, and once more where a backend fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from hetrun.backend import Floats, Rows
from hetrun.errors import BudgetError
from hetrun.executor.autotune.answer_pace import Gaps
from hetrun.executor.device_loss import DeviceLoss
from hetrun.executor.long_prompts import FEWEST, LongPrompts
from hetrun.executor.model_parts import ModelParts
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Between, Step

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepRunner:
    """Runs steps by an executor; belongs to the engine's thread."""

    def __init__(self, parts: ModelParts, stats: Stats, loss: DeviceLoss) -> None:
        self._executor, self._kv, self._stats = parts.executor, parts.kv, stats
        self._weights, self._tuning, self._loss = parts.weights, parts.tuning, loss
        self._gaps = Gaps()
        self._accepted = 0  # guesses that were right, when the last pass began

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens, or their hidden states; good until the next step."""
        weights = self._weights
        if not weights.are_read_by_passes:
            return self._run_watched(lambda: self._executor.run(step, between), step)
        if weights.experts:
            weights.experts.expect(min(step.tokens, self._executor.plans.ubatch))
        if weights.long_prompts and self.choose_device(weights.long_prompts, step.tokens):
            return self._prompt_on_device(weights.long_prompts, step)
        start = perf_counter()
        rows = self._run(lambda: self._executor.run(step), step)
        if (reading := weights.reading) is None:  # a device was lost, and all is in memory without it
            return rows
        end, certain = perf_counter(), step.tokens - step.drafted
        accepted, self._accepted = self._stats.accepted - self._accepted, self._stats.accepted
        # What became of the guesses shows only after a pass: here those of the last one count.
        answering, gap = certain == len(step.chunks), self._gaps.begin(start) or 0.0
        reading.observe(end - start, step.tokens, certain + accepted, answering, gap)
        self._gaps.end(end, answering)
        return rows

    def choose(self, step: Step, k: int, between: Between | None = None) -> Rows:
        """The k greatest logits of each wanted token, where a device can choose; else all of them."""
        if self._weights.are_read_by_passes:
            return self.step(step)
        return self._run_watched(lambda: self._executor.choose(step, k, between), step)

    def expect(self, tokens: int) -> None:
        """This many tokens of prompts wait: have the faster way for them in force."""
        if self._weights.long_prompts:
            self.choose_device(self._weights.long_prompts, tokens)

    def choose_device(self, prompts: LongPrompts, tokens: int) -> bool:
        """Have the faster of two ways for this many tokens in force; whether it is the device's."""
        now = self._executor.plans
        if (plans := prompts.chosen(tokens, now)) is not now:
            other = prompts.by_host if plans is prompts.with_device else prompts.with_device
            self._executor.adopt(plans, other.plans.values())
        return tokens >= FEWEST and plans is prompts.with_device

    def _prompt_on_device(self, prompts: LongPrompts, step: Step) -> Floats:
        """A step of a prompt there; by the host where the device has no room for it after all."""
        start, compiling = perf_counter(), self._stats.compiling_seconds
        try:
            rows = self._run(lambda: self._executor.run(step), step)
        except BudgetError as e:
            log.warning("%s has no room for long prompts any more: %s", prompts.device.device, e)
            prompts.give_up()
            return self.step(step)
        if self._weights.long_prompts is prompts:  # not rescued from a device that failed
            took = perf_counter() - start - (self._stats.compiling_seconds - compiling)
            prompts.observe(step.tokens, took)
            prompts.check()
        self._gaps.end(perf_counter(), False)
        return rows

    def _run_watched(self, run: Callable[[], T], step: Step) -> T:
        """Run it, and see how long after the token before it the next one of an answer comes."""
        start = perf_counter()
        found = self._run(run, step)
        end, alone = perf_counter(), step.tokens == 1
        if self._tuning.keeps_pace:
            gap = self._gaps.begin(start) if alone else None
            if gap is None:
                self._tuning.interrupt()
            else:
                self._tuning.observe_token(gap + end - start, self._kv.length(step.chunks[0].seq))
            self._gaps.end(end, alone)
        return found

    def _run(self, run: Callable[[], T], step: Step) -> T:
        """Without a backend that fails, where the others can do it."""
        before = [self._kv.length(c.seq) for c in step.chunks]
        while True:
            try:
                return run()
            except Exception as e:  # a plugin's backend may raise anything
                # With windows a sequence may have lost what it saw; then the step is another one.
                is_whole = before == [self._kv.length(c.seq) for c in step.chunks]
                if not (is_whole and self._goes_on_without(self._executor.failed, e)):
                    raise

    def _goes_on_without(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        return self._tuning.recover(name, error) or self._loss.recover(name, error)
