"""A model that guesses for another one: what it says behind any text, and what it takes in at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.engine.speculation.acceptance import Acceptance, SharedAcceptance
from hetrun.engine.speculation.combined import CombinedGuesser
from hetrun.engine.speculation.draft_model import AT_ONCE, DraftModel
from hetrun.engine.speculation.prompt_lookup import PromptLookup
from tests.engine.fakemodel import FakeModel


@given(st.data())
def test_a_draft_model_goes_on_from_any_text(data: st.DataObject) -> None:
    """Whatever was appended or guessed wrongly, it guesses what it would say behind the text as it is."""
    model = FakeModel({"a": bytes(range(40, 60))}, context=200)
    drafts, tokens = DraftModel(model, 255), [97, 97]
    seq = drafts.begin()
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 15))
        found = drafts.propose(seq, tokens, n)
        at = len(tokens) - 2
        assert found == [*range(40 + at, 60), *[0] * n][:n]
        assert model.texts[seq] == [*tokens, *found[:-1]]
        right = data.draw(st.integers(0, min(n, 18 - at)))
        tokens += [*found[:right], 7] if right < n and at + right < 18 else found[:right]
        if at > 10:
            break
    drafts.end(seq)
    assert model.texts == {}


def test_a_long_text_is_taken_in_part_by_part() -> None:
    """Everybody waits for it: no guesses until most is done, and then those of the whole text."""
    model = FakeModel({"a": bytes(range(40, 60))}, context=4 * AT_ONCE)
    drafts = DraftModel(model, 255)
    tokens = [97, *np.random.default_rng(0).integers(0, 255, 2 * AT_ONCE + 100).tolist()]
    guessing = CombinedGuesser(
        PromptLookup(tokens, len(tokens), Acceptance(SharedAcceptance())), tokens, drafts
    )
    guessing.follow()
    assert guessing.chances(3)[0] == drafts.rate
    assert guessing.propose(3) == []
    found = guessing.propose(3)
    assert len(found) == 3
    assert [n for step in model.steps for _, n in step] == [AT_ONCE, AT_ONCE, 101, 1, 1]
    assert drafts.propose(0, tokens, 3) == found
    guessing.close()
    assert model.texts == {}


def test_a_draft_model_that_is_wrong_is_asked_seldom_and_forgiven_in_the_end() -> None:
    drafts = DraftModel(FakeModel(), 255)
    before = drafts.rate
    for _ in range(30):
        drafts.judged(0, False)
    assert drafts.rate < 0.1
    for _ in range(2000):
        drafts.rested()
    assert drafts.rate == pytest.approx(before, abs=0.01)
