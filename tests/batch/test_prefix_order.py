"""Requests that begin alike come one behind the other, and the oldest first."""

from __future__ import annotations

from hypothesis import given, strategies as st

from hetrun.tools.batch.prefix_order import PART, by_beginnings

A, B, C = (letter * PART for letter in (b"a", b"b", b"c"))


def test_families_stay_together_and_begin_with_their_oldest() -> None:
    texts = [B + b"1", A + b"1", C + A, B + b"2", A + b"2", C + B, B, C + A + b"x"]
    assert by_beginnings(texts) == [0, 3, 6, 1, 4, 2, 7, 5]


def test_texts_that_have_nothing_in_common_stay_as_they_are() -> None:
    assert by_beginnings([b"c", b"b", b"a", b"", b"b"]) == [0, 1, 4, 2, 3]


@given(st.lists(st.lists(st.sampled_from([A, B, C, b"x", b"y"]), max_size=5).map(b"".join), max_size=30))
def test_the_first_stays_first_and_texts_that_share_a_beginning_stay_together(texts: list[bytes]) -> None:
    order = by_beginnings(texts)
    assert sorted(order) == list(range(len(texts)))
    if texts:
        assert order[0] == 0
    for size in range(PART, 6 * PART, PART):
        seen = [texts[i][:size] for i in order if len(texts[i]) >= size]
        runs = [text for text, before in zip(seen, [None, *seen], strict=False) if text != before]
        assert len(runs) == len(set(runs))
