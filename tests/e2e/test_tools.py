"""Tools with a real model, which would not call any by itself: what is required is forced."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import jsonschema
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import LocalClient
from hetrun.config import default_model
from hetrun.server.app import create_app

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time of day."}},
]
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather like in Oslo?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LocalModel]:
    with LocalModel(default_model(), ctx=2048) as model:
        yield model


@pytest.fixture
async def sdk(llm: LocalModel) -> AsyncIterator[openai.AsyncOpenAI]:
    http = cast("Any", httpx.AsyncClient(transport=httpx.ASGITransport(create_app(LocalClient(llm)))))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
        yield client


def check(call: pydantic.BaseModel) -> None:
    """A call of one of the tools, with arguments that fit."""
    function = call.model_dump()["function"]
    arguments = json.loads(function["arguments"])
    if function["name"] == "weather":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (function["name"], arguments) == ("now", {})


async def test_calls_that_are_required(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="any",
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        n=2,
        max_tokens=200,
    )
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        check(call)


async def test_a_named_function_as_a_stream_and_its_result(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model="any",
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        seed=2,
        max_tokens=200,
    ) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    check(call)
    # What was answered goes back as it came.
    said = cast("ChatCompletionMessageParam", message.to_dict())
    result: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": "2 degrees, snow",
    }
    answer = await sdk.chat.completions.create(
        model="any", messages=[*ASK, said, result], tools=TOOLS, temperature=0, max_tokens=40
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 150  # the tools were told of


async def test_a_schema_that_cannot_be_followed_is_an_error_of_the_request(sdk: openai.AsyncOpenAI) -> None:
    bad: Any = {"name": "bad", "parameters": {"type": "object", "properties": {"x": {"type": "thing"}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(
            model="any",
            messages=ASK,
            tools=[*TOOLS, {"type": "function", "function": bad}],
            tool_choice="required",
        )
    assert refused.value.param == "tools[2].function.parameters"
    assert refused.value.code == "invalid_function_parameters"


BEGUN: list[ChatCompletionMessageParam] = [*ASK, {"role": "assistant", "content": '{"city": "Os'}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
async def test_a_message_with_a_form_is_continued_in_that_form(
    sdk: openai.AsyncOpenAI, tools: dict[str, Any]
) -> None:
    answer = await sdk.chat.completions.create(
        model="m", messages=BEGUN, response_format=FORM, temperature=0, max_tokens=60, **tools
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    found = json.loads('{"city": "Os' + (choice.message.content or ""))
    jsonschema.validate(found, SCHEMA)
    assert found["city"].startswith("Os")


async def test_a_message_that_cannot_have_the_form(sdk: openai.AsyncOpenAI) -> None:
    last: Any = {"role": "assistant", "content": "Well, "}
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model="m", messages=[*ASK, last], response_format=FORM)
    assert caught.value.param == "response_format"
    assert "the message that is continued is not the beginning of such an answer" in str(caught.value)


async def test_a_message_that_is_continued_as_it_stands(sdk: openai.AsyncOpenAI, llm: LocalModel) -> None:
    last: Any = {"role": "assistant", "content": "The capital of France is"}
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = await sdk.chat.completions.create(
        model="m", messages=[*asked, last], temperature=0, max_tokens=3
    )
    assert (answer.choices[0].message.content or "").startswith(" Paris")
