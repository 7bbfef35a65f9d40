"""What steps take: as the model predicts it, corrected by how long such steps really took.

Everything that needs to know asks here: what goes into a step, whether a draft pays, who may come in, how
long the watchdog is patient, and front ends. Each step is told once. A prediction knows nothing of Python,
of rows that a draft wants, or of programs that came since, so each kind of step has a factor, which follows
what such steps took. Where nothing is predicted, steps are measured by size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pow
from time import perf_counter
from typing import NamedTuple, Protocol

from hetrun.engine.request import ActiveRequest, Chosen
from hetrun.engine.size_curve import SizeCurve
from hetrun.executor.interface import Model
from hetrun.system.ema import smoothed
from hetrun.system.estimate import Estimate, TrackedEstimate

# While prompts are computed, a running answer's tokens come at most this many times as far apart as without.
STRETCH = 2.5
UNKNOWN_S = 0.02  # a step of answers, before one was measured
REMEMBERED = 512  # predictions, which take half a millisecond to make; then all are asked for again
PREDICTED_S = 10.0  # for which a prediction is good
RENEWED_S = 1.0  # plans that change more often are not asked each time
FRESH = 32  # steps for which a correction counts whole
FORGOTTEN = 128  # steps after which it counts half: the planner learns, too, and the machine may have changed
GUESS = 4.0  # tokens: a step of n takes a time that grows as n plus this many, where nothing else is known
DEPTH = 256  # tokens of context that an answer has, if that is not known
READ = (16, 32, 64, 128, 256, 512, 1024)  # tokens of prompts that are predicted; lines go between them
TOKEN_SHARE = 1 / 8  # of the newest step in what drafts are worth


class StepShape(NamedTuple):
    """What a step consists of, as far as its time depends on it."""

    sequences: int
    tokens: int
    prompts: int = 0  # of the tokens, those of prompts
    drafted: int = 0  # of the tokens, those that are guesses
    depth: int = DEPTH  # tokens that each of them sees, about


def shape_of(chosen: Chosen, drafted: int = 0) -> StepShape:
    """The shape of a step of these, with `drafted` guesses."""
    tokens = prompts = seen = 0
    for r, n in chosen:
        tokens += n
        seen += n * (r.computed + n // 2)
        if n > 1 or not r.answers:
            prompts += n
    return StepShape(len(chosen), tokens + drafted, prompts, drafted, seen // (tokens or 1))


def shape_of_chunks(chunks: Sequence[tuple[int, float]]) -> StepShape:
    """The shape of a step: for each sequence its number of tokens, and how many come before them."""
    tokens = sum(n for n, _ in chunks)
    seen = sum(n * (seen + n // 2) for n, seen in chunks)
    prompts = sum(n for n, _ in chunks if n > 1)
    return StepShape(len(chunks), tokens, prompts, 0, int(seen / (tokens or 1)))


def answering(sequences: int, depth: int = DEPTH) -> StepShape:
    """A step of answers."""
    return StepShape(sequences, sequences, 0, 0, depth)


def longer(sequences: int, drafted: int) -> float:
    """How many times as long as one without a step with drafts takes, where nothing else is known."""
    return (sequences + drafted + GUESS) / (sequences + GUESS)


class StepPredictor(Protocol):
    """The part of a model that knows what steps should take."""

    @property
    def plans(self) -> object: ...

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None: ...


class Correction:
    """How many times as long as expected steps of one kind took."""

    __slots__ = ("expected", "ratio", "renewals", "shape", "step")

    def __init__(self, shape: StepShape, expected: float, step: int, renewals: int) -> None:
        self.ratio = TrackedEstimate(1.0)
        self.shape, self.expected = shape, expected  # of the last one
        self.step = step  # when that was
        self.renewals = renewals  # of predictions before

    def observe(self, shape: StepShape, expected: float, seconds: float, step: int) -> None:
        """One more."""
        if step - self.step > FORGOTTEN:
            self.ratio.reopen()
        self.ratio.observe(seconds / expected)
        self.shape, self.expected, self.step = shape, expected, step

    def renew(self, expected: float | None, renewals: int) -> None:
        """The last one is predicted again: what the planner has learned since must not count twice.

        Only that: if it is the plan that is another, the ratio is the best guess still.
        """
        self.renewals = renewals
        if expected:
            ratio, there = self.ratio.value, self.ratio.value * self.expected / expected
            self.ratio.scale(min(max(there, min(ratio, 1.0)), max(ratio, 1.0)) / ratio)
            self.expected = expected


UNSEEN = TrackedEstimate(1.0)


class StepTimes:
    """Seconds of the steps of one model; on the engine's thread only."""

    def __init__(self, model: StepPredictor) -> None:
        self._model = model
        self._step = 0
        self._predicted: dict[tuple[int, int, int], float | None] = {}
        self._plans: object = None  # by which they were predicted
        self._renewed = float("-inf")  # when they were forgotten last
        self._renewals = 0
        # By kind: of what is predicted, and of what is measured.
        self._corrections: dict[int, Correction] = {}
        self._remainders: dict[int, Correction] = {}
        self._answers = SizeCurve()  # steps of answers, by their number
        self._prompts = SizeCurve()  # by their tokens
        # How many times as long as a step without drafts an answer takes for a token, on an average.
        self._a_token = 1.0

    # --- asked

    def seconds(self, shape: StepShape) -> float | None:
        """What a step takes; None if that is not known."""
        predicted = self._predict(shape)
        if predicted:
            return predicted * self._factor(_kind(shape))
        measured = self._measured(shape)
        if measured is None or not shape.drafted:
            return measured
        return measured * self._aged(self._remainders.get(_kind(shape)), 1.0)

    def foreseen(self, shape: StepShape) -> float | None:
        """What a step takes, where the model predicts it: for those who call a step late by it, or about to
        end. What was measured at other sizes says too little for that."""
        return self.seconds(shape) if self._predict(shape) else None

    def estimate(self, shape: StepShape) -> Estimate | None:
        """The same, and what it takes at least and at most, nine times in ten."""
        seconds = self.seconds(shape)
        if seconds is None:
            return None
        known = self._corrections if self._predict(shape) else self._remainders
        found = known.get(_kind(shape))
        ratio = found.ratio if found else UNSEEN
        off = ratio.value if known is self._remainders and not shape.drafted else 1.0  # not in `seconds`
        return Estimate(seconds, seconds * min(1.0, off * ratio.below), seconds * max(1.0, off * ratio.above))

    def quiet(self, answers: Sequence[ActiveRequest], joining: Sequence[ActiveRequest] = ()) -> float:
        """What a step of these answers takes by itself, once those that join have begun to answer, too."""
        n = len(answers) + len(joining)
        depth = sum([r.computed for r in answers]) + sum([r.computed for r in joining])
        return self.seconds(answering(n, depth // (n or 1))) or UNKNOWN_S

    def a_token(self, answers: int) -> float | None:
        """What this many answers take for a token each, with drafts where these are tried."""
        seconds = self.seconds(answering(answers))
        return None if seconds is None else seconds * self._a_token

    def reading(self, tokens: float) -> float | None:
        """What prompts of this many tokens take, however many prompts they are; None: not known.

        Predicted at a few sizes. Below the least one sizes and seconds grow alike, which says too little, as
        it does where steps are measured (`SizeCurve`).
        """
        at, before = 0, 0.0
        for size in READ:
            shape = StepShape(1, size, size, 0, size // 2)
            if not self._predict(shape):
                return self._prompts.at(tokens)
            seconds = max(before, self.seconds(shape) or 0.0)
            if tokens <= size:
                return before + (seconds - before) * (tokens - at) / (size - at)
            at, before = size, seconds
        return before * tokens / at

    # --- told

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        self._step += 1
        if (now := perf_counter()) - self._renewed > PREDICTED_S:
            self._renew(now)
        predicted, kind = self._predict(shape), _kind(shape)
        expected = predicted or self._measured(shape)
        if expected:
            found = self._correction(kind) if predicted else self._remainders.get(kind)
            if found is None:
                found = Correction(shape, expected, self._step, self._renewals)
                (self._corrections if predicted else self._remainders)[kind] = found
            found.observe(shape, expected, seconds, self._step)
        if not shape.drafted:
            self._measure(shape, seconds)
            if self._a_token != 1 and not shape.prompts:
                self._a_token = smoothed(self._a_token, 1.0, TOKEN_SHARE)

    def gave(self, shape: StepShape, seconds: float, tokens: int) -> None:
        """A step with drafts took `seconds`, and gave `tokens` tokens that stay."""
        plain = self.seconds(answering(shape.sequences, shape.depth))
        if plain and tokens:
            each = seconds * shape.sequences / tokens / plain
            self._a_token = smoothed(self._a_token, each, TOKEN_SHARE)

    # --- how

    def _predict(self, shape: StepShape) -> float | None:
        """As the model predicts it."""
        if self._plans is not self._model.plans and (now := perf_counter()) - self._renewed > RENEWED_S:
            self._plans = self._model.plans
            self._renew(now)
            # What was learned is the best guess still, and the next two steps outweigh it.
            for known in self._corrections.values():
                known.ratio.reopen()
        depth = shape[4]
        step = 8 if depth < 2048 else depth.bit_length() - 3  # at about the same depth: about the same time
        key = shape[0], shape[1], depth >> step << step
        try:
            return self._predicted[key]
        except KeyError:
            pass
        if len(self._predicted) >= REMEMBERED:
            self._renew(perf_counter())
        found = self._predicted[key] = self._model.predict(_chunks(shape))
        return found

    def _renew(self, now: float) -> None:
        """Ask for all predictions again, when they are wanted."""
        self._renewed = now
        self._renewals += 1
        self._predicted.clear()

    def _correction(self, kind: int) -> Correction | None:
        found = self._corrections.get(kind)
        if found is not None and found.renewals != self._renewals:
            expected = self._predict(found.shape)
            found.renew(expected, self._renewals)
        return found

    def _factor(self, kind: int) -> float:
        """What was seen of such steps; steps with drafts are else taken for those without, and these for as
        predicted."""
        found = self._correction(kind)
        if found is not None and self._step - found.step < FRESH:
            return found.ratio.value
        return self._aged(found, self._factor(kind & ~DRAFTED) if kind > 0 and kind & DRAFTED else 1.0)

    def _aged(self, found: Correction | None, usual: float) -> float:
        """What was seen; the older, the less it differs from what is usual."""
        if found is None:
            return usual
        age = self._step - found.step
        part = 1.0 if age < FRESH else pow(0.5, age / FORGOTTEN)
        return pow(usual, 1 - part) * pow(found.ratio.value, part)

    def _measured(self, shape: StepShape) -> float | None:
        """As it was measured by size."""
        sequences, tokens, prompts, drafted, _ = shape
        if not prompts:
            seconds = self._answers.at(sequences)
            return seconds and seconds * longer(sequences, drafted)
        reading = self._prompts.at(prompts)
        if prompts == tokens or reading is None:
            return reading if prompts == tokens else None
        seconds = self._answers.at(tokens - prompts)
        return None if seconds is None else reading + seconds

    def _measure(self, shape: StepShape, seconds: float) -> None:
        """Note it by size. Where answers and prompts share a step, each has its part of it."""
        answers = shape.tokens - shape.prompts
        if not shape.prompts:
            self._answers.observe(answers, seconds)
        elif not answers:
            self._prompts.observe(shape.prompts, seconds)
        else:
            alone, reading = self._answers.at(answers), self._prompts.at(shape.prompts)
            if alone and reading:
                part = alone / (alone + reading)
                self._answers.observe(answers, part * seconds)
                self._prompts.observe(shape.prompts, (1 - part) * seconds)
            elif alone and seconds > alone:
                self._prompts.observe(shape.prompts, seconds - alone)
            elif reading and seconds > reading:
                self._answers.observe(answers, seconds - reading)


DRAFTED = 63  # of a kind, the bits that say how much is drafted


def _kind(shape: StepShape) -> int:
    """Steps that are wrongly predicted in the same way: of about as many sequences, drafts or tokens."""
    sequences, tokens, prompts, drafted, _ = shape
    return -tokens.bit_length() if prompts else sequences.bit_length() << 6 | drafted.bit_length()


def _chunks(shape: StepShape) -> list[tuple[int, float]]:
    """A step of this shape, as models predict it."""
    answers = shape.tokens - shape.prompts - shape.drafted
    chunks = [(1, float(shape.depth))] * answers
    if shape.drafted:
        chunks[0] = 1 + shape.drafted, float(shape.depth)
    for i in range(parts := shape.sequences - answers):
        n = (shape.prompts + i) // parts
        chunks.append((n, float(max(0, shape.depth - n // 2))))
    return chunks


class Clock:
    """The time of a step, without that of the steps that ran while it stood aside."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stats = model.stats
        self._native = model.native_seconds - self._stats.native_seconds
        self._start = perf_counter() - self._stats.step_seconds
        self._compiling = self._stats.compiling_seconds

    @property
    def compiling(self) -> float:
        """What of it went into compiling: the next step of its shape finds it compiled."""
        return self._stats.compiling_seconds - self._compiling

    def seconds(self) -> float:
        """Until now."""
        return perf_counter() - self._stats.step_seconds - self._start

    def stop(self) -> None:
        """Book it."""
        native = self._model.native_seconds - self._stats.native_seconds - self._native
        self._stats.step(self.seconds(), native)
