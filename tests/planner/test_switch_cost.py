"""The price of changing backends, from times that a test makes up (test_autotuner.py: measured for real)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hetrun.executor.autotune.measurement.prober import Prober, price_of_a_turn
from hetrun.graph.signature import Unit, units
from tests.models.tiny import TinyLlama
from tests.support.rig import graph_of

GRAPH = graph_of(TinyLlama("turns", layers=3))
UNITS = units(GRAPH)
BOTH = [{"here", "there"}] * len(UNITS)


class Clock(Prober):
    """A prober whose units take 2 s here and 3 s there, and each change 0.25 s."""

    def __init__(self, change: float) -> None:
        self.change = change

    def in_turn(
        self, units: Sequence[Unit], ways: Sequence[Sequence[str]], threads: int, tokens: int
    ) -> list[float]:
        assert [u.scope for u in units] == ["blk.1.ffn", "blk.2.attn"]
        cost = {"here": 2.0, "there": 3.0}
        return [
            sum(cost[b] for b in way) + self.change * sum(a != b for a, b in pairwise((*way, way[0])))
            for way in ways
        ]


def test_the_price_is_what_taking_turns_takes_more() -> None:
    assert price_of_a_turn(Clock(0.25), UNITS, BOTH, "here", "there", 2, 16) == pytest.approx(0.25)


def test_noise_makes_no_price_negative() -> None:
    assert price_of_a_turn(Clock(-0.25), UNITS, BOTH, "here", "there", 2, 16) == 0


def test_without_neighbours_that_run_on_both_there_is_no_price() -> None:
    every_other = [{"here", "there"} if i % 2 else {"here"} for i in range(len(UNITS))]
    assert price_of_a_turn(Clock(0.25), UNITS, every_other, "here", "there", 2, 16) is None
