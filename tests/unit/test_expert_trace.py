"""Rules for what stays, on choices that are made up."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hetrun.backend.weight_streaming import Mixture
from hetrun.prefetch.expert_outlook import TokenForecast
from hetrun.prefetch.expert_records import Records
from hetrun.prefetch.expert_trace import best, judge, lru
from hetrun.prefetch.extents import FileExtent
from hetrun.prefetch.hint_trial import BLOCK, HELD, PAIRS, HintTrial

CHOSEN = [1, 2, 3, 1, 4, 1, 2, 5, 1]


def records(mixtures: int = 2, experts: int = 8, used: int = 2) -> Records:
    each = tuple(Mixture(f"blk.{i}.ffn", (), experts, used, (0, 0, 0), 4096) for i in range(mixtures))
    where = tuple(
        tuple(FileExtent("m", (3 * i + k) * 4096, 4096) for k in range(3)) for i in range(mixtures * experts)
    )
    return Records(each, where, (4096,), (0,) * mixtures)


@pytest.mark.parametrize(
    ("room", "hits"),
    [(0, []), (1, []), (2, [5]), (3, [3, 5, 8]), (9, [3, 5, 6, 8])],
)
def test_what_was_chosen_last_stays(room: int, hits: list[int]) -> None:
    assert [i for i, hit in enumerate(lru(CHOSEN, room)) if hit] == hits


def fewest_misses(chosen: list[int], room: int) -> int:
    """Of all that could have been kept: every choice of what stays is tried."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for expert in chosen:
        found: dict[frozenset[int], int] = {}
        for there, misses in states.items():
            now = misses + (expert not in there)
            every = there | {expert}
            kept = [every] if len(every) <= room else [every - {gone} for gone in every]
            for state in kept:
                found[state] = min(found.get(state, now), now)
        states = found
    return min(states.values())


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_better_than_the_best(seed: int) -> None:
    rng = Random(seed)
    chosen = [min(rng.randrange(6), rng.randrange(6)) for _ in range(12)]
    for room in (1, 2, 3):
        assert sum(not hit for hit in best(chosen, room)) == fewest_misses(chosen, room)
        assert sum(best(chosen, room)) >= sum(lru(chosen, room))


def test_a_trace_is_judged_where_it_is_long_enough() -> None:
    of, rng = records(), Random(1)
    rows = [(i // 4, rng.randrange(16), rng.random() < 0.5) for i in range(4000)]
    found = judge(of, [8], np.array(rows, np.int32))
    assert found is not None
    assert found.choices == 2000
    assert 0.45 < found.ours < 0.55
    assert found.lru < found.best < 1
    assert "at best" in found.text
    assert judge(of, [8], np.array(rows[:500], np.int32)) is None


def test_more_memory_and_a_faster_disk_are_told() -> None:
    of = records(40, 256, 8)
    some = TokenForecast(of, of.packed_bytes // 2, 1e6, 0.01)
    assert some.chosen_bytes == 40 * 8 * 3 * 4096
    assert 0.65 < some.found < 0.81  # published traces, LRU over half of the experts
    assert some.token.bound == "disk"
    assert any("bound by disk" in note for note in some.notes)
    assert any("with 4.0 GiB more" in note for note in some.notes)
    assert TokenForecast(of, 2 * of.packed_bytes, 1e6, 0.01).missing_bytes == 0


@pytest.mark.parametrize("pays", [True, False])
def test_hints_are_followed_where_they_pay(pays: bool) -> None:
    """Whatever else passes take changes meanwhile."""
    trial, rng = HintTrial(), Random(1)
    on = []
    for i in range(2 * PAIRS * BLOCK + HELD // 2):
        on.append(trial.on)
        seconds = 0.1 + 0.1 * (i > 50) + rng.random() / 100
        trial.observe(seconds * (0.8 if trial.on == pays else 1.0))
    tried, after = on[: 2 * PAIRS * BLOCK], on[2 * PAIRS * BLOCK :]
    assert sum(tried) == len(tried) // 2
    assert set(after) == {pays}
    assert (trial.gain > 0) == pays
