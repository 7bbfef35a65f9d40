"""What a line asks for, and why another is no request."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrun.server import chat, sampling
from hetrun.server.routes import completions
from hetrun.tools.batch.line_reader import Line
from hetrun.tools.batch.request_lines import CHAT, COMPLETIONS, EMBEDDINGS, Ask, ForAll, RequestReader

ALL = ForAll(
    {CHAT: chat.KNOWN, COMPLETIONS: completions.KNOWN},
    sampling.LIMITS,
    sampling.FORMS,
    {"temperature": 0},
)
HI = [{"role": "user", "content": "Hi"}]


def read(text: str | bytes, for_all: ForAll = ALL, number: int = 1) -> Ask:
    data = text.encode() if isinstance(text, str) else text
    ask = RequestReader(for_all).read(Line(number, data))
    assert ask is not None
    return ask


def of(for_all: ForAll = ALL, **line: object) -> Ask:
    return read(json.dumps(line), for_all)


def test_a_text_is_a_prompt() -> None:
    ask = read("Hi")
    assert (ask.url, ask.body, ask.shape, ask.fault) == (CHAT, {"messages": HI, "temperature": 0}, "own", "")


def test_a_text_that_looks_like_no_json_where_the_file_is_text() -> None:
    ask = RequestReader(ALL, "text").read(Line(1, b'{"not": json'))
    assert ask is not None
    assert ask.body["messages"] == [{"role": "user", "content": '{"not": json'}]


def test_a_schema_without_a_word_of_json_schema_is_an_error_of_its_line() -> None:
    ask = of(prompt="Hi", json_schema={"name": "string"})
    assert ask.fault.startswith("json_schema: it has none of JSON Schema's words (type, properties")
    assert not of(prompt="Hi", json_schema={}).fault
    # OpenAI's format is answered as OpenAI's server would.
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"name": "string"}}}
    assert not of(body={"messages": HI, "response_format": form}).fault


def test_blank_lines_are_no_requests_and_have_no_number() -> None:
    reader = RequestReader(ALL)
    found = [reader.read(Line(n, text)) for n, text in enumerate((b"\xef\xbb\xbfa", b"", b" \t", b"b"), 1)]
    assert [ask and (ask.index, ask.line) for ask in found] == [(0, 1), None, None, (1, 4)]
    assert found[0] is not None
    assert found[0].body["messages"] == [{"role": "user", "content": "a"}]


def test_what_a_line_says_counts_more_than_what_is_said_for_all() -> None:
    for_all = replace(ALL, body={"temperature": 0.5, "max_tokens": 9, "regex": "a+"}, seed=(1 << 32) - 1)
    reader = RequestReader(for_all)
    first = reader.read(Line(1, b'{"prompt": "Hi"}'))
    assert first is not None
    assert first.body == {
        "messages": HI, "temperature": 0.5, "max_tokens": 9, "regex": "a+", "seed": (1 << 32) - 1
    }  # fmt: skip
    second = reader.read(
        Line(2, b'{"prompt": "Hi", "n_predict": 3, "grammar": "root ::= a", "temperature": 1, "top_k": null}')
    )
    assert second is not None
    assert second.body == {
        "messages": HI, "temperature": 1, "n_predict": 3, "grammar": "root ::= a", "seed": 0
    }  # fmt: skip


def test_system_messages() -> None:
    for_all = replace(ALL, system="Be brief.")
    brief = {"role": "system", "content": "Be brief."}
    assert of(for_all, prompt="Hi").body["messages"] == [brief, *HI]
    assert of(for_all, messages=HI).body["messages"] == [brief, *HI]
    assert of(for_all, messages=[brief, *HI]).body["messages"] == [brief, *HI]
    own = {"role": "system", "content": "Be long."}
    assert of(for_all, messages=[own, *HI]).body["messages"] == [own, *HI]
    assert of(for_all, prompt="Hi", system="Be long.").body["messages"] == [own, *HI]


def test_raw_prompts_and_tokens_are_continued() -> None:
    raw = of(replace(ALL, raw=True), prompt="Once")
    assert (raw.url, raw.body) == (COMPLETIONS, {"prompt": "Once", "temperature": 0, "n_predict": -1})
    tokens = of(prompt=[1, 2], max_tokens=4)
    assert (tokens.url, tokens.body) == (COMPLETIONS, {"prompt": [1, 2], "temperature": 0, "max_tokens": 4})


def test_openai_lines() -> None:
    reader = RequestReader(replace(ALL, own={"temperature": 0.8}))
    lines: list[dict[str, Any]] = [
        {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": HI, "model": "m"}},
        {"custom_id": "b", "method": "POST", "url": EMBEDDINGS, "body": {"input": "Hi"}},
    ]
    found = [reader.read(Line(n, json.dumps(line).encode())) for n, line in enumerate(lines, 1)]
    assert [ask and (ask.name, ask.url, ask.shape, ask.fault) for ask in found] == [
        ("a", CHAT, "openai", ""),
        ("b", EMBEDDINGS, "openai", ""),
    ]
    assert [ask and ask.body for ask in found] == [
        {"messages": HI, "model": "m", "temperature": 0},
        {"input": "Hi"},
    ]
    broken = reader.read(Line(3, b"{"))
    assert broken is not None
    assert broken.shape == "openai"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is not JSON: "),
        ('{"prompt": "a"} {}', "it is not JSON: "),
        ('{"prompt": NaN}', "NaN is not JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "it is not JSON: "),
        ('{"prompt": ' + "[" * 200_000, "it is nested too deeply"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "\xff"}', "it is not UTF-8 text: byte 12 is 0xff"),
        ("{}", "the line must have either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": 5}', "prompt must be a text or a list of tokens, not int"),
        ('{"messages": "Hi"}', "messages must be a list"),
        ('{"prompt": "a", "max_token": 5}', "unknown field 'max_token': did you mean max_tokens?"),
        ('{"prompt": "a", "zebra_xq": "red"}', "what is your own goes under metadata"),
        ('{"prompt": "a", "n": 2}', "n must be 1: a line has one answer"),
        ('{"prompt": "a", "stream": true}', "stream: answers of a batch cannot be streamed"),
        ('{"prompt": "a", "system": 5}', "system must be a text"),
        ('{"prompt": [1], "system": "a"}', "system cannot be given"),
        ('{"body": {}, "url": "/v1/images", "custom_id": "a"}', "url must be one of /v1/chat/completions"),
        ('{"body": [], "custom_id": "a"}', "body must be an object"),
        ('{"body": {}, "method": "GET", "custom_id": "a"}', "method must be POST"),
        ('{"body": {"stream": true}, "custom_id": "a"}', "stream: "),
        ('{"body": {}, "custom": "a"}', "unknown field 'custom': did you mean custom_id?"),
    ],
)
def test_lines_that_are_no_requests(line: str | bytes, why: str) -> None:
    ask = read(line)
    assert why in ask.fault
    assert "\n" not in ask.fault
    assert len(ask.fault) < 500


def test_the_digest_is_of_the_line_and_of_what_holds_for_all() -> None:
    assert read("a").digest == read("a", number=9).digest
    assert read("a").digest != read("b").digest
    assert read("a").digest != read("a", replace(ALL, digest=b"other")).digest


def test_the_digest_of_a_line_that_is_no_request_needs_no_model() -> None:
    """A file that had no request was answered without one, and --resume goes on once it has some."""
    bad = '{"prompt"'
    assert read(bad).digest == read(bad, replace(ALL, digest=b"a model")).digest
    assert read(bad).digest != read('{"prompt": ').digest


@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda t: json.dumps({"prompt": t}).encode()))
def test_no_line_does_harm(data: bytes) -> None:
    reader = RequestReader(ALL)
    for number in (1, 2):
        ask = reader.read(Line(number, data.replace(b"\n", b"")))
        assert ask is None or ask.fault or ask.body
        if ask:
            assert isinstance(ask.text, bytes)
