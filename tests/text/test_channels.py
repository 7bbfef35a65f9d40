"""Answers in gpt-oss' harmony: thoughts, texts and calls, whole and in pieces, right and wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from hetrun.text.chat.answer_parser import AnswerReader
from hetrun.text.chat.channels import MOST_HEADER, ChannelReader, header_of
from hetrun.text.tool_parsers.dialect import Header
from hetrun.text.tool_parsers.formats import FORMATS
from hetrun.text.tool_parsers.harmony import HARMONY
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Prose, Thought, joined
from tests.support.answer_texts import disturbed
from tests.support.effort import effort
from tests.support.limits import Within

TOOLS = ("weather", "now")
OSLO = '{"city": "Oslo"}'
THINK = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
SAY = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}"


def read(
    pieces: Sequence[str],
    tools: Sequence[str] | None = TOOLS,
    most: int | None = None,
    raw: bool = False,
    opened: bool = False,
) -> list[Piece]:
    reader = ChannelReader(tools, most, raw)
    if opened:
        reader.open()
    return joined([piece for text in pieces for piece in reader.push(text)] + reader.finish())


def called(arguments: str = OSLO, name: str = "weather", index: int = 0) -> list[Piece]:
    return [CallStart(index, name), Arguments(index, arguments)]


TWICE = f"{CALL}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
ANSWERS: dict[str, tuple[str, list[Piece]]] = {
    # what is written as it should be
    "a thought and an answer": (f"{THINK}Hm.{NEXT}{FINAL}Yes.<|return|>", [Thought("Hm."), Prose("Yes.")]),
    "the engine took the end": (f"{THINK}Hm.{NEXT}{FINAL}Yes.\n", [Thought("Hm."), Prose("Yes.\n")]),
    "a call": (f"{THINK}Hm.{NEXT}{CALL}<|call|>", [Thought("Hm."), *called()]),
    "text before a call": (f"{SAY}Let me look.{NEXT}{CALL}", [Prose("Let me look."), *called()]),
    "to whom with the role": (
        f"{THINK}Hm{NEXT} to=functions.weather<|channel|>commentary json<|message|>{OSLO}",
        [Thought("Hm"), *called()]),
    "to whom at once": (f" to=functions.weather<|channel|>commentary<|message|>{OSLO}", called()),
    "to whom among thoughts": (f"<|channel|>analysis to=functions.weather code<|message|>{OSLO}", called()),
    "two calls": (TWICE, [*called(), *called("{}", "now", 1)]),
    "several thoughts": (f"{THINK}\none\n{NEXT}{THINK} two {NEXT}{FINAL}Yes",
        [Thought(f"one{GAP}two"), Prose("Yes")]),
    "two texts": (f"{SAY}One.{NEXT}{FINAL}Two.", [Prose(f"One.{GAP}Two.")]),
    "a form": (f"<|channel|>final <|constrain|>json<|message|>{OSLO}", [Prose(OSLO)]),
    # what is written as it happens to be
    "no space before a mark": (
        f"<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{OSLO}",
        called()),
    "a channel too many": (f"<|channel|>commentary<|channel|>analysis<|message|>Hm{NEXT}{FINAL}Yes",
        [Thought("Hm"), Prose("Yes")]),
    "to itself": ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm", [Thought("Hm")]),
    "no end": (f"{THINK}Hm <|start|>assistant{FINAL}Yes", [Thought("Hm"), Prose("Yes")]),
    "no end and no beginning": (f"{THINK}Hm{FINAL}Yes", [Thought("Hm"), Prose("Yes")]),
    "no header": ("Yes, to be sure", [Prose("Yes, to be sure")]),
    "no header after a thought": (f"{THINK}Hm<|end|>\nYes", [Thought("Hm"), Prose("Yes")]),
    "no channel": ("<|message|>Yes", [Prose("Yes")]),
    "another channel": ("<|channel|>summary<|message|>Yes", [Prose("Yes")]),
    "only thoughts": (f"{THINK}\n Hm, ", [Thought("Hm,")]),
    "nothing": ("", []),
    "nothing in it": (f"{THINK}{NEXT}{FINAL}", []),
    "cut off in a header": (f"{THINK}Hm{NEXT}<|channel|>comm", [Thought("Hm")]),
    "half a mark": (f"{FINAL}Yes <|en", [Prose("Yes <|en")]),
    # marks that are texts
    "an answer about marks": (f"{FINAL}Write {THINK} or <|end|>, then <|start|>!",
        [Prose(f"Write {THINK} or <|end|>, then <|start|>!")]),
    "a thought about marks": (f"{THINK}A <|channel|> is\n it.{NEXT}{FINAL}Yes",
        [Thought("A <|channel|> is\n it."), Prose("Yes")]),
    "a long header": (f"{THINK}<|channel|>{'x' * MOST_HEADER}<|message|>",
        [Thought(f"<|channel|>{'x' * MOST_HEADER}<|message|>")]),
    "marks in arguments": (f'<|channel|>commentary to=now<|message|>{{"a": "{THINK}<|call|>"}}',
        called(f'{{"a": "{THINK}<|call|>"}}', "now")),
    # calls
    "no arguments": ("<|channel|>commentary to=functions.now<|message|><|call|>", called("{}", "now")),
    "no JSON": ("<|channel|>commentary to=python<|message|> print(1 < 2)\n<|call|>",
        called("print(1 < 2)", "python")),
    "half a call": (CALL[:-3], called(OSLO[:-3])),
    "a bracket that is not there": (f"{CALL[:-1]}<|call|><|start|>assistant{FINAL}Yes",
        [*called(OSLO[:-1]), Prose("Yes")]),
    "a bracket too many": (f"{CALL}}}\n<|end|><|start|>assistant{FINAL}Yes", [*called(), Prose("Yes")]),
    "text after arguments": (f"{CALL} and more", [*called(), Prose("and more")]),
    "a tool that is not there": ("<|channel|>commentary to=functions.x<|message|>{}", called("{}", "x")),
    # other people
    "a user": (f"{SAY}Yes<|end|><|start|>user<|message|>Thanks<|end|>",
        [Prose(f"Yes{GAP}<|start|>user<|message|>Thanks<|end|>")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_in_an_answer(name: str) -> None:
    text, found = ANSWERS[name]
    assert read([text]) == found
    assert read(list(text)) == found


@given(name=st.sampled_from(sorted(ANSWERS)), data=st.data())
def test_pieces_change_nothing(name: str, data: st.DataObject) -> None:
    """Also not for texts that were cut off, or have something else in their middle."""
    odd = ["", "<", "}", "\n", '"', " to=", "<|e", THINK, *HARMONY.marks]
    text, pieces = disturbed(data, ANSWERS[name][0], odd)
    tools = data.draw(st.sampled_from([TOOLS, None]))
    raw, opened = data.draw(st.booleans()), data.draw(st.booleans())
    found = read([text], tools, raw=raw, opened=opened)
    assert read(pieces, tools, raw=raw, opened=opened) == found


@given(
    text=st.lists(
        st.sampled_from([*HARMONY.marks, "analysis", " to=", "x", "{", "}", " ", "\n"]), max_size=20
    )
)
def test_raw_text_that_calls_nothing_stays_as_it_is(text: list[str]) -> None:
    assert read(text, None, raw=True) == joined([Prose("".join(text))])


def test_raw_text_has_all_but_calls() -> None:
    before = f"{THINK} Hm\n<|end|>"
    assert read([f"{before}<|start|>assistant{CALL}<|call|>"], raw=True) == [Prose(before), *called()]
    assert read([f"{before}<|start|>assistant{FINAL}Yes"], raw=True) == [
        Prose(f"{before}<|start|>assistant{FINAL}Yes")
    ]


def test_calls_stay_text_where_they_are_not_looked_for() -> None:
    written = f"<|start|>assistant{CALL}<|call|>"
    assert read([f"{THINK}Hm<|end|>{written}"], None) == [Thought("Hm"), Prose(written)]


@pytest.mark.parametrize("name", [name for name, (_, found) in ANSWERS.items() if called()[0] in found])
def test_an_answer_may_end_anywhere(name: str) -> None:
    """Nothing of a header or a mark becomes text, and arguments are a beginning of themselves."""
    text, whole = ANSWERS[name]
    arguments = next(piece.text for piece in whole if isinstance(piece, Arguments))
    for end in range(len(text)):
        for piece in read([text[:end]]):
            if isinstance(piece, Arguments) and piece.index == 0:
                assert arguments.startswith(piece.text) or piece.text == "{}"
            elif isinstance(piece, Prose) and text[:end].rpartition("<")[2] not in ("", "|"):
                assert "<|" not in piece.text or ">" not in piece.text


def test_at_most_one_call_where_that_is_wanted() -> None:
    assert read([TWICE], most=1) == called()


def test_a_thought_that_the_prompt_has_begun() -> None:
    assert read([f" Hm{NEXT}{FINAL}Yes"], opened=True) == [Thought("Hm"), Prose("Yes")]


def test_everything_comes_as_it_is_written() -> None:
    reader = ChannelReader(TOOLS)
    assert reader.push(f"{THINK}\n Hm") == [Thought("Hm")]
    assert reader.push(", so \n<") == [Thought(", so")]
    assert reader.push(f"b{NEXT}{CALL[:-8]}") == [Thought(" \n<b"), *called(OSLO[:-8])]
    assert reader.push("O") == [Arguments(0, "O")]
    assert reader.begun == 1
    assert ChannelReader(TOOLS).push("Yes") == [Prose("Yes")]


def test_calls_of_another_family_are_found_in_texts() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    reader = AnswerReader(ChannelReader(None), CallReader(FORMATS["hermes"], {"now": {}}))
    found = joined(reader.push(f"{THINK}Perhaps {call}{NEXT}{FINAL}{call}") + reader.finish())
    assert found == [Thought(f"Perhaps {call}"), *called("{}", "now")]
    assert reader.calls == 1


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("<|channel|>analysis<|message|>", Header("assistant", "analysis", "")),
        ("<|start|>assistant to=a<|channel|>x json<|message|>", Header("assistant", "x", "a")),
        ("to=a<|channel|>x<|constrain|>final<|message|>", Header("assistant", "x", "a")),
        ("<|start|>functions.a to=assistant<|channel|>x<|message|>", Header("functions.a", "x", "assistant")),
        ("<|start|><|channel|> to=b <|message|>", Header("assistant", "", "b")),
    ],
)
def test_headers(written: str, found: Header) -> None:
    assert header_of(written) == found


HOSTILE = [
    "<|channel|>" * 5000,
    "<|start|>assistant" * 3000,
    f"{THINK}<|channel|>" + "x" * 50_000,
    f"{THINK}x" * 2000,
    f"{FINAL}<|end|>" * 2500,
    CALL * 800,
    f"{CALL[: -len(OSLO)]}{'[' * 50_000}",
    "<|end|> " * 5000,
    f"{THINK}{' ' * 50_000}",
    "<" * 50_000,
    " to=" * 12_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda x: x[:40])
@pytest.mark.parametrize("raw", [False, True])
def test_no_text_takes_long(text: str, raw: bool, within: Within) -> None:
    few = text[: len(text) // 5]
    with effort() as took:
        read([few[i : i + 3] for i in range(0, len(few), 3)], raw=raw)
    assert took.calls < 30 * len(few)
    with within(20):
        found = read([text], raw=raw)
    told = sum(len(piece.name if isinstance(piece, CallStart) else piece.text) for piece in found)
    assert told <= len(text) + len(GAP) * text.count("<|message|>")


def test_arguments_are_those_that_were_written() -> None:
    found = read([f"{CALL}<|call|>"])
    assert json.loads("".join(piece.text for piece in found if isinstance(piece, Arguments))) == {
        "city": "Oslo"
    }
