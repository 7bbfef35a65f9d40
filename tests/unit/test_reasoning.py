"""What a model thinks, apart from what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hetrun.text.chat.answer_parser import AnswerReader
from hetrun.text.chat.reasoning import ThoughtSplitter, mark_of, opened_in
from hetrun.text.tool_parsers.formats import FORMATS
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import Arguments, CallStart, Piece, Prose, Thought, joined


def split(pieces: Sequence[str], opened: bool = False) -> list[Piece]:
    splitter = ThoughtSplitter("<think>")
    if opened:
        splitter.open()
    return joined([piece for text in pieces for piece in splitter.push(text)] + splitter.finish())


ANSWERS = [
    ("<think>\nHm, a <b>?\n</think>\n\nYes.\n", False, [Thought("Hm, a <b>?"), Prose("Yes.\n")]),
    (" \n<think>Hm</think>Yes", False, [Thought("Hm"), Prose("Yes")]),
    ("Hm\n</think>\nYes <think>", True, [Thought("Hm"), Prose("Yes <think>")]),
    ("<think>\n\n</think>\n\nYes", False, [Prose("Yes")]),
    ("<think>Hm, </thi", False, [Thought("Hm, </thi")]),
    ("<think>Hm  ", False, [Thought("Hm")]),
    ("  Yes <think>no</think>", False, [Prose("  Yes <think>no</think>")]),
    ("<thin", False, [Prose("<thin")]),
    ("", False, []),
    ("", True, []),
]


@pytest.mark.parametrize(("text", "opened", "found"), ANSWERS)
def test_thoughts_are_apart(text: str, opened: bool, found: list[Piece]) -> None:
    assert split([text], opened) == found


@given(answer=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(0, 60)))
def test_pieces_change_nothing(answer: tuple[str, bool, list[Piece]], cuts: list[int]) -> None:
    text, opened, found = answer
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert split([text[a:b] for a, b in pairwise(at)], opened) == found


def test_a_thought_comes_as_it_is_written() -> None:
    splitter = ThoughtSplitter("<think>")
    assert splitter.push("<think>\n Hm") == [Thought("Hm")]
    assert splitter.push(", so \n<") == [Thought(", so")]
    assert splitter.push("b") == [Thought(" \n<b")]


def test_no_call_is_made_in_a_thought() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    reader = AnswerReader(ThoughtSplitter("<think>"), CallReader(FORMATS["hermes"], {"now": {}}))
    found = joined(reader.push(f"<think>Perhaps {call}</think>\n{call}") + reader.finish())
    assert found == [Thought(f"Perhaps {call}"), CallStart(0, "now"), Arguments(0, "{}")]


def test_marks_are_found_in_templates_and_prompts() -> None:
    assert mark_of("{{ content.split('</think>') }}") == "<think>"
    assert mark_of("[THINK]{{ x }}[/THINK]") == "[THINK]"
    assert mark_of("{{ messages }}") == ""
    assert mark_of("<|user|>{{ content }}<|end|>") == ""
    assert mark_of("<|channel|>final<|message|>{{ content }}<|end|>") == "<|channel|>analysis<|message|>"
    assert opened_in("<|start|>assistant<|channel|>analysis<|message|>") == "<|channel|>analysis<|message|>"
    assert mark_of("<|channel>thought\n{{ content }}<channel|>") == "<|channel>thought"
    assert opened_in("<|turn>model\n<|channel>thought\n") == "<|channel>thought"
    assert opened_in("<|turn>model\n<|channel>thought\n<channel|>") == ""
    assert opened_in("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_in("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""
