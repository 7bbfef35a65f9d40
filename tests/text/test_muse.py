"""Muse Glimmer's answers: messages to itself, to tools and to the user."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from hetrun.text.chat.answer_parser import AnswerReader
from hetrun.text.chat.channels import ChannelReader
from hetrun.text.chat.reasoning import mark_of
from hetrun.text.tool_parsers.formats import FORMATS, family
from hetrun.text.tool_parsers.muse import MUSE, NAME, THOUGHT
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Prose, Thought, joined
from tests.support.answer_texts import disturbed

TOOLS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "now": {}}
THINK, SAY, NEXT = " to=self<|message|>", " to=user<|message|>", "<|eom|><|start|>assistant"
INVOKE = (
    '<atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city"> Os"lo</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
CALL = f" to=weather<|message|>{INVOKE}"
NOW = ' to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n'
NOW += "</atem:function_calls>"
WEATHER: list[Piece] = [CallStart(0, "weather"), Arguments(0, '{"city": " Os\\"lo", "days": 2}')]


def read(
    pieces: Sequence[str], tools: bool = True, thoughts: bool = True, opened: bool = False
) -> list[Piece]:
    divider = ChannelReader(TOOLS if tools else None, raw=not thoughts, dialect=MUSE)
    reader = AnswerReader(divider, CallReader(FORMATS[NAME], TOOLS) if tools else None)
    if opened:
        reader.open()
    return joined([piece for text in pieces for piece in reader.push(text)] + reader.finish())


ANSWERS: dict[str, tuple[str, list[Piece]]] = {
    "a thought and an answer": (f"{THINK}Hm.{NEXT}{SAY}Yes.", [Thought("Hm."), Prose("Yes.")]),
    "a call": (f"{THINK}Hm.{NEXT}{CALL}", [Thought("Hm."), *WEATHER]),
    "text before calls": (f"{SAY}Let me look.{NEXT}{CALL}{NEXT}{NOW}",
        [Prose("Let me look."), *WEATHER, CallStart(1, "now"), Arguments(1, "{}")]),
    "to no one": ("<|message|>Yes", [Prose("Yes")]),
    "no header": ("Yes", [Prose("Yes")]),
    "two thoughts": (f"{THINK}One{NEXT}{THINK}Two{NEXT}{SAY}Yes", [Thought(f"One{GAP}Two"), Prose("Yes")]),
    "cut off in a header": (f"{THINK}Hm{NEXT} to=us", [Thought("Hm")]),
    "marks of another family": (f"{SAY}Write <|channel|>, <|end|>.", [Prose("Write <|channel|>, <|end|>.")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_in_an_answer(name: str) -> None:
    text, found = ANSWERS[name]
    assert read([text]) == found
    assert read(list(text)) == found


@given(name=st.sampled_from(sorted(ANSWERS)), data=st.data())
def test_pieces_change_nothing(name: str, data: st.DataObject) -> None:
    text, pieces = disturbed(data, ANSWERS[name][0], ["", "<", "\n", " to=", "<|e", THINK, *MUSE.marks])
    tools, thoughts = data.draw(st.booleans()), data.draw(st.booleans())
    opened = data.draw(st.booleans())
    assert read(pieces, tools, thoughts, opened) == read([text], tools, thoughts, opened)


def test_what_is_not_looked_for_stays_text() -> None:
    assert read([f"{THINK}Hm{NEXT}{SAY}Yes"], thoughts=False) == [Prose(f"{THINK}Hm{NEXT}{SAY}Yes")]
    assert read([f"{THINK}Hm{NEXT}{CALL}"], tools=False) == [
        Thought("Hm"),
        Prose(f"<|start|>assistant{CALL}"),
    ]
    assert read(["Hm" + NEXT + SAY + "Yes"], opened=True) == [Thought("Hm"), Prose("Yes")]


def test_its_template_is_known() -> None:
    template = (
        "{% if tools %}<atem:function_calls>{% endif %}<|start|>assistant to=user<|message|><|eom|><|eot|>"
    )
    assert family(template) == NAME
    assert mark_of(template) == THOUGHT
