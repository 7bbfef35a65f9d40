"""Why an answer ended, in words."""

from __future__ import annotations

import pytest

from hetrun.client.events import Event, FinishReason, Usage
from hetrun.tui.conversation import note_of


@pytest.mark.parametrize(
    ("reason", "limit", "why"),
    [
        ("stop", 5, ""),
        ("length", 5, "limit of 5 tokens"),
        ("length", 6, "the context is full"),
        ("length", None, "the context is full"),
    ],
)
def test_why_an_answer_ended(reason: FinishReason, limit: int | None, why: str) -> None:
    event = Event("done", finish_reason=reason, usage=Usage(10, 5))
    said = note_of(event, limit)
    assert why in said if why else said == ""
