"""Tools and thoughts in chat completions: what is refused, and what OpenAI's library makes of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from hetrun.client.engine_client import LocalClient
from hetrun.errors import OptionError
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BOTH = f'Let me look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def asking(content: str = "say hi", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]} | more


@pytest.fixture
async def sdk(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    engine.info = replace(engine.info, thought_mark="<think>")
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True))
    # Its newer releases are typed for httpx2 and take both.
    http = cast("Any", httpx.AsyncClient(transport=transport))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
        yield client


def user(content: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": content}]


async def test_half_a_mark_is_no_content_where_calls_were_cut_off(sdk: openai.AsyncOpenAI) -> None:
    # The scripted engine writes a word a token.
    text = f"{CALL}\n<tool_call> {{}}"
    n = len(text.split(" ")) - 1
    answer = await sdk.chat.completions.create(
        model="fake", messages=user(f"say {text}"), tools=TOOLS, max_tokens=n
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    stream = await sdk.chat.completions.create(
        model="fake", messages=user(f"say {text}"), tools=TOOLS, max_tokens=n, stream=True
    )
    assert not [chunk.choices[0].delta.content async for chunk in stream if chunk.choices[0].delta.content]


async def test_calls_of_a_whole_answer(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    answer = await sdk.chat.completions.create(model="fake", messages=user(f"say {BOTH}"), tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": "Oslo"})
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert engine.requests[0].tools == tuple(TOOLS)
    assert engine.requests[0].structure is None


async def test_an_answer_that_is_a_call_has_no_content(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="fake", messages=user(f"say {CALL}"), tools=TOOLS)
    assert answer.choices[0].message.content is None


async def test_an_answer_without_a_call_is_text(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="fake", messages=user("say It <is\n so."), tools=TOOLS, logprobs=True
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "It <is\n so.")
    assert choice.message.tool_calls is None


async def test_one_call_where_they_are_not_to_be_parallel(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="fake", messages=user(f"say {BOTH}"), tools=TOOLS, parallel_tool_calls=False
    )
    assert [c.function.name for c in answer.choices[0].message.tool_calls or [] if c.type == "function"] == [
        "weather"
    ]


async def test_the_stream_helper_puts_calls_together(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model="fake", messages=user(f"say {BOTH}"), tools=TOOLS, n=2, logprobs=True
    ) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_completion()
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        assert calls == [("weather", '{"city": "Oslo"}'), ("now", "{}")]
    deltas = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 2  # as they come, and not at the end
    assert [e.type for e in events].count("tool_calls.function.arguments.done") == 4


async def test_a_call_that_is_cut_off(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="fake", messages=user(f"say {CALL}"), tools=TOOLS, max_tokens=4
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert cast("Any", choice.message.tool_calls[0]).function.arguments == '{"city": '


async def test_thoughts_are_apart(sdk: openai.AsyncOpenAI) -> None:
    for said in ("say <think>Hm, so </think> Yes", "muse Hm, so </think> Yes"):
        answer = await sdk.chat.completions.create(model="fake", messages=user(said))
        assert cast("Any", answer.choices[0].message).reasoning_content == "Hm, so"
        assert answer.choices[0].message.content == "Yes"
        stream = await sdk.chat.completions.create(model="fake", messages=user(said), stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Hm, so"
        assert "".join(d.content or "" for d in deltas) == "Yes"


@pytest.mark.parametrize(("format", "mark"), [("none", "<think>"), ("auto", "")])
async def test_thoughts_stay_in_texts_that_are_not_searched_for_them(
    engine: FakeEngine, format: str, mark: str
) -> None:
    engine.info = replace(engine.info, thought_mark=mark)
    app = create_app(LocalClient(engine), reasoning_format=format)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = (await http.post(CHAT, json=asking("say <think>Hm</think> Yes"))).json()
    assert answer["choices"][0]["message"]["content"] == "<think>Hm</think> Yes"


async def test_without_a_parser_calls_stay_text(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), tool_parser="none")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = (await http.post(CHAT, json=asking(f"say {CALL}", tools=TOOLS))).json()
        assert answer["choices"][0]["message"]["content"] == CALL
        assert engine.requests[-1].tools == tuple(TOOLS)
        refused = await http.post(CHAT, json=asking(tools=TOOLS, tool_choice="required"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_named_parser_is_used(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), tool_parser="mistral")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        said = asking('say [TOOL_CALLS][{"name": "now", "arguments": {}}]', tools=TOOLS)
        (call,) = (await http.post(CHAT, json=said)).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert len(call["id"]) == 9  # Mistral's templates take no other


THINK = "<|channel|>analysis<|message|>Hm, so<|end|><|start|>assistant"
LOOK = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
SEND = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
FINAL = "<|channel|>final<|message|>It is so."


@pytest.fixture
async def harmony(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.info = replace(engine.info, tool_format="harmony", thought_mark="<|channel|>analysis<|message|>")
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def told(http: httpx.AsyncClient, said: str, stream: bool, **more: object) -> dict[str, Any]:
    """The message, and why it ended."""
    response = await http.post(CHAT, json=asking(f"say {said}", stream=stream, **more))
    if not stream:
        choice: dict[str, Any] = response.json()["choices"][0]
        return {"why": choice["finish_reason"], **choice["message"]}
    found: dict[str, Any] = {"content": "", "reasoning_content": ""}
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    for choice in (json.loads(line)["choices"][0] for line in lines if line != "[DONE]"):
        found["why"] = choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            found[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            calls = found.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_channels_are_apart(harmony: httpx.AsyncClient, stream: bool) -> None:
    answer = await told(harmony, THINK + FINAL, stream)
    assert (answer["reasoning_content"], answer["content"]) == ("Hm, so", "It is so.")
    answer = await told(harmony, THINK + LOOK + SEND, stream, tools=TOOLS)
    assert (answer["reasoning_content"], answer["content"]) == ("Hm, so", "Let me look.")
    (call,) = answer["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Oslo"}')
    assert answer["why"] == "tool_calls"
    answer = await told(harmony, LOOK + FINAL, stream)
    assert answer["content"] == "Let me look.\n\nIt is so."


@pytest.mark.parametrize("options", [{"reasoning_format": "none"}, {"tool_parser": "none"}])
async def test_channels_stay_where_they_are_not_looked_for(
    harmony: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any]
) -> None:
    app = create_app(LocalClient(engine), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        said = asking(f"say {THINK}{SEND}", tools=TOOLS)
        message = (await http.post(CHAT, json=said)).json()["choices"][0]["message"]
        if "reasoning_format" in options:
            assert message["content"] == THINK.removesuffix("<|start|>assistant")
            assert message["tool_calls"][0]["function"]["name"] == "weather"
            plain = (await http.post(CHAT, json=asking(f"say {THINK}{FINAL}"))).json()
            assert plain["choices"][0]["message"]["content"] == THINK + FINAL
        else:
            assert message["reasoning_content"] == "Hm, so"
            assert message["content"] == f"<|start|>assistant{SEND}"


async def test_a_parser_of_channels_may_be_named(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), tool_parser="harmony")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        message = (await http.post(CHAT, json=asking(f"say {THINK}{FINAL}"))).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so", "It is so.")


async def test_what_has_a_form_has_a_channel(harmony: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def asked(**more: object) -> Any:  # noqa: ANN401
        response = await harmony.post(CHAT, json=asking(f"say {THINK}{FINAL}", **more))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["reasoning_content"] == "Hm, so"
        structure = engine.requests[-1].structure
        return None if structure is None else json.loads(structure.text)

    thought, *begin, call = await asked(tools=TOOLS, tool_choice="required")
    assert thought["maybe"][:3] == [{"mark": "<|channel|>"}, "analysis", {"mark": "<|message|>"}]
    assert (begin, len(call["any"])) == ([], 2)
    form = {"response_format": {"type": "json_object"}}
    thought, *_, last = await asked(**form)
    assert (list(thought), last) == (["maybe"], {"json": {"type": "object"}})
    first, *_ = await asked(**form, reasoning_effort="none")
    assert first == {"mark": "<|channel|>"}
    calls, formed = (await asked(**form, tools=TOOLS))["any"]
    assert (calls[0], formed[0]) == (thought, thought)
    assert await asked() is None


async def test_messages_are_apart(engine: FakeEngine) -> None:
    """Muse's: to itself, to a tool, to the user."""
    engine.info = replace(engine.info, tool_format="muse", thought_mark=" to=self<|message|>")
    thought, call = " to=self<|message|>Hm<|eom|><|start|>assistant", '<atem:invoke name="weather">\n'
    call += '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>'
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await told(http, f"{thought} to=user<|message|>Yes", stream=False)
        assert (answer["reasoning_content"], answer["content"]) == ("Hm", "Yes")
        answer = await told(http, f"{thought} to=weather<|message|>{call}", stream=False, tools=TOOLS)
        assert (answer["reasoning_content"], answer["why"]) == ("Hm", "tool_calls")
        function = answer["tool_calls"][0]["function"]
        assert function == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        await told(http, "x", stream=False, response_format={"type": "json_object"})
    structure = engine.requests[-1].structure
    assert structure is not None
    thought_part, *rest = json.loads(structure.text)
    assert list(thought_part) == ["maybe"]
    assert rest == [" to=user", {"mark": "<|message|>"}, {"json": {"type": "object"}}]


async def test_a_schema_within_a_channel_is_the_clients(
    harmony: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for said, told in (
        ("parts at anyOf[0].properties.x: no", "response_format at properties.x: no"),
        ("parts at anyOf[0]: no", "response_format: no"),
        ("parts: no", "response_format: no"),
    ):
        engine.refusals.append(OptionError(said))
        response = await harmony.post(CHAT, json=asking(response_format={"type": "json_object"}))
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["message"]) == (400, "response_format", told)


GEMMA = {
    "thought": "<|channel>thought\nHm, so\n<channel|>",
    "call": '<|tool_call>call:weather{city:<|"|>Os"lo<|"|>}<tool_call|>',
}


@pytest.fixture
async def gemma4(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.info = replace(engine.info, tool_format="gemma4", thought_mark="<|channel>thought")
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_gemmas_thoughts_and_calls_are_apart(gemma4: httpx.AsyncClient, stream: bool) -> None:
    answer = await told(gemma4, f"{GEMMA['thought']}Let me look. {GEMMA['call']}", stream, tools=TOOLS)
    assert (answer["reasoning_content"], answer["content"]) == ("Hm, so", "Let me look.")
    (call,) = answer["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Os\\"lo"}')
    assert answer["why"] == "tool_calls"
    two = GEMMA["call"] * 2
    only = await told(gemma4, two, stream, tools=TOOLS, parallel_tool_calls=False)
    assert len(only["tool_calls"]) == 1
    assert len((await told(gemma4, two, stream, tools=TOOLS))["tool_calls"]) == 2
    answer = await told(gemma4, GEMMA["thought"] + GEMMA["call"], stream)
    assert (answer["reasoning_content"], answer["content"]) == ("Hm, so", GEMMA["call"])


async def test_a_thought_of_gemma_that_the_prompt_began(
    gemma4: httpx.AsyncClient, engine: FakeEngine
) -> None:
    said = asking(f"muse Hm, so\n<channel|>{GEMMA['call']}", tools=TOOLS)
    message = (await gemma4.post(CHAT, json=said)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm, so"
    assert message["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("options", "thought", "calls"),
    [
        ({"reasoning_format": "none"}, False, True),
        ({"tool_parser": "none"}, True, False),
        ({"tool_parser": "gemma4"}, True, True),
        ({"tool_parser": "generic"}, True, True),
        ({"tool_parser": "hermes"}, True, False),
    ],
)
async def test_what_is_looked_for_in_gemmas_answers(
    gemma4: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any], thought: bool, calls: bool
) -> None:
    if options == {"tool_parser": "gemma4"}:
        engine.info = replace(engine.info, tool_format="hermes", thought_mark="")
    app = create_app(LocalClient(engine), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        message = await told(http, GEMMA["thought"] + GEMMA["call"], False, tools=TOOLS)
    assert message.get("reasoning_content") == ("Hm, so" if thought else None)
    assert len(message.get("tool_calls", ())) == calls
    expected = ("" if thought else GEMMA["thought"]) + ("" if calls else GEMMA["call"])
    assert (message["content"] or "").strip() == expected.strip()


async def test_calls_are_forced_in_gemmas_notation(gemma4: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def asked(**more: object) -> Any:  # noqa: ANN401
        response = await gemma4.post(CHAT, json=asking("say hi", tools=TOOLS, **more))
        assert response.status_code == 200, response.text
        structure = engine.requests[-1].structure
        return None if structure is None else json.loads(structure.text)

    thought, calls = await asked(tool_choice="required")
    assert thought["maybe"][:2] == [{"mark": "<|channel>"}, "thought"]
    assert [call[:2] for call in calls["many"]["any"]] == [
        [{"mark": "<|tool_call>"}, "call:weather"],
        [{"mark": "<|tool_call>"}, "call:now"],
    ]
    (named,) = await asked(
        tool_choice={"type": "function", "function": {"name": "now"}},
        reasoning_effort="none",
        parallel_tool_calls=False,
    )
    assert [call[1] for call in named["any"]] == ["call:now"]
    assert await asked() is None
    engine.refusals.append(OptionError("parts at anyOf[0]: no"))
    refused = await gemma4.post(CHAT, json=asking(tools=TOOLS, tool_choice="required"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_conversation_with_calls_reaches_the_template(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "say 10:00"}]},
    ]
    answer = await http.post(CHAT, json={"messages": messages, "tools": TOOLS})
    assert answer.json()["choices"][0]["message"]["content"] == "10:00"
    sent = engine.requests[-1].messages
    assert sent is not None
    assert sent[1] == {"role": "assistant", "reasoning_content": "Hm", "tool_calls": [call]}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "content": "say 10:00"}


async def test_what_is_wanted_of_tools(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def asked(**more: object) -> list[Any] | dict[str, Any] | None:
        """The parts that the answer is to be put together of."""
        response = await http.post(CHAT, json=asking() | {"tools": TOOLS} | more)
        assert response.status_code == 200, response.text
        structure = engine.requests[-1].structure
        if structure is None:
            return None
        assert structure.kind == "parts"
        found: list[Any] | dict[str, Any] = json.loads(structure.text)
        return found

    async def first(**more: object) -> dict[str, Any]:
        parts = await asked(**more)
        assert isinstance(parts, list)
        return dict(parts[0])

    assert await asked() is None
    assert await asked(tool_choice="none", tools=[]) is None
    assert await asked(tool_choice="none") is None
    assert list(engine.requests[-1].tools) == []  # the template shall not speak of them
    assert len((await first(tool_choice="required"))["many"]["any"]) == 2
    assert list(await first(tool_choice="required", parallel_tool_calls=False)) == ["any"]
    named = await first(tool_choice={"type": "function", "function": {"name": "now"}})
    assert len(named["many"]["any"]) == 1
    assert len(engine.requests[-1].tools) == 2
    either = await asked(response_format={"type": "json_object"})
    assert isinstance(either, dict)
    assert either["any"][1] == {"json": {"type": "object"}}
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    assert (await first(tools=[strict]))["any_times"][0] == {"until": "<tool_call>"}


MANY = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
DEEP: dict[str, object] = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}
WRONG: list[tuple[dict[str, object], str, str]] = [
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": "now"}, "tools", "invalid_type"),
    ({"tools": MANY}, "tools", "array_above_max_length"),
    ({"tools": [3]}, "tools[0]", "invalid_type"),
    ({"tools": [{}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"function": "now"}]}, "tools[0].function", "invalid_type"),
    ({"tools": [{"function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
    ({"tools": [{"function": {"name": 3}}]}, "tools[0].function.name", "invalid_type"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [{"function": {"name": "a" * 65}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "invalid_value"),
    (
        {"tools": [{"function": {"name": "a", "description": 3}}]},
        "tools[0].function.description",
        "invalid_type",
    ),
    (
        {"tools": [{"function": {"name": "a", "parameters": 3}}]},
        "tools[0].function.parameters",
        "invalid_type",
    ),
    (
        {"tools": [{"function": {"name": "a", "parameters": {"type": 123}}}]},
        "tools[0].function.parameters",
        "invalid_function_parameters",
    ),
    ({"tools": [{"function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict", "invalid_type"),
    ({"tools": [{"function": {"name": "a", "parameters": DEEP}}]}, "tools[0]", "invalid_value"),
    (
        {"tools": [{"function": {"name": "a", "description": "x" * 600_000}}]},
        "tools",
        "string_above_max_length",
    ),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    ({"tools": [NOW], "tool_choice": 3}, "tool_choice", "invalid_value"),
    ({"tools": [NOW], "tool_choice": {}}, "tool_choice.function", "missing_required_parameter"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "invalid_value"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    ({"tools": [NOW], "grammar": 'root ::= "a"'}, "grammar", "invalid_value"),
    ({"functions": [{"name": "now"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "now"}}, "function_call", "unsupported_parameter"),
]
CALLED: list[tuple[object, str, str]] = [
    ({"role": "tool", "content": "4"}, "messages[0].tool_call_id", "missing_required_parameter"),
    (
        {"role": "tool", "tool_call_id": "c", "content": None},
        "messages[0].content",
        "missing_required_parameter",
    ),
    ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls", "invalid_type"),
    ({"role": "assistant", "tool_calls": [3]}, "messages[0].tool_calls[0]", "invalid_type"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function", "invalid_type"),
    (
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "now"}}]},
        "messages[0].tool_calls[0].function.arguments",
        "missing_required_parameter",
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "c" * 300, "function": {"name": "n", "arguments": ""}}]},
        "messages[0].tool_calls[0].id",
        "string_above_max_length",
    ),
    ({"role": "assistant", "function_call": {"name": "now"}}, "messages[0]", "unsupported_parameter"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [*WRONG, *(({"messages": [message]}, param, code) for message, param, code in CALLED)],
    ids=lambda x: str(x)[:50],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(CHAT, json=asking() | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert engine.requests == []


async def test_schemas_that_cannot_be_followed_are_named(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    for said, param in (
        ("parts at anyOf[1].properties.x: no", "tools[1].function.parameters"),
        ("parts: no", "tools"),
    ):
        engine.refusals.append(OptionError(said))
        response = await http.post(CHAT, json=asking(tools=TOOLS, tool_choice="required"))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["code"] == "invalid_function_parameters"
        assert error["message"].startswith(param)
