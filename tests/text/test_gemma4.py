"""Answers as Gemma 4 writes them: thoughts and calls, whole and in pieces, forced, and told again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.text.chat.gemma4_turns import ready, suited
from hetrun.text.chat.reasoning import within_thought
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import ChatTemplate
from hetrun.text.tool_parsers import forced_calls, gemma4
from hetrun.text.tool_parsers.formats import FORMATS, TEXT_ONLY, with_thoughts
from hetrun.text.tool_parsers.gemma4_schema import MOST_DEPTH
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Prose, Thought, joined
from tests.support.answer_texts import allowed_part

Q = gemma4.QUOTE
THINK = "<|channel>thought\nHm,\n so\n<channel|>"
FORMAT = FORMATS["gemma4"]


def read(pieces: Sequence[str], opened: bool = False, thoughts: bool = True) -> list[Piece]:
    reader = CallReader(with_thoughts(FORMAT) if thoughts else FORMAT, {"weather": {}})
    if opened:
        reader.open()
    return joined([piece for text in pieces for piece in reader.push(text)] + reader.finish())


def written(inner: str, name: str = "weather") -> str:
    return f"<|tool_call>call:{name}{{{inner}}}<tool_call|>"


def called(arguments: str, name: str = "weather", index: int = 0) -> list[Piece]:
    return [CallStart(index, name), Arguments(index, arguments)]


NOTED = 'Say "{hi, <|x|> <|"}]"\\\n<tool_call|> <|channel>thought'
ANSWERS: dict[str, tuple[str, list[Piece]]] = {
    # thoughts
    "a thought and an answer": (f"{THINK}Yes.", [Thought("Hm,\n so"), Prose("Yes.")]),
    "an empty thought": ("<|channel>thought\n<channel|>Yes.", [Prose("Yes.")]),
    "no line end": ("<|channel>thought<channel|>\n\nYes.", [Prose("Yes.")]),
    "among texts": (f"One. {THINK}\nTwo.", [Prose("One."), Thought("Hm,\n so"), Prose(f"{GAP}Two.")]),
    "two thoughts": (f"{THINK}\n{THINK}Yes", [Thought(f"Hm,\n so{GAP}Hm,\n so"), Prose("Yes")]),
    "between calls": (f"{written('')}{THINK}{written('', 'now')}",
        [*called("{}"), Thought("Hm,\n so"), *called("{}", "now", 1)]),
    "a mark twice": (f"<|channel>{THINK}Yes", [Thought("Hm,\n so"), Prose("Yes")]),
    "an end too many": (f"{THINK}Yes<channel|>", [Thought("Hm,\n so"), Prose("Yes")]),
    "only a thought": ("<|channel>thought\n Hm <", [Thought("Hm <")]),
    "another channel": ("<|channel>final\nYes", [Prose("<|channel>final\nYes")]),
    "half a mark": ("Yes <|chan", [Prose("Yes <|chan")]),
    "no call in a thought": (f"<|channel>thought\n{written('')}<channel|>Yes",
        [Thought(written("")), Prose("Yes")]),
    # texts in calls
    "a text with all that is odd": (written(f"city:{Q}{NOTED}{Q}"), called(json.dumps({"city": NOTED}))),
    "an empty text": (written(f"city:{Q}{Q}"), called('{"city": ""}')),
    "a mark that begins twice": (written(f"city:{Q}<|<{Q}"), called('{"city": "<|<"}')),
    # other values
    "numbers and words": (written("a:1,b:-2.50e+3,c:true,d:false,e:null"),
        called('{"a": 1, "b": -2.50e+3, "c": true, "d": false, "e": null}')),
    "Python's words": (written("a:True,b:False,c:None"), called('{"a": true, "b": false, "c": null}')),
    "lists and objects": (written(f"a:[1,{Q}x{Q},[],{{}}],b:{{c:{{d:[{{e:1}}]}}}}"),
        called('{"a": [1, "x", [], {}], "b": {"c": {"d": [{"e": 1}]}}}')),
    "space": (written(f" a : [ 1 , 2 ] ,\n b : {Q} x {Q} "), called('{"a": [1, 2], "b": " x "}')),
    "commas too many": (written("a:[1,2,],"), called('{"a": [1, 2]}')),
    # what other models would write
    "JSON": (written('"a": "x\\"y", "b": [1]'), called('{"a": "x\\"y", "b": [1]}')),
    "keys in marks": (written(f"{Q}a b:c{Q}:1"), called('{"a b:c": 1}')),
    "a text without marks": (written("a:two words,b:01"), called('{"a": "two words", "b": "01"}')),
    "keys with letters": (written("größe_1-x:1"), called('{"größe_1-x": 1}')),
    # what is no call, or not all of one
    "a tool that is not there": (written("a:1", "x"), called('{"a": 1}', "x")),
    "text around calls": (f"I look.\n{written('')}\n{written('', 'now')} and so",
        [Prose("I look."), *called("{}"), *called("{}", "now", 1), Prose(" and so")]),
    "no call": ("<|tool_call>now()<tool_call|>", [Prose("<|tool_call>now()")]),
    "no name": ("<|tool_call>call:{}x", [Prose("<|tool_call>call:{}x")]),
    "half a name": ("<|tool_call>call:wea", [Prose("<|tool_call>call:wea")]),
    "half a text": (f"<|tool_call>call:weather{{city:{Q}Os", called('{"city": "Os')),
    "half a mark in a text": (f"<|tool_call>call:weather{{city:{Q}Os<|", called('{"city": "Os')),
    "no value": ("<|tool_call>call:weather{city:<tool_call|> more", [*called('{"city": '), Prose(" more")]),
    "a bracket that is not there": (f"{written('a:[1')} more", [*called('{"a": [1'), Prose(" more")]),
    "braces that are not there": ("<|tool_call>call:weather{a:{b:1<tool_call|>", called('{"a": {"b": 1')),
    "a brace too many": (f"{written('a:1}')} more", [*called('{"a": 1}'), Prose(" more")]),
    "no end": ("<|tool_call>call:weather{} more", [*called("{}"), Prose("more")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_in_an_answer(name: str) -> None:
    text, found = ANSWERS[name]
    assert read([text]) == found
    assert read(list(text)) == found


ODD = [
    "",
    "<",
    "}",
    "]",
    ",",
    ":",
    "\n",
    '"',
    Q,
    "call:",
    gemma4.CALL,
    gemma4.CALL_END,
    gemma4.CHANNEL_END,
    THINK,
]


@given(name=st.sampled_from(sorted(ANSWERS)), data=st.data())
def test_pieces_change_nothing(name: str, data: st.DataObject) -> None:
    """Also not for texts that were cut off, or have something else in their middle."""
    text = ANSWERS[name][0]
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    text = text[:begin] + data.draw(st.sampled_from(ODD)) + text[end:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    opened, thoughts = data.draw(st.booleans()), data.draw(st.booleans())
    assert read(pieces, opened, thoughts) == read([text], opened, thoughts)


def in_notation(value: object) -> str:
    """A value as the templates write it."""
    match value:
        case str():
            return Q + value + Q
        case list():
            return f"[{','.join(map(in_notation, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{in_notation(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


TEXTS = st.text().filter(lambda text: Q not in text + Q[:-1])
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=12)


@given(arguments=st.dictionaries(KEYS, VALUES))
def test_arguments_are_those_that_were_written(arguments: dict[str, Any]) -> None:
    begin, said = read([f"<|tool_call>call:weather{in_notation(arguments)}<tool_call|>"])
    assert begin == CallStart(0, "weather")
    assert isinstance(said, Arguments)
    assert json.loads(said.text) == arguments


@pytest.mark.parametrize(
    "name", [name for name, (_, found) in ANSWERS.items() if found[:1] == [CallStart(0, "weather")]]
)
def test_an_answer_may_end_anywhere(name: str) -> None:
    """Arguments are then a beginning of themselves."""
    text, whole = ANSWERS[name]
    for end in range(len(text)):
        found = read([text[:end]])
        if found[:1] == whole[:1]:
            some = "".join(p.text for p in found if isinstance(p, Arguments) and p.index == 0)
            full = "".join(p.text for p in whole if isinstance(p, Arguments) and p.index == 0)
            assert full.startswith(some)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(FORMAT, {})
    assert reader.push(f"<|tool_call>call:weather{{city:{Q}Os") == called('{"city": "Os')
    assert reader.push('lo\n"<') == [Arguments(0, 'lo\\n\\"')]
    assert reader.push("|b") == [Arguments(0, "<|b")]


def test_a_thought_that_the_prompt_began() -> None:
    assert read(["\nHm \n<channel|>\nYes"], opened=True) == [Thought("Hm"), Prose("Yes")]
    assert read(["Hm"], opened=True) == [Thought("Hm")]
    assert read(["<channel|>Yes"], opened=True) == [Prose("Yes")]


def test_thoughts_and_calls_stay_where_they_are_not_looked_for() -> None:
    assert read([THINK], thoughts=False) == [Prose(THINK)]
    reader = CallReader(with_thoughts(TEXT_ONLY))
    assert joined(reader.push(THINK + written("")) + reader.finish()) == [
        Thought("Hm,\n so"),
        Prose(written("")),
    ]


# --- forced calls

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "integer", "minimum": 0, "maximum": 9},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["leaf"],
        }
    },
    "properties": {
        "first": {"type": "boolean"},
        "a b:c": {"type": "string"},
        "unit": {"enum": ["C", 3, None, {"x": [1, "y"]}]},
        "tree": {"$ref": "#/$defs/tree"},
        "either": {"anyOf": [{"const": "x"}, {"type": ["number", "null"]}]},
        "some": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "free": {"type": "object"},
        "last": {},
    },
    "required": ["unit", "tree"],
}
MARKS = (gemma4.CALL, gemma4.CALL_END, gemma4.CHANNEL, gemma4.CHANNEL_END, Q)
PIECES = [*(bytes([i]) for i in range(256)), *(mark.encode() for mark in MARKS), b"<eos>"]
END = len(PIECES) - 1


@pytest.fixture(scope="module", params=["control", "text"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    """As folders have the marks, and as llama.cpp's converter writes them."""
    return Grammars(PIECES, range(256, END) if request.param == "control" else (), [END])


def followed(grammars: Grammars, parts: str, text: str) -> tuple[str, bool]:
    """As much of a text as the parts allow, and whether an answer may end there."""
    return allowed_part(grammars, parts, text, PIECES, MARKS)


LEAF = "tree:{leaf:3}"
RIGHT = [
    f"unit:3,{LEAF}",
    f"first:true,{Q}a b:c{Q}:{Q}x}},y{Q},unit:{Q}C{Q},tree:{{leaf:1,kids:[{{leaf:2,kids:[]}}]}}",
    f"unit:null,{LEAF},either:{Q}x{Q},some:[{Q}a{Q},{Q}b{Q}],free:{{a:1,b:{{}}}},last:[{{x:{Q}y{Q}}},null]",
    f"unit:{{x:[1,{Q}y{Q}]}},{LEAF},either:-2.5,free:{{}}",
]
WRONG = [
    "",
    "unit:3",  # one that is wanted is not there
    f"{LEAF},unit:3",  # not in their order
    f"unit:4,{LEAF}",
    f"unit:3,{LEAF},x:1",
    f"first:{Q}true{Q},unit:3,{LEAF}",
    "unit:3,tree:{leaf:12}",
    "unit:3,tree:{}",
    f"unit:3,{LEAF},some:[]",
    f"unit:3,,{LEAF}",
    f'"unit":3,{LEAF}',
]


def test_arguments_follow_the_schema(grammars: Grammars) -> None:
    parts = forced_calls.calls("gemma4", {"weather": SCHEMA, "now": {}})
    for inner in RIGHT:
        text = written(inner)
        assert followed(grammars, parts, text) == (text, True)
        (_, said) = read([text])
        assert isinstance(said, Arguments)
        jsonschema.validate(json.loads(said.text), SCHEMA)
    for inner in WRONG:
        assert followed(grammars, parts, written(inner))[0] != written(inner)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({}, [""], ["a:1"]),
        ({"additionalProperties": True}, ["", f"a:1,b:{Q}x{Q}"], ["a"]),
        ({"properties": {"a": {}, "b": {}}}, ["", "a:1", "b:1", "a:1,b:2"], ["b:1,a:1", ",", "a:1,", ",b:1"]),
        ({"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {}}]}, ["", "a:1"], ["b:1"]),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, ["a:1"], ["b:1"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}}, ["", "a:1"], ["b:1"]),
        ({"properties": {"a": {"$ref": "#/nowhere"}, "b": {"allOf": [{"type": "null"}]}}},
            ["a:1,b:null"], ["b:1"]),
        ({"properties": {"a": {"properties": {"b": {}}, "additionalProperties": {"type": "null"}}}},
            ["a:{b:1,c:null}", "a:{c:null,d:null}"], ["a:{c:1}"]),
    ],
)  # fmt: skip
def test_schemas_of_all_kinds(
    grammars: Grammars, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    parts = forced_calls.calls("gemma4", {"weather": schema})
    for inner in right:
        assert followed(grammars, parts, written(inner)) == (written(inner), True)
    for inner in wrong:
        assert followed(grammars, parts, written(inner))[0] != written(inner)


def test_many_properties_and_deep_ones_are_no_large_grammar(grammars: Grammars) -> None:
    many: dict[str, Any] = {"properties": {f"k{i}": {"type": "integer"} for i in range(100)}}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(2 * MOST_DEPTH):
        deep = {"properties": {"a": deep, "b": {"type": "integer"}}}
    parts = forced_calls.calls("gemma4", {"weather": many, "now": deep})
    assert len(parts) < 20_000
    text = written("k3:1,k99:2") + written("a:{a:{b:1}}", "now")
    assert followed(grammars, parts, text) == (text, True)


def test_calls_one_after_the_other_or_only_one(grammars: Grammars) -> None:
    two = written("") * 2
    assert followed(grammars, forced_calls.calls("gemma4", {"weather": {}}), two) == (two, True)
    alone = forced_calls.calls("gemma4", {"weather": {}}, several=False)
    assert followed(grammars, alone, two)[0] == written("")


def test_a_thought_may_come_first(grammars: Grammars) -> None:
    parts = forced_calls.calls("gemma4", {"weather": {}}, thought=gemma4.THOUGHT)
    for text in (written(""), THINK + written("")):
        assert followed(grammars, parts, text) == (text, True)
    assert followed(grammars, parts, f"{THINK}Yes")[0] == THINK
    assert followed(grammars, forced_calls.calls("gemma4", {"weather": {}}), THINK)[1] is False
    opened = within_thought(gemma4.THOUGHT, parts)
    assert followed(grammars, opened, f"\nHm<channel|>{written('')}")[1]


def test_a_call_that_was_begun_is_one(grammars: Grammars) -> None:
    parts = forced_calls.when_begun("gemma4", {"weather": SCHEMA, "now": {"additionalProperties": True}})
    assert parts is not None
    for text in ("Yes.", f"Well. {written(RIGHT[0])} and {written('x:[1]', 'now')}."):
        assert followed(grammars, parts, text) == (text, True)
    assert followed(grammars, parts, written("x:1"))[0] == "<|tool_call>call:weather{"


# --- conversations

CALLS = [{"id": "c1", "function": {"name": "weather"}}, {"id": "c2", "function": {"name": "now"}}]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "reasoning_content": "Hm", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c2", "content": "ten"},
    {"role": "tool", "tool_call_id": "c1", "content": '{"c": 21}'},
    {"role": "assistant", "content": "21 degrees."},
    {"role": "user", "content": "Thanks"},
]
RESULTS = [{"name": "now", "response": "ten"}, {"name": "weather", "response": {"c": 21}}]
OLD = "{{ message['tool_responses'] }}<|turn>"
NEW = OLD + "{{ tool_call_id }}"


def test_results_go_where_the_first_templates_look_for_them() -> None:
    assert suited(NEW, TALK) is TALK
    user, answer, thanks = suited(OLD, TALK)
    assert (user, thanks) == (TALK[0], TALK[-1])
    assert answer == {**TALK[1], "tool_responses": RESULTS, "content": "21 degrees."}
    assert suited(OLD, TALK[:4])[-1] == {**TALK[1], "tool_responses": RESULTS}


def test_what_is_no_result_of_these_calls_stays() -> None:
    said = {**TALK[1], "content": "I look."}
    answer, more = suited(OLD, [said, TALK[2], TALK[4]])
    assert answer == {**said, "tool_responses": RESULTS[:1]}
    assert more == TALK[4]
    again = [TALK[1], TALK[2], TALK[1], TALK[3]]
    assert [len(m["tool_responses"]) for m in suited(OLD, again)] == [1, 1]
    strange = {"role": "tool", "content": "[1]"}
    assert suited(OLD, [strange, *TALK[:1]]) == [strange, *TALK[:1]]
    named = suited(OLD, [TALK[1], strange, strange, {**strange, "name": "x"}, strange])[0]["tool_responses"]
    assert [each["name"] for each in named] == ["weather", "now", "x", "unknown"]
    assert named[0]["response"] == "[1]"


def test_the_model_has_its_turn() -> None:
    assert ready(NEW, "x<turn|>\n") == "x<turn|>\n<|turn>model\n"
    assert ready(NEW, "x<tool_response|>") == "x<tool_response|>"
    assert ready("{{ messages }}", "x<turn|>\n") == "x<turn|>\n"


TEMPLATE = """{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- for call in message.get('tool_calls', []) -%}
    {{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' -}}
{%- endfor -%}
{%- for result in message.get('tool_responses', []) -%}
    {{- result.name + (result.response | string) -}}
{%- endfor -%}
{{- message.content or '' -}}<turn|>{{ '\\n' }}
{%- endfor -%}"""


def test_a_template_gets_results_and_the_model_its_turn() -> None:
    with TemplateWorker(ChatTemplate(TEMPLATE, "the test's template")) as worker:
        text = worker.render(TALK[:4])
        assert text == (
            "<|turn>user\nHi<turn|>\n<|turn>model\n<|tool_call>call:weather{}<tool_call|>"
            "<|tool_call>call:now{}<tool_call|>nowtenweather{'c': 21}<turn|>\n<|turn>model\n"
        )
        assert not worker.render(TALK[:1], add_generation_prompt=False).endswith("model\n")
