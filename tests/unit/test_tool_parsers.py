"""Calls of tools in what a model writes: every family, whole and in pieces, right and wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrun.config import TOOL_PARSERS
from hetrun.text.tool_parsers.formats import FORMATS, family, takes_tools
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import Arguments, CallStart, Piece, Prose, joined
from tests.support.effort import effort
from tests.support.limits import Within
from tests.support.tiers import first

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}


def read(name: str, pieces: Sequence[str], most: int | None = None) -> list[Piece]:
    reader = CallReader(FORMATS[name], TOOLS, most)
    return joined([piece for text in pieces for piece in reader.push(text)] + reader.finish())


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, name), Arguments(index, arguments)]


def weather(index: int = 0) -> list[Piece]:
    return call(index, "weather", '{"city": "Oslo", "days": 2}')


TWO = [*weather(), *call(1, "now", "{}")]
OSLO = '{"city": "Oslo", "days": 2}'
# What models of each family write for the same two calls.
FAMILIES = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "llama3": f'{{"name": "weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}, "id": "abcdefghi"}}, '
    '{"name": "now", "arguments": {}, "id": "123456789"}]',
    "mistral_named": f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=2), now()]<|tool_call_end|>',
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n"
    "</function>\n</seed:tool_call>",
    "muse": '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Oslo'
    '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    "phi": f'functools[{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]',
}
# Whose outer mark says nothing.
OUTER = ("deepseek", "deepseek_v31", "kimi_k2", "minimax_m2", "seed_oss", "muse")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_each_family(name: str) -> None:
    assert read(name, [FAMILIES[name]]) == TWO
    assert read("generic", [FAMILIES[name]]) == TWO


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "llama3"])
def test_text_before_calls_is_text(name: str) -> None:
    assert read(name, [f"I will look.\n\n{FAMILIES[name]}\n"]) == [Prose("I will look."), *TWO]


@pytest.mark.parametrize("name", FAMILIES)
def test_at_most_one_call_where_that_is_wanted(name: str) -> None:
    assert read(name, [FAMILIES[name]], most=1) == weather()


@given(name=st.sampled_from(sorted(FAMILIES)), parser=st.sampled_from(["own", "generic"]), data=st.data())
def test_pieces_change_nothing(name: str, parser: str, data: st.DataObject) -> None:
    """Also not for texts that were cut off, or have something else in their middle."""
    text = FAMILIES[name]
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    text = text[:begin] + data.draw(st.sampled_from(["", "<", "}", "\n", '"', "x <tool_call>"])) + text[end:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = name if parser == "own" else parser
    assert read(parser, pieces) == read(parser, [text])


@given(name=st.sampled_from(sorted(FORMATS)), text=st.text("<>[]{}\":tol_cal/nme,' \\f(｜", max_size=60))
def test_what_has_no_call_stays_as_it_is(name: str, text: str) -> None:
    found = read(name, list(text))
    if not any(isinstance(piece, CallStart) for piece in found) and "▁" not in text:
        assert "".join(piece.text for piece in found if isinstance(piece, Prose)) == text


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_call_is_text_until_its_arguments_begin(name: str) -> None:
    text = FAMILIES[name]
    for end in range(len(text)):
        found = read(name, [text[:end]])
        if isinstance(found[0] if found else None, CallStart):
            assert found[0] == CallStart(0, "weather")
            rest = [piece for piece in found[1:] if isinstance(piece, Arguments) and piece.index == 0]
            assert OSLO.startswith("".join(piece.text for piece in rest))
        elif name not in OUTER:
            assert found == ([Prose(text[:end])] if end else [])


@pytest.mark.parametrize("written", ["<tool_call>\n{", "<tool_call>", "<tool", "<"])
def test_after_a_call_half_a_mark_that_was_cut_off_is_no_text(written: str) -> None:
    reader = CallReader(FORMATS["hermes"], {"weather": {}})
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    pieces = reader.push(f"{call}\n{written}")
    reader.cut()
    assert joined([*pieces, *reader.finish()]) == [CallStart(0, "weather"), Arguments(0, "{}")]


def test_without_a_call_half_a_mark_is_text_even_if_it_was_cut_off() -> None:
    reader = CallReader(FORMATS["hermes"], {"weather": {}})
    pieces = reader.push("a <tool")
    reader.cut()
    assert joined([*pieces, *reader.finish()]) == [Prose("a <tool")]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(FORMATS["hermes"], TOOLS)
    seen = [reader.push(c) for c in '<tool_call>{"name": "weather", "arguments": {"city": "Os']
    assert [piece for pieces in seen for piece in pieces][:2] == [CallStart(0, "weather"), Arguments(0, "{")]
    assert reader.push("lo") == [Arguments(0, "lo")]


def test_a_text_of_a_tag_comes_as_it_is_written() -> None:
    reader = CallReader(FORMATS["qwen3_coder"], TOOLS)
    reader.push("<tool_call>\n<function=weather>\n<parameter=city>\nOs")
    assert reader.push('lo "\n') == [Arguments(0, 'lo \\"')]
    assert reader.push("</parameter>") == [Arguments(0, '"')]


HERMES = [
    # arguments before the name, none at all, as a text, within `function`, several in a list
    ('{"arguments": {"a": 1}, "name": "now"}', [*call(0, "now", '{"a": 1}')]),
    ('{"name": "now"}', call(0, "now", "{}")),
    ('{"name": "now", "arguments": null}', call(0, "now", "{}")),
    ('{"name": "now", "arguments": "{\\"a\\": 1}"}', call(0, "now", '{"a": 1}')),
    ('{"name": "now", "arguments": "soon"}', call(0, "now", '"soon"')),
    ('{"type": "function", "function": {"name": "now", "arguments": {}}}', call(0, "now", "{}")),
    ('[{"name": "now"}, {"name": "now"}]', [*call(0, "now", "{}"), *call(1, "now", "{}")]),
    # a tool that is not there: the client that runs tools says so to the model
    ('{"name": "other", "arguments": {}}', call(0, "other", "{}")),
    # a line end and the closing mark in a string, brackets too many
    ('{"name": "now", "arguments": {"a": "x\ny"}}', call(0, "now", '{"a": "x\\ny"}')),
    ('{"name": "now", "arguments": {"a": "</tool_call>"}}', call(0, "now", '{"a": "</tool_call>"}')),
    ('{"name": "now", "arguments": {"a": 1}}}}', call(0, "now", '{"a": 1}')),
    # arguments that do not end
    ('{"name": "now", "arguments": {"a": [1', call(0, "now", '{"a": [1')),
    # no JSON, and JSON that is no call
    ("now(a=1)", [Prose("<tool_call>now(a=1)</tool_call> and more")]),
    ('{"city": "Oslo"}', [Prose('<tool_call>{"city": "Oslo"}</tool_call> and more')]),
    ("[]", [Prose("<tool_call>[]</tool_call> and more")]),
    ('{"name": ""}', [Prose('<tool_call>{"name": ""}</tool_call> and more')]),
]


@pytest.mark.parametrize(("inner", "found"), HERMES)
def test_what_models_write_between_tags(inner: str, found: list[Piece]) -> None:
    more = [] if isinstance(found[0], Prose) else [Prose(" and more")]
    assert read("hermes", [f"<tool_call>{inner}</tool_call> and more"]) == [*found, *more]


def test_a_word_about_tags_is_no_call() -> None:
    said = "Put it in <tool_call> tags, as in "
    assert read("hermes", [said + FAMILIES["hermes"]]) == [Prose(said.rstrip()), *TWO]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "parameters": {"age": 3}}',
        '{"answer": 42}',
        '{"name": "now"}',
        '{"name": "now", "age": 3, "parameters": {}}',
        'The call is {"name": "now", "parameters": {}}',
        "<|python_tag|>print(1)",
    ],
)
def test_json_without_a_mark_is_a_call_only_of_a_tool(text: str) -> None:
    assert read("llama3", list(text)) == [Prose(text)]


VALUES = [
    ("days", "2", "2"),
    ("days", "two", '"two"'),
    ("city", "5", '"5"'),
    ("city", "a\n b", '"a\\n b"'),
    ("other", "[1, 2]", "[1, 2]"),
    ("other", "plain", '"plain"'),
    ("other", "1e999", '"1e999"'),
    ("other", "[" * 100_000, json.dumps("[" * 100_000)),
]


@pytest.mark.parametrize(("key", "text", "found"), VALUES, ids=lambda x: x[:10])
def test_arguments_in_tags_have_the_types_of_the_schema(key: str, text: str, found: str) -> None:
    said = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert read("glm", [said]) == call(0, "weather", f'{{"{key}": {found}}}')


HOSTILE = [
    "<tool_call>" * 5000,
    '<tool_call>{"x":"<tool_call>' * 2500,
    '<tool_call>{"name":"now","arguments":{' * 1250,
    '<tool_call>{"arguments":' + "[" * 50_000,
    '<tool_call>{"name":"' + "n" * 50_000,
    "<|tool_call>call:now{a:" + "[" * 50_000,
    '<|tool_call>call:now{a:<|"|>' + "<|" * 25_000,
    "<|tool_call>call:now{" * 2500,
    "<|tool_call>call:now{a:" + "1" * 50_000,
    "<tool_call>[" * 5000,
    " " * 50_000,
    "<" * 50_000,
    "{" * 50_000,
]


def in_threes(text: str) -> list[str]:
    return [text[i : i + 3] for i in range(0, len(text), 3)]


@pytest.mark.parametrize("times", first([1, 4]))
@pytest.mark.parametrize("text", HOSTILE, ids=lambda x: x[:30])
def test_no_text_takes_long(text: str, times: int, within: Within) -> None:
    """Some microseconds for each character: where the time is squared, the limit of a test is too short."""
    few = text[: len(text) // 5]
    with effort() as took:
        read("generic", in_threes(few))
    assert took.calls < 30 * len(few)
    with within(20):
        found = read("generic", in_threes(text * times))
    assert sum(len(p.name if isinstance(p, CallStart) else p.text) for p in found) <= len(text) * times


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("[now()]", {}),
        ("now()", {}),
        ("[now(a=true, b=None, c=[1, 'x', {'y': (2.5,)}], d=-3, )]",
            {"a": True, "b": None, "c": [1, "x", {"y": [2.5]}], "d": -3}),
        ('[now(**{"a-b": 1}, c="é")]', {"a-b": 1, "c": "é"}),
    ],
)  # fmt: skip
def test_calls_as_python_writes_them(written: str, arguments: object) -> None:
    found = read("lfm2", [f"<|tool_call_start|>{written}<|tool_call_end|>"])
    assert found[0] == CallStart(0, "now")
    assert isinstance(found[1], Arguments)
    assert json.loads(found[1].text) == arguments


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "[]",
            "now",
            "now(1)",
            "now(a=b)",
            "now(a=f())",
            "now(a=1",
            "now(*[1])",
            "now(a=1e999)",
            "now(a=b'x')",
        ),
        *("now(a=" + "[" * 200 + "]" * 200 + ")", "now(a=" + "-" * 30_000 + "1)", "a" + ".a" * 20_000 + "()"),
        *("now(a={1: 2})", "(lambda: 1)()", "now(a=f'{1}')", "\0", "now(a='" + "x" * 70_000 + "')"),
    ],
    ids=lambda x: x[:20],
)
def test_what_python_would_not_call_is_text(written: str) -> None:
    text = f"<|tool_call_start|>{written}<|tool_call_end|>"
    assert read("lfm2", [text]) == [Prose(text)]


TEMPLATES = {
    "hermes": "{% for tool in tools %}{% endfor %}<tool_call>",
    "qwen3_coder": "{%- if tools %}<tool_call><function=x><parameter=y>{% endif %}",
    "glm": "{%- if tools -%}<tool_call>x<arg_key>{% endif %}",
    "llama3": "{% if not tools is defined %}{% set tools = none %}{% endif %}<|python_tag|>",
    "mistral": "{%- if tools is not none %}[TOOL_CALLS]{% endif %}",
    "mistral_named": "{%- if messages and tools %}[TOOL_CALLS]x[ARGS]{% endif %}",
    "deepseek": "{% if tools %}<｜tool▁call▁begin｜>```json{% endif %}",
    "deepseek_v31": "{% if tools %}<｜tool▁call▁begin｜>{% endif %}",
    "phi": "{% if tools is defined %}<|tool_call|>{% endif %}",
    "gemma4": "{%- if tools -%}{{ '<|tool_call>call:' }}<|tool_call|>{% endif %}",
    "kimi_k2": "{%- if tools -%}<|tool_call_begin|>{%- endif -%}",
    "lfm2": "{%- if tools -%}<|tool_call_start|>{%- endif -%}",
    "minimax_m2": "{% set begin = '<minimax:tool_call>' %}{% if tools %}{% endif %}",
    "seed_oss": "{% set begin = '<seed:tool_call>' %}{% if tools %}<parameter=x>{% endif %}",
    "muse": "{% if tools %}<atem:function_calls><|eom|><|message|>{% endif %}",
    "harmony": "{% if tools %}{{ '<|channel|>commentary<|message|>' }}<|tool_call|>{% endif %}",
    "generic": "{{ tools | tojson }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_family(name: str) -> None:
    assert takes_tools(TEMPLATES[name])
    assert family(TEMPLATES[name]) == name


def test_a_template_without_tools_is_told_of_them_in_hermes_form() -> None:
    template = "{% for message in messages %}You have no tools, so if tools{{ message.content }}{% endfor %}"
    assert not takes_tools(template)
    assert family(template) == "hermes"


def test_the_option_names_every_format() -> None:
    assert set(TOOL_PARSERS) == {*FORMATS, "auto", "none"}
