"""The script that holds predictions against the clock, on a model whose clock and predictions are known."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from hetrun.executor.steps import Step
from tests.tools.planner_accuracy import BATCHES, Bench, Case, Found, cases_of, line, summary, to_json

CONTEXT = 600


class Clockwork:
    """A model whose steps take an exact time, on a clock of its own, and which predicts a fifth too much."""

    n_vocab, context = 50, CONTEXT

    def __init__(self) -> None:
        self.time = 0.0
        self.lengths: dict[int, int] = {}
        self.seen: set[tuple[tuple[int, int], ...]] = set()
        self.expected = 0

    def step(self, step: Step) -> None:
        chunks = [(len(c.tokens), self.lengths[c.seq]) for c in step.chunks]
        self.time += self.seconds(chunks)
        self.seen.add(tuple(chunks))
        for chunk in step.chunks:
            assert (0 <= chunk.tokens).all()
            assert (chunk.tokens < self.n_vocab).all()
            assert list(chunk.wanted) == [len(chunk.tokens) - 1]
            self.lengths[chunk.seq] += len(chunk.tokens)
            assert self.lengths[chunk.seq] <= CONTEXT

    def seconds(self, chunks: Sequence[tuple[int, float]]) -> float:
        return 1e-3 + sum(n * (1e-4 + 1e-6 * depth) for n, depth in chunks)

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        known = tuple((n, int(depth)) for n, depth in chunks) in self.seen
        return 1.2 * self.seconds(chunks) if known else None

    def expect(self, tokens: int) -> None:
        self.expected = tokens

    def tend(self) -> None:
        self.time += 100  # which is part of no step

    def alloc(self) -> int:
        self.lengths[seq := len(self.lengths)] = 0
        return seq

    def fork(self, seq: int) -> int:
        new = self.alloc()
        self.lengths[new] = self.lengths[seq]
        return new

    def truncate(self, seq: int, n: int) -> None:
        self.lengths[seq] = n

    def free(self, seq: int) -> None:
        del self.lengths[seq]

    def length(self, seq: int) -> int:
        return self.lengths[seq]


@pytest.mark.parametrize("fork", [False, True])
def test_each_case_is_measured_at_its_depth(fork: bool) -> None:
    model, cases = Clockwork(), cases_of([128, 0], BATCHES)
    found = list(Bench(model, 3, lambda: model.time).measure(cases, fork))
    assert {f.case for f in found} == set(cases) - {Case(1, 512, 128)}  # which is longer than the context
    for f in found:
        true = model.seconds([(f.case.tokens, f.case.depth)] * f.case.sequences)
        assert f.measured == pytest.approx([true] * len(f.measured))
        assert f.error == pytest.approx(0.2)
    assert not model.lengths
    assert model.expected == 512


def test_what_was_never_run_is_unknown_ahead() -> None:
    model = Clockwork()
    found = next(iter(Bench(model, 3, lambda: model.time).measure([Case(1, 4, 10)])))
    assert found.ahead is None
    assert found.error_ahead is None
    assert "-" in line(found)


def test_errors_are_relative_and_each_bucket_has_its_own() -> None:
    one = Found(Case(1, 1, 0), 2.0, (1.1, None), (1.0, 1.0))
    many = Found(Case(8, 1, 0), 1.0, (1.0,), (1.0,))
    assert one.error == pytest.approx(0.55)
    assert Found(Case(1, 1, 0), None, (1.0, 1.0, 1.0), (1.0, 1.0, 50.0)).typical == 0
    assert one.error_ahead == pytest.approx(1.0)
    assert summary([one, many]) == pytest.approx({"1": 0.55, "5-8 batch": 0.0, "all": 0.275})
    report = json.loads(to_json([one, many]))
    assert report["ahead"] == pytest.approx(0.5)
    assert [c["bucket"] for c in report["cases"]] == ["1", "5-8 batch"]
    assert np.isfinite(report["errors"]["all"])
