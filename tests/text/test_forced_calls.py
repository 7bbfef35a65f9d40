"""Calls that a grammar forces: whatever a model draws, the reader finds calls whose arguments fit."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from hetrun.client.sampling_params import Structure
from hetrun.errors import OptionError
from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.text.chat.answer_parser import AnswerReader
from hetrun.text.chat.channels import ChannelReader
from hetrun.text.chat.reasoning import ThoughtSplitter, within_thought
from hetrun.text.tool_parsers import forced_calls, gemma4, harmony, muse
from hetrun.text.tool_parsers.dialect import MESSAGE, START
from hetrun.text.tool_parsers.dialects import BY_NAME
from hetrun.text.tool_parsers.formats import FORMATS
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import Arguments, CallStart, Piece, Prose, Thought, joined
from tests.support.answer_texts import allowed_part
from tests.support.tiers import first

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
    },
    "now": {},
}
CONTROL = (
    *("[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call|>", "<|/tool_call|>"),
    *(gemma4.CALL, gemma4.CALL_END, gemma4.QUOTE),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call_start|>"),
    *(START, harmony.CHANNEL, MESSAGE, harmony.CONSTRAIN, harmony.END, muse.NEXT, "<eos>"),
)
TAGS = [  # tokens of their own, but text
    *(b"<tool_call>", b"</tool_call>", b"<think>", b"</think>"),
    *(b"<seed:tool_call>", b"</seed:tool_call>", b"<minimax:tool_call>", b"</minimax:tool_call>"),
]
PIECES = [*(bytes([i]) for i in range(256)), *TAGS, *(text.encode() for text in CONTROL)]
END = len(PIECES) - 1
PLAIN = [i for i in range(END) if i >= 256 or 32 <= i < 127 or i == 10]
LIKELY = {*b'"}/<\n', *range(256, END + 1)}  # that make it come to an end


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(PIECES, range(256 + len(TAGS), END), [END])


def drawn(grammars: Grammars, parts: str, seed: int, most: int = 4000) -> str | None:
    """A text that the parts allow, by dice; None if it does not end."""
    constraint = grammars.constraint(Structure("parts", parts))
    dice, text = random.Random(seed), b""
    for _ in range(most):
        if constraint.finished:
            return text.decode()
        allowed = {int(token) for token in np.flatnonzero(constraint.allowed())}
        open_to = sorted(allowed.intersection([*PLAIN, END]) or allowed)
        likely = [token for token in open_to if token in LIKELY]
        token = dice.choice(likely if likely and dice.random() < 0.6 else open_to)
        if token == END:
            return text.decode()
        constraint.accept(token)
        text += PIECES[token]
    return None


@pytest.fixture(scope="module")
def without_control() -> Grammars:
    """As llama.cpp has gpt-oss' marks: tokens that are text."""
    return Grammars(PIECES, [], [END])


def in_channels(text: str, opened: bool = False, family: str = harmony.NAME) -> list[Piece]:
    dialect = BY_NAME[family]
    calls = CallReader(FORMATS[family], TOOLS) if dialect.tagged else None
    reader = AnswerReader(ChannelReader(TOOLS, dialect=dialect), calls)
    if opened:
        reader.open()
    return joined(reader.push(text) + reader.finish())


def read(family: str, text: str, thought: bool = False, opened: bool = False) -> list[Piece]:
    if family in BY_NAME:
        return in_channels(text, family=family)
    reader = CallReader(FORMATS[family], TOOLS)
    if not thought:
        return reader.push(text) + reader.finish()
    splitter = ThoughtSplitter("<think>")
    if opened:
        splitter.open()
    pieces = splitter.push(text) + splitter.finish()
    found = [
        p for piece in pieces for p in (reader.push(piece.text) if isinstance(piece, Prose) else [piece])
    ]
    return joined(found + reader.finish())


def check_calls(pieces: list[Piece]) -> int:
    """Nothing but calls, each as its schema says; how many."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        assert not isinstance(piece, Prose)
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    for name, arguments in calls:
        found = json.loads(arguments)
        # Of text in tags a grammar does not count the characters.
        jsonschema.validate({k: v for k, v in found.items() if k != "city"}, {**TOOLS[name], "required": []})
        assert set(found) <= set(TOOLS[name].get("properties", {}))
        assert name == "now" or isinstance(found["city"], str)
    return len(calls)


@pytest.mark.parametrize("seeds", first([5, 12]))
@pytest.mark.parametrize("family", forced_calls.FRAMES)
def test_forced_answers_are_calls(grammars: Grammars, family: str, seeds: int) -> None:
    most = 0
    for seed in range(seeds):
        text = drawn(grammars, forced_calls.calls(family, TOOLS), seed)
        assert text is None or check_calls(read(family, text))
        text = drawn(grammars, forced_calls.calls(family, TOOLS, several=False), seed)
        assert text is None or check_calls(read(family, text)) == 1
        text = drawn(grammars, forced_calls.calls(family, {"now": {}}), seed)
        most = max(most, check_calls(read(family, text)) if text else 0)
    assert most > 1 if forced_calls.FRAMES[family].several else most == 1


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_a_thought_may_come_first(grammars: Grammars, family: str) -> None:
    thoughts = 0
    for seed in range(20):
        parts = forced_calls.calls(family, TOOLS, several=False, thought="<think>")
        text = drawn(grammars, parts, seed)
        found = read(family, text, thought=True) if text else []
        thoughts += any(isinstance(piece, Thought) for piece in found)
        assert text is None or check_calls([piece for piece in found if not isinstance(piece, Thought)]) == 1
        text = drawn(grammars, within_thought("<think>", forced_calls.calls(family, TOOLS)), seed)
        found = read(family, text, thought=True, opened=True) if text else []
        assert text is None or check_calls([piece for piece in found if not isinstance(piece, Thought)])
    assert thoughts


@pytest.mark.parametrize("family", BY_NAME)
def test_a_thought_in_a_message_may_come_first(grammars: Grammars, family: str) -> None:
    """Then a call, or what has the form that is wanted; also where the prompt has begun it."""
    schema, mark = TOOLS["weather"], BY_NAME[family].thought
    forced = forced_calls.calls(family, TOOLS, thought=mark)
    formed = forced_calls.final(schema, mark, thinks=True)
    thoughts = calls = answers = 0
    for seed in range(20):
        for parts, opened in ((forced, False), (within_thought(mark, forced), True)):
            text = drawn(grammars, parts, seed)
            found = in_channels(text, opened, family) if text else []
            thoughts += any(isinstance(piece, Thought) for piece in found)
            calls += check_calls([piece for piece in found if not isinstance(piece, Thought)])
        text = drawn(grammars, formed, seed)
        found = in_channels(text, family=family) if text else []
        said = [piece.text for piece in found if isinstance(piece, Prose)]
        for answer in said:
            jsonschema.validate(json.loads(answer), schema)
        answers += len(said)
    assert thoughts
    assert calls
    assert answers


CALLED = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
THOUGHT = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>Well<|end|><|start|>assistant"
ALLOWED = [
    (forced_calls.calls(harmony.NAME, {"now": {}}), [CALLED], [THOUGHT[:15], CALLED.replace("now", "no")]),
    (forced_calls.calls(harmony.NAME, {"now": {}}, thought=harmony.THOUGHT), [CALLED, THOUGHT + CALLED],
        [THOUGHT + THOUGHT[:15], SAID[:25]]),
    (forced_calls.when_begun(harmony.NAME, {"now": {}}),
        [CALLED, SAID + THOUGHT + CALLED, f"{THOUGHT}<|channel|>final<|message|>Yes."],
        ["Yes", CALLED.replace("now", "no"), f"{CALLED[:-1]}x"]),
]  # fmt: skip


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("number", range(len(ALLOWED)))
def test_what_channels_may_hold(
    grammars: Grammars, without_control: Grammars, number: int, control: bool
) -> None:
    parts, right, wrong = ALLOWED[number]
    assert parts is not None
    for text in right:
        assert followed(grammars if control else without_control, parts, text) == (text, True)
    for text in wrong:
        assert followed(grammars if control else without_control, parts, text)[0] != text


def followed(grammars: Grammars, parts: str, text: str) -> tuple[str, bool]:
    """As much of a text as the parts allow, and whether an answer may end there."""
    return allowed_part(grammars, parts, text, PIECES, CONTROL)


@pytest.mark.parametrize("family", [name for name, frame in forced_calls.FRAMES.items() if frame.lazy])
def test_a_call_that_was_begun_is_one(grammars: Grammars, family: str) -> None:
    parts = forced_calls.when_begun(family, TOOLS)
    assert parts is not None
    frame = forced_calls.FRAMES[family]
    mark = (frame.open or frame.begin)[0].encode()
    constraint = grammars.constraint(Structure("parts", parts))
    for byte in b"Let me see. ":
        assert constraint.allowed()[byte]
        constraint.accept(byte)
    assert constraint.allowed()[END]
    constraint.accept(PIECES.index(mark))
    assert not constraint.allowed()[END]
    assert not constraint.allowed()[ord("!")]


def test_only_what_the_tools_allow(grammars: Grammars) -> None:
    parts = forced_calls.calls("hermes", {"now": {}})
    constraint = grammars.constraint(Structure("parts", parts))
    for byte in b'<tool_call>\n{"name": "':
        constraint.accept(byte)
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("n")]


def test_a_schema_that_cannot_be_followed_is_told_with_its_place(grammars: Grammars) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "no such type"}}}
    for family in ("hermes", "mistral", "deepseek"):
        with pytest.raises(OptionError, match=r"^parts at anyOf\[1\]\.properties\.x: "):
            grammars.constraint(Structure("parts", forced_calls.calls(family, {"now": {}, "bad": bad})))
    with pytest.raises(OptionError, match=r"^parts"):
        grammars.constraint(Structure("parts", forced_calls.calls("glm", {"now": {}, "bad": bad})))
