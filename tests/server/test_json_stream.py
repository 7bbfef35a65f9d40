"""JSON in parts: the same text, and others have their turns."""

from __future__ import annotations

import asyncio
import json
from itertools import count

import pytest
from hypothesis import given, strategies as st

from hetrun.client.events import TokenLogprob
from hetrun.server import json_stream
from hetrun.server.json_stream import PART, LazyList, json_text, long_text
from hetrun.server.logprobs import entry

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(values, st.lists(values, max_size=4), st.integers(0, 3 * PART))
def test_the_text_is_that_of_json(value: object, items: list[object], further: int) -> None:
    def said(long: object, plain: object) -> dict[str, object]:
        return {"value": value, "nested": [{"long": long, "plain": plain}]}

    def long() -> LazyList:
        return LazyList(items, range(further))

    expected = json.dumps(said([*items, *range(further)], list(range(further))), separators=(",", ":"))
    assert asyncio.run(long_text(said(long(), list(range(further))))) == expected
    assert json_text(said(long(), list(range(further)))) == expected


async def test_others_have_their_turns_while_much_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = count()  # of a clock by which each part takes longer than a turn, on a fast machine, too
    monkeypatch.setattr(json_stream, "perf_counter", lambda: next(readings) * 2 * json_stream.TURN_S)
    top = tuple((token, -0.5) for token in range(20))
    scored = TokenLogprob(1, -1.0, top, b"token", (b"other",) * 20)
    rounds = 0

    async def counting() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(counting())
    said = {"choices": [{"logprobs": {"content": LazyList(map(entry, [scored] * 50 * PART))}}]}
    text = await long_text(said)
    others.cancel()
    assert len(json.loads(text)["choices"][0]["logprobs"]["content"]) == 50 * PART
    assert rounds >= 50
