"""What a process takes besides weights, before a model is open."""

from __future__ import annotations

import pytest

from hetrun.executor.loading import memory_estimates
from hetrun.executor.loading.memory_estimates import ENTRY, LIBRARIES, PROCESS, besides, in_parts
from hetrun.memory import breakdown
from hetrun.memory.ledger import RESERVE, Figures

MIB = 1 << 20


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[Figures]:
    """What the kernel says of this process: the last of them."""
    said = [Figures(25 * MIB, 12 * MIB)]
    monkeypatch.setattr(memory_estimates, "kernel_figures", lambda: said[-1])
    return said


def test_a_vocabulary_counts_before_it_is_open(process: list[Figures]) -> None:
    assert besides(0) == RESERVE + PROCESS
    assert besides(500_000) == RESERVE + PROCESS + 500_000 * ENTRY


def test_a_front_end_is_a_helper(process: list[Figures]) -> None:
    alone, both = in_parts(besides(1000)), in_parts(besides(1000), 40 * MIB)
    assert both[breakdown.HELPERS] == alone[breakdown.HELPERS] + 40 * MIB
    assert sum(both.values()) == sum(alone.values()) + 40 * MIB


def test_plans_before_and_after_a_model_is_open_are_the_same(process: list[Figures]) -> None:
    before = in_parts(besides(300_000))
    process.append(Figures(97 * MIB, 22 * MIB))
    assert in_parts(besides(300_000, 2 * MIB)) == before
    assert before[breakdown.LIBRARIES] == LIBRARIES


def test_a_process_that_takes_more_plans_with_what_it_takes(process: list[Figures]) -> None:
    process.append(Figures(200 * MIB, 90 * MIB))
    parts = in_parts(besides(1000, 2 * MIB))
    assert parts[breakdown.LIBRARIES] == 90 * MIB
    assert parts[breakdown.INTERPRETER] == 202 * MIB
