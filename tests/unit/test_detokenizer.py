"""The stream decoder: the same text however the bytes are cut, and nothing that would be taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from hetrun.text.detokenizer import StopStrings, StreamDecoder

FEW = "abé€🙂"  # few letters, of one to four bytes: many near matches
texts = st.one_of(st.text(), st.text(alphabet=FEW, max_size=40))
stops = st.lists(st.text(alphabet=FEW, min_size=1, max_size=5), max_size=4)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)] or [data]


def stopped_text(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By the book: grow the text by one character until it ends with a stop string, the longest that fits."""
    for end in range(1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


@given(text=texts, cuts=st.lists(st.integers(0, 10**6)))
def test_any_cut_gives_the_same_text(text: str, cuts: list[int]) -> None:
    decoder = StreamDecoder()
    out = [decoder.push(piece) for piece in pieces(text.encode(), cuts)]
    assert "".join(out) == text  # whole characters are not held back
    assert decoder.flush() == ""
    assert decoder.finished
    assert decoder.stopped is None


@given(data=st.binary(), cuts=st.lists(st.integers(0, 10**6)))
@example(data=b"\xed\xa0\x80a", cuts=[1, 2, 3])  # half of a surrogate pair
@example(data=b"\xf0\x9f\x99", cuts=[1, 2])
@example(data=b"\xf0\x80\x80\x80", cuts=[1, 2, 3])  # an overlong form
@example(data=b"\xf4\x90\x80\x80", cuts=[1, 2, 3])  # beyond U+10FFFF
def test_any_cut_of_any_bytes_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    decoder = StreamDecoder()
    out = "".join(decoder.push(piece) for piece in pieces(data, cuts)) + decoder.flush()
    assert out == data.decode("utf-8", errors="replace")


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 10**6)))
@example(text="abcd", stop=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="abcd", stop=["abcd", "bc"], cuts=[])
@example(text="xabab", stop=["abb", "bab", "ab"], cuts=[2])
def test_stop_strings_are_found_across_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    decoder = StreamDecoder(stop)
    out = "".join(decoder.push(piece) for piece in pieces(text.encode(), cuts))
    expected, found = stopped_text(text, stop)
    assert decoder.stopped == found
    assert decoder.finished == (found is not None)
    assert out + decoder.flush() == expected
    assert decoder.finished


# Bytes that are now and then no characters, and stop strings that hold what then stands for them.
broken = st.lists(
    st.sampled_from([*FEW, b"\xe2\x82", b"\xf0\x9f", b"\x80", b"\xff", b"\xc3"]), max_size=25
).map(lambda parts: b"".join(p.encode() if isinstance(p, str) else p for p in parts))
marked = st.lists(st.text(alphabet=FEW + "\ufffd", min_size=1, max_size=4), max_size=4)


@given(data=broken, stop=marked, cuts=st.lists(st.integers(0, 10**6)))
@example(data=b"a\xe2\x82a", stop=["\ufffda"], cuts=[1, 2, 3])
@example(data=b"\xf0\x9f", stop=["\ufffd"], cuts=[1])
def test_stop_strings_are_found_in_broken_bytes(data: bytes, stop: list[str], cuts: list[int]) -> None:
    """A half character is certain only when the next piece, or none, comes: the answer is the same."""
    decoder = StreamDecoder(stop)
    out = "".join(decoder.push(piece) for piece in pieces(data, cuts)) + decoder.flush()
    expected, found = stopped_text(data.decode("utf-8", "replace"), stop)
    assert (out, decoder.stopped) == (expected, found)
    assert decoder.finished


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 10**6)))
def test_what_is_certain_comes_at_once(text: str, stop: list[str], cuts: list[int]) -> None:
    decoder = StreamDecoder(stop)
    seen, given_out = b"", ""
    for piece in pieces(text.encode(), cuts):
        seen += piece
        given_out += decoder.push(piece)
        if decoder.finished:
            break
        known = seen.decode(errors="ignore")
        held = known[len(given_out) :]
        assert known.startswith(given_out)
        assert held == "" or any(string.startswith(held) and string != held for string in stop)


def test_half_a_character_waits_for_its_other_half() -> None:
    decoder = StreamDecoder()
    assert [decoder.push(bytes([byte])) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]


def test_bytes_that_cannot_be_completed_are_replaced() -> None:
    decoder = StreamDecoder()
    assert decoder.push(b"\xf0\x9f") == ""
    assert decoder.push(b"a") == "\ufffda"
    assert decoder.push(b"\xe2\x82") == ""
    assert decoder.flush() == "\ufffd"


def test_the_stop_string_is_not_part_of_the_text() -> None:
    decoder = StreamDecoder(["\n\nUser:", "</s>"])
    seen = [
        (decoder.push(piece), decoder.finished)
        for piece in (b"Hi\n", b"\nUse", b" it. <", b"/s> and more", b"more")
    ]
    assert seen == [("Hi", False), ("", False), ("\n\nUse it. ", False), ("", True), ("", True)]
    assert decoder.stopped == "</s>"
    assert decoder.flush() == ""


def test_what_only_began_like_a_stop_string_comes_in_the_end() -> None:
    decoder = StreamDecoder("STOP")
    assert decoder.push(b"so STO") == "so "
    assert decoder.flush() == "STO"
    assert decoder.stopped is None


def test_one_stop_string_is_a_string() -> None:
    decoder = StreamDecoder("ab")
    assert decoder.push(b"xaxbxaby") == "xaxbx"
    assert decoder.stopped == "ab"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StreamDecoder(["a", ""])


def test_the_cost_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst text for a search that starts over: each piece is again nearly the stop string."""
    looked_up = 0

    class Counting(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked_up
            looked_up += 1
            return super().__contains__(key)

    stop = "a" * 500 + "b"
    decoder = StreamDecoder([stop])
    assert isinstance(decoder._stops, StopStrings)
    monkeypatch.setattr(decoder._stops, "_next", [Counting(children) for children in decoder._stops._next])
    n = 5000
    out = "".join(decoder.push(b"a") for _ in range(n)) + decoder.push(b"c")
    assert out == "a" * n + "c"
    assert looked_up < 3 * n
