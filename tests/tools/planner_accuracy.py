"""Predicted against measured step times, over token buckets and depths.

    python -m tests.tools.planner_accuracy -m MODEL --depths 0,512,2048,4096

Two predictions stand against each measurement. The first (`ahead`) is asked before the model has run a step
of that size at that depth at all. The second (`now`) is asked before each timed repetition, as the planner
would when it decides; its error is the one that counts.

Batches are sequences with keys of their own, which takes a while to fill; `--fork` lets them share a start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from time import perf_counter
from typing import Protocol

import numpy as np

from hetrun.api.local_model import LocalModel
from hetrun.config import Settings
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.planner.plan import BUCKETS, bucket_of
from hetrun.tools.bench.memory_bandwidth import BUSY, load_average

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = (2, 8, 16)  # sequences, with one token each
DEPTHS = (0, 512, 2048, 4096)
FILL = 512  # tokens of one step while a sequence grows to its depth
LEAST_S, MOST_REPEATS = 0.05, 20  # short steps are repeated until they took so long

HEAD = "  tokens  depth   ahead ms     now ms   measured   ahead     now"

Clock = Callable[[], float]


class Predicting(Protocol):
    """What is needed of a model."""

    n_vocab: int
    context: int

    def step(self, step: Step) -> object: ...
    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None: ...
    def expect(self, tokens: int) -> None: ...
    def tend(self) -> None: ...
    def alloc(self) -> int: ...
    def fork(self, seq: int) -> int: ...
    def truncate(self, seq: int, n: int) -> object: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step."""

    sequences: int
    tokens: int  # of each
    depth: int  # what each has seen before

    @property
    def bucket(self) -> str:
        """The plan's bucket, and whether several sequences share it."""
        return bucket_of(self.sequences * self.tokens) + (" batch" if self.sequences > 1 else "")


@dataclass(frozen=True, slots=True)
class Found:
    """What was predicted and measured of a case, in seconds."""

    case: Case
    ahead: float | None
    predicted: tuple[float | None, ...]
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean relative error of what was predicted before each repetition; nothing is 100 % wrong."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return mean([1.0 if p is None else abs(p - m) / m for p, m in pairs])

    @property
    def typical(self) -> float:
        """The same as a median: what other programs did to a few repetitions does not show."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return median([1.0 if p is None else abs(p - m) / m for p, m in pairs])

    @property
    def error_ahead(self) -> float | None:
        """Relative error of what was predicted before such a step ever ran."""
        middle = median(self.measured)
        return None if self.ahead is None else abs(self.ahead - middle) / middle


class Bench:
    """Runs cases on one model, all on the engine's thread."""

    def __init__(self, model: Predicting, repeats: int, clock: Clock = perf_counter) -> None:
        self._model, self._repeats, self._clock = model, repeats, clock
        self._chance = np.random.default_rng(1)
        self._seqs: list[int] = []

    def measure(self, cases: Sequence[Case], fork: bool = False) -> Iterator[Found]:
        """All cases, the least deep first: sequences only grow."""
        model = self._model
        model.expect(max(FILL, *(c.tokens for c in cases)))
        try:
            for case in sorted(cases, key=lambda c: c.depth):
                if case.depth + case.tokens <= model.context:
                    self._fill(case, fork)
                    yield self._case(case)
        finally:
            while self._seqs:
                model.free(self._seqs.pop())

    def _fill(self, case: Case, fork: bool) -> None:
        """Sequences as deep as the case wants them."""
        model = self._model
        if fork:
            while len(self._seqs) > 1:
                model.free(self._seqs.pop())
        while len(self._seqs) < case.sequences:
            self._seqs.append(model.fork(self._seqs[0]) if fork and self._seqs else model.alloc())
            self._grow(self._seqs[-1], case.depth)
        for seq in self._seqs[: case.sequences]:
            self._grow(seq, case.depth)

    def _grow(self, seq: int, depth: int) -> None:
        while (missing := depth - self._model.length(seq)) > 0:
            self._model.step(Step((self._chunk(seq, min(missing, FILL)),)))

    def _case(self, case: Case) -> Found:
        ahead = self._predict(case)
        for _ in range(2):  # compiles what is new, and touches memory
            self._run(case)
        predicted: list[float | None] = []
        measured: list[float] = []
        while len(measured) < self._repeats or (sum(measured) < LEAST_S and len(measured) < MOST_REPEATS):
            self._model.tend()
            predicted.append(self._predict(case))
            measured.append(self._run(case))
        return Found(case, ahead, tuple(predicted), tuple(measured))

    def _predict(self, case: Case) -> float | None:
        return self._model.predict([(case.tokens, float(case.depth))] * case.sequences)

    def _run(self, case: Case) -> float:
        seqs = self._seqs[: case.sequences]
        step = Step(tuple(self._chunk(seq, case.tokens) for seq in seqs))
        start = self._clock()
        self._model.step(step)
        seconds = self._clock() - start
        for seq in seqs:
            self._model.truncate(seq, case.depth)
        return seconds

    def _chunk(self, seq: int, n: int) -> Chunk:
        return Chunk(seq, self._chance.integers(0, self._model.n_vocab, n), np.array([n - 1], np.int64))


def cases_of(depths: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """Every number of tokens, and every batch, at every depth."""
    kinds = [(1, n) for n in TOKENS] + [(b, 1) for b in batches]
    return [Case(sequences, tokens, depth) for depth in depths for sequences, tokens in kinds]


def summary(found: Sequence[Found]) -> dict[str, float]:
    """The mean error of each bucket, and of all cases."""
    buckets: defaultdict[str, list[float]] = defaultdict(list)
    for f in found:
        buckets[f.case.bucket].append(f.error)
    order = [f"{b}{kind}" for kind in ("", " batch") for b in BUCKETS]
    errors = {b: mean(buckets[b]) for b in order if b in buckets}
    return {**errors, "all": mean([f.error for f in found])}


def to_json(found: Sequence[Found]) -> str:
    """Everything."""
    cases = [{**asdict(f), "bucket": f.case.bucket, "error": f.error, "typical": f.typical} for f in found]
    ahead = [e for f in found if (e := f.error_ahead) is not None]
    return json.dumps(
        {"cases": cases, "errors": summary(found), "ahead": mean(ahead) if ahead else None}, indent=1
    )


def line(f: Found) -> str:
    """A case for people, in milliseconds."""
    c = f.case
    what = f"{c.sequences} x {c.tokens}" if c.sequences > 1 else str(c.tokens)
    known = [p for p in f.predicted if p is not None]
    times = (f.ahead, median(known) if known else None, median(f.measured))
    texts = [f"{1e3 * t:10.2f}" if t is not None else f"{'-':>10}" for t in times]
    before = f"{f.error_ahead:7.1%}" if f.error_ahead is not None else f"{'-':>7}"
    return f"{what:>8} {c.depth:>6} {' '.join(texts)} {before} {f.error:7.1%}"


def numbers(text: str) -> list[int]:
    """1,2,3"""
    return [int(n) for n in text.split(",") if n]


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the planner's predictions against the clock.")
    parser.add_argument("-m", "--model", help="the default is SmolLM2")
    parser.add_argument("--depths", type=numbers, default=list(DEPTHS))
    parser.add_argument(
        "--batches", type=numbers, default=list(BATCHES), help="sequences with one token each"
    )
    parser.add_argument("--fork", action="store_true", help="let the sequences of a batch share a beginning")
    parser.add_argument(
        "--eager", action="store_true", help="with all that pays brought in, as a server does"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of hetrun")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = cases_of(args.depths, args.batches)
    options: dict[str, object] = dict(o.split("=", 1) for o in args.option)
    options.setdefault("ctx", max(c.depth + c.tokens for c in cases))
    load = load_average()
    out = sys.stderr if args.json else sys.stdout
    with LocalModel.of(Settings.resolve(environ=None, model=args.model, **options), eager=args.eager) as llm:
        print(HEAD, file=out)

        def tell(f: Found) -> Found:
            print(line(f), file=out, flush=True)
            return f

        def work(model: object) -> list[Found]:
            if not isinstance(model, PlannedModel):
                raise SystemExit("a library runs this model as a whole: nothing is planned")
            return [tell(f) for f in Bench(model, args.repeats).measure(cases, args.fork)]

        found = llm.call(lambda loaded: work(loaded.model))
    for bucket, error in summary(found).items():
        print(f"{bucket:>15} {error:7.1%}", file=out)
    ahead = [e for f in found if (e := f.error_ahead) is not None]
    print(f"{'all, typical':>15} {mean([f.typical for f in found]):7.1%}", file=out)
    if ahead:
        print(f"{'all, ahead':>15} {mean(ahead):7.1%}", file=out)
    if load > BUSY:
        print(f"the machine was busy before (load {load:g}): such times say little", file=out)
    if args.json:
        print(to_json(found))


if __name__ == "__main__":
    main()
