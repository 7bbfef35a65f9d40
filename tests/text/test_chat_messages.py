"""What may be given to a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.errors import OptionError, TemplateError
from hetrun.text.chat import ChatTemplate, checked_messages
from hetrun.text.chat.messages import checked_objects
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty: give at least one message"),
        ("Hi", "messages must be a list like"),
        ({"role": "user", "content": "Hi"}, "messages must be a list like"),
        (["Hi"], "messages[0] must be an object with role and content, not str"),
        ([*HI, {"content": "Hi"}], "messages[1].role must be a text such as"),
        ([{"role": "", "content": "Hi"}], "messages[0].role must be a text such as"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role must be a text such as"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a text or a list of parts, not int"),
        ([{"role": "user", "content": ["Hi"]}], 'messages[0].content[0] must be {"type": "text"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "only text can be read, not image_url",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0] must be"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content holds U+D800, half of a character"),
        (
            [{"role": "user", "content": "a", "x": 1 << 9999}],
            "messages[0].x is a number of more than 8192 bits",
        ),
        (
            [{"role": "user", "content": "a", "x": object()}],
            "messages[0].x holds a object, which is not JSON",
        ),
        ([{"role": "user", "content": "a", "x": {1: 2}}], "messages[0].x has a key that is not text: 1"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls must be a list of objects"),
    ],
)
def test_messages_that_cannot_be_used_are_named(messages: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError) as caught:
        checked_messages(messages)
    assert said in str(caught.value)


def test_depth_is_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OptionError, match="nested more than 64 deep"):
        checked_messages([{"role": "user", "content": "a", "x": deep}])


@pytest.mark.parametrize(
    ("tools", "said"),
    [("x", "tools must be a list"), ([1], r"tools\[0\] must be a JSON object, not int")],
)
def test_tools_that_cannot_be_used_are_named(tools: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=said):
        checked_objects("tools", tools)


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert checked_messages([{"role": "user", "content": []}])[0]["content"] == ""


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    broken = {"function": {"name": "g", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    checked = checked_messages([message])[0]
    assert "content" not in checked
    assert checked["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert checked["tool_calls"][1]["function"]["arguments"] == "{"
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}


def test_a_template_gets_plain_values() -> None:
    class Sly(str):
        def harm(self) -> str:
            return "harm"

    class SlyInt(int):
        def harm(self) -> str:
            return "harm"

    messages = [{"role": "user", "content": Sly("a"), "n": SlyInt(1)}]
    for source in ("{{ messages[0].content.harm() }}", "{{ messages[0].n.harm() }}"):
        with TemplateWorker(ChatTemplate(source, "x")) as worker:
            with pytest.raises(TemplateError, match="has no attribute 'harm'"):
                worker.render(messages)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def chatml() -> Iterator[TemplateWorker]:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        yield worker


@settings(max_examples=60)
@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), json_values), max_size=3))
def test_any_json_is_rendered_or_refused_in_a_sentence(
    chatml: TemplateWorker, messages: list[dict[str, Any]]
) -> None:
    refused, text = "", ""
    try:
        text = chatml.render(messages)
    except OptionError as error:
        refused = str(error)
    assert refused.startswith("messages") or text.endswith("<|im_start|>assistant\n")
