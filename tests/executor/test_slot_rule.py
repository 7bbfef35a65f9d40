"""Which experts should lie in slots: on what a small trained mixture chose, and on choices made up by a test.

tests/data/choices.npz: a mixture of 4 layers and 4 of 32 experts, trained on manuals and programs for a few
minutes, reads a part of a manual and then of some programs that it has not seen.
"""

from __future__ import annotations

import numpy as np
import pytest

from hetrun.executor.slot_rule import MARGIN, SlotChange, SlotRule
from hetrun.prefetch.expert_trace import judge_layers
from tests.support.paths import ROOT
from tests.tools.slot_rules import compared


def lies(experts: int, *there: int) -> np.ndarray:
    found = np.zeros((1, experts), np.bool_)
    found[0, list(there)] = True
    return found


def test_it_finds_about_what_lru_finds_and_brings_few_of_the_experts() -> None:
    with np.load(ROOT / "tests" / "data" / "choices.npz") as data:
        chosen, experts = data["chosen"].astype(np.int64), int(data["experts"])
    found = {each.rule: each for each in compared(chosen, experts, experts // 2)}
    ours, stays, last = found["ours"], found["what was chosen most before"], found["LRU"]
    assert ours.found > 1.2 * stays.found
    assert ours.found > found["what this text chooses most"].found
    assert ours.found > last.found - 0.01
    assert ours.brought < last.brought / 20
    assert ours.found < found["Belady"].found
    each = chosen.shape[1] * chosen.shape[2]
    others = (stays, last, found["LFU"], found["half after 128 tokens, margin 0"])
    assert all(ours.moved(each) < other.moved(each) for other in others)


def test_an_expert_that_is_chosen_once_replaces_no_other() -> None:
    rule = SlotRule(1, 4)
    for _ in range(20):
        rule.age(1)
        rule.observe(0, np.array([[0, 1]]))
    rule.observe(0, np.array([[3, 1]]))
    assert not rule.changes(lies(4, 0, 1), ~lies(4, 0, 1), 8)
    for _ in range(int(MARGIN) + 20):
        rule.age(1)
        rule.observe(0, np.array([[3, 1]]))
    assert rule.changes(lies(4, 0, 1), ~lies(4, 0, 1), 8) == [SlotChange(0, 3, 0)]
    assert not rule.changes(lies(4, 0, 1), ~lies(4, 0, 1), 0)


def test_what_is_worth_most_comes_first_one_of_a_mixture_at_a_time() -> None:
    rule = SlotRule(3, 4)
    for mixture, times in enumerate((10, 30, 20)):
        rule.observe(mixture, np.full(times, 2))
        rule.observe(mixture, np.full(times - 5, 3))
    there = np.repeat(lies(4, 0, 1), 3, axis=0)
    found = rule.changes(there, ~there, 2)
    assert [(c.mixture, c.comes) for c in found] == [(1, 2), (2, 2)]


def test_mixtures_with_fewer_experts_get_none_that_they_do_not_have() -> None:
    rule = SlotRule(2, 8)
    rule.observe(0, np.full(50, 7))
    rule.observe(1, np.full(50, 2))
    there, may_come = np.zeros((2, 8), np.bool_), np.zeros((2, 8), np.bool_)
    there[:, :2] = True
    may_come[0, 2:], may_come[1, 2:4] = True, True
    assert {(c.mixture, c.comes) for c in rule.changes(there, may_come, 8)} == {(0, 7), (1, 2)}


def test_what_was_found_is_judged_beside_other_rules_in_each_layers_slots() -> None:
    rng = np.random.default_rng(0)
    mixture = np.tile([0, 1], 1000)
    expert = np.where(rng.random(2000) < 0.8, 0, rng.integers(1, 6, 2000))
    trace = np.stack([mixture, expert, expert == 0], axis=1).astype(np.int32)
    kept = judge_layers([1, 2], trace)
    assert kept
    assert kept.choices == 1000
    assert kept.ours == pytest.approx((expert[1000:] == 0).mean())
    assert kept.layers < kept.best
    assert "in the slots of each layer" in kept.text
    assert judge_layers([1, 2], trace[:10]) is None
