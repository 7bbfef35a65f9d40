"""Speculation apart from any model: what is guessed, how likely that is, and whether trying it pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hetrun.engine.speculation import methods
from hetrun.engine.speculation.acceptance import Acceptance, SharedAcceptance
from hetrun.engine.speculation.cost import DraftCosts
from hetrun.engine.speculation.draft_length import NOTHING, PATIENCE, Decision, DraftCandidate, decide
from hetrun.engine.speculation.prompt_lookup import AT_ONCE, PromptLookup
from hetrun.engine.speculation.speculator import Promise
from hetrun.engine.step_time import FORGOTTEN, StepShape, StepTimes
from tests.support.step_times import Said, unpredicted

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def following(tokens: list[int], n_prompt: int = 1) -> PromptLookup:
    """A lookup that has seen all of a text."""
    found = PromptLookup(tokens, n_prompt, Acceptance(SharedAcceptance()))
    while found._known < len(tokens):
        found.follow()
    return found


def continued(tokens: Sequence[int], at: int, n: int) -> list[int]:
    """What follows a place, where a text goes on behind its end as it did there."""
    text = list(tokens)
    for i in range(n):
        text.append(text[at + i])
    return text[len(tokens) :]


# --- lookup


@given(TEXTS, st.data())
def test_a_guess_is_what_followed_the_same_tokens_before(tokens: list[int], data: st.DataObject) -> None:
    found = following(tokens, data.draw(st.integers(1, len(tokens))))
    chances = found.chances(8)
    if not chances:
        assert tokens[-1] not in tokens[:-1]
        return
    at, n = found._at, found.length
    assert 0 < at < len(tokens)
    assert tokens[at - n : at] == tokens[len(tokens) - n :]
    assert len(chances) == 8
    assert sorted(chances, reverse=True) == list(chances)
    assert found.propose(8) == continued(tokens, at, 8)


@given(TEXTS, st.integers(1, 40))
def test_a_text_that_comes_token_by_token_is_known_as_one_that_comes_at_once(
    tokens: list[int], n_prompt: int
) -> None:
    n_prompt = min(n_prompt, len(tokens))
    growing = tokens[:n_prompt]
    found = PromptLookup(growing, n_prompt, Acceptance(SharedAcceptance()))
    for token in tokens[n_prompt:]:
        found.follow()
        growing.append(token)
    found.follow()
    assert (found._single, found._pair) == (following(tokens)._single, following(tokens)._pair)


def test_the_longest_match_is_taken_and_of_equal_ones_the_last() -> None:
    assert following([1, 2, 3, 9, 0, 2, 3, 8, 5, 1, 2, 3]).propose(1) == [9]
    assert following([2, 3, 9, 0, 2, 3, 8, 5, 2, 3]).propose(2) == [8, 5]
    assert following([7, 1, 7, 2, 7]).propose(1) == [2]


def test_a_copy_goes_on_while_it_is_right() -> None:
    text = [*range(20), *range(5)]
    found = following(text, 20)
    before = found.length
    text.append(5)
    found.follow()
    assert (found.length, found.propose(3)) == (before + 1, [6, 7, 8])
    text.append(99)
    found.follow()
    assert found.chances(1) == ()


def test_a_long_prompt_is_taken_in_part_by_part() -> None:
    n = 3 * AT_ONCE
    found = PromptLookup([*range(n), 7, 8], n + 2, Acceptance(SharedAcceptance()))
    for part in (1, 2, 3):
        assert found.chances(1) == ()
        found.follow()
        assert len(found._pair) == part * AT_ONCE - 1
    found.follow()
    assert found.propose(2) == [9, 10]


# --- how likely


def test_what_is_often_right_becomes_likely_and_what_is_not_does_not() -> None:
    good, bad = Acceptance(SharedAcceptance()), Acceptance(SharedAcceptance())
    first = good.chances(3, 1)[0]
    for _ in range(50):
        good.observe(3, True)
        bad.observe(3, False)
    assert bad.chances(3, 1)[0] < 0.1 < first < 0.9 < good.chances(3, 1)[0]


def test_a_new_sequence_begins_with_what_others_have_seen() -> None:
    shared = SharedAcceptance()
    before = Acceptance(shared).chances(2, 1)[0]
    other = Acceptance(shared)
    for _ in range(100):
        other.observe(2, True)
    assert Acceptance(shared).chances(2, 1)[0] > before + 0.2


def test_each_guess_needs_all_before_it() -> None:
    found = Acceptance(SharedAcceptance()).chances(1, 15)
    assert len(found) == 15
    assert all(0 < b < a < 1 for a, b in pairwise(found))


# --- whether it pays


def timed(each: float, base: float = 1.0) -> DraftCosts:
    """Steps of one sequence take `base`, and so much longer for each token more."""
    return timed_by(StepTimes(Said(lambda chunks: base + each * (sum(n for n, _ in chunks) - 1))))


def timed_by(times: StepTimes) -> DraftCosts:
    """Every shape was compiled."""
    found = DraftCosts(times)
    for drafting, length in [(1, n) for n in (1, 3, 7, 15)] + [(2, n) for n in (1, 3, 7)]:
        for n in (1, 8):
            assert found.compiled([0] * n, drafting, length, 0.0)
    return found


def ran(times: StepTimes, length: int, seconds: float) -> None:
    """A step of one sequence with a draft of `length` tokens took `seconds`."""
    times.observe(StepShape(1, 1 + length, 0, length, 1), seconds)


CERTAIN, UNSURE, POOR = ([p ** (i + 1) for i in range(15)] for p in (0.99, 0.8, 0.1))


@pytest.mark.parametrize(
    ("chances", "each", "length"),
    [
        (CERTAIN, 0.0, 15),  # the step costs the same, as where weights come from disk
        (UNSURE, 0.0, 15),
        (POOR, 0.0, 15),
        (CERTAIN, 0.1, 15),
        (UNSURE, 0.1, 7),
        (UNSURE, 0.3, 3),
        (UNSURE, 0.5, 1),
        (POOR, 0.1, 0),
        (CERTAIN, 1.0, 0),  # computing is all that a step does: nothing is won
        ((), 0.0, 0),
    ],
)
def test_a_draft_is_as_long_as_it_pays(chances: Sequence[float], each: float, length: int) -> None:
    found = decide([DraftCandidate(0, chances, 15)], [100], timed(each), 31)
    assert found.length == length
    assert found.places == ((0,) if length else ())


def test_no_more_than_there_is_room_for() -> None:
    assert decide([DraftCandidate(0, CERTAIN, 5)], [100], timed(0.0), 31).length == 3
    assert decide([DraftCandidate(0, CERTAIN, 0)], [100], timed(0.0), 31) is NOTHING
    assert decide([DraftCandidate(0, CERTAIN, 15)], [100], timed(0.0), 2).length == 1
    assert decide([DraftCandidate(0, CERTAIN, 15)], [100], timed(0.0), 0) is NOTHING


def test_of_many_sequences_those_that_repeat_themselves_carry_drafts() -> None:
    candidates = [DraftCandidate(i, CERTAIN if i in (2, 5) else POOR, 15) for i in range(8)]
    found = decide(candidates, [100] * 8, timed(0.02, base=2.0), 14)
    assert (sorted(found.places), found.length) == ([2, 5], 7)


def test_no_sequence_waits_much_longer_for_what_others_win() -> None:
    """What all of them carry may take as long as it likes."""
    depths, found = [100] * 4, timed(0.05)
    two = decide([DraftCandidate(i, CERTAIN if i < 2 else (), 15) for i in range(4)], depths, found, 60)
    assert (two.places, two.length) == ((0, 1), 7)
    assert found.seconds(depths, 2, 7) < PATIENCE * found.seconds(depths, 0, 0) < found.seconds(depths, 2, 15)
    assert decide([DraftCandidate(i, CERTAIN, 15) for i in range(4)], depths, found, 60).length == 15


def test_it_takes_more_to_begin_than_to_go_on_and_what_is_not_kept_is_not_believed() -> None:
    one = [DraftCandidate(0, [0.15], 1)]
    assert decide(one, [1], timed(0.1), 8, drafting=True).length == 1
    assert decide(one, [1], timed(0.1), 8, drafting=False) is NOTHING
    assert decide(one, [1], timed(0.1), 8, drafting=True, trust=0.8) is NOTHING


def test_promises_that_are_not_kept_are_forgiven_in_the_end() -> None:
    promise = Promise()
    assert promise.trust == 1
    for _ in range(20):
        promise.made(2.0)
        promise.kept(0)
    assert promise.trust < 0.2
    for _ in range(1000):
        promise.made(0.0)
    assert promise.trust > 0.9
    for _ in range(50):
        promise.made(2.0)
        promise.kept(2)
    assert 0.95 < promise.trust <= 1


def test_steps_that_take_longer_than_predicted_end_it_and_are_tried_again_much_later() -> None:
    times = StepTimes(Said(lambda chunks: 1.0 + 0.1 * (sum(n for n, _ in chunks) - 1)))
    found, one = timed_by(times), [DraftCandidate(0, CERTAIN, 7)]
    assert decide(one, [1], found, 8).length == 7
    for _ in range(10):
        ran(times, 7, 20.0)
        ran(times, 0, 1.0)
    assert decide(one, [1], found, 8).length < 7
    for _ in range(8 * FORGOTTEN):
        ran(times, 0, 1.0)
    assert decide(one, [1], found, 8).length == 7


def test_without_predictions_steps_are_measured() -> None:
    times = unpredicted()
    found = timed_by(times)
    for _ in range(5):
        ran(times, 0, 2.0)
        ran(times, 3, 2.5)
    assert found.seconds([1], 0, 0) == pytest.approx(2.0, rel=0.05)
    assert found.seconds([1], 1, 3) == pytest.approx(2.5, rel=0.05)
    assert found.seconds([1], 1, 7) > found.seconds([1], 1, 3)


def test_one_slow_step_is_no_news_of_the_others() -> None:
    times = StepTimes(Said(lambda chunks: 1.0 + 0.1 * (sum(n for n, _ in chunks) - 1)))
    found = timed_by(times)
    for _ in range(20):
        ran(times, 3, 1.3)
    ran(times, 3, 100.0)
    assert found.seconds([1], 1, 3) < 1.6


def test_what_was_asked_for() -> None:
    assert methods.lookup(exact=True).exact
    assert isinstance(methods.lookup(exact=False).proposer([1, 2], 2), PromptLookup)
    assert Decision() == NOTHING


def test_what_stands_for_a_picture_is_no_guess() -> None:
    """Rows of pictures are negative numbers; a draft ends before them, and pairs with them are told apart."""
    text = [1, 2, 3, 4, -7, -8, 5, 6, 1, 2, 3]
    found = PromptLookup(text, len(text), Acceptance(SharedAcceptance()))
    while found._known < len(text):
        found.follow()
    assert found.propose(4) == [4]
    text = [9, -7, 5, 3, -7, 6, 9, -7]
    found = PromptLookup(text, len(text), Acceptance(SharedAcceptance()))
    while found._known < len(text):
        found.follow()
    assert found.propose(1) == [5]
