"""The official client library against /v1/responses, in process; what it reads is held to its own types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseStreamEvent,
    ResponseTextDeltaEvent,
)

from hetrun.client.engine_client import LocalClient
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

EVENT = pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture
async def sdk(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True, api_key="secret"))
    # Its newer releases are typed for httpx2 and take both.
    http = cast("Any", httpx.AsyncClient(transport=transport))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="secret", http_client=http) as client:
        yield client


def checked(answer: Response) -> Response:
    """The library itself takes whatever comes; its types say what should."""
    return Response.model_validate(answer.to_dict())


async def test_a_whole_response(sdk: openai.AsyncOpenAI) -> None:
    answer = checked(
        await sdk.responses.create(
            model="fake",
            input="say hello world",
            instructions="Be brief.",
            max_output_tokens=5,
            include=LOGPROBS,
            top_logprobs=1,
            reasoning={"effort": "low"},
            metadata={"a": "b"},
        )
    )
    assert answer.output_text == "hello world"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.usage.input_tokens_details.cached_tokens) == (9, 3)
    (item,) = answer.output
    assert isinstance(item, ResponseOutputMessage)
    (part,) = item.content
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert [entry.top_logprobs[0].token for entry in part.logprobs] == ["A", "A"]


async def test_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.responses.create(
        model="fake", input=[{"role": "user", "content": "say hello world"}], stream=True, include=LOGPROBS
    )
    events = [event async for event in stream]
    for event in events:
        assert type(EVENT.validate_python(event.to_dict())) is type(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if isinstance(e, ResponseTextDeltaEvent)) == "hello world"
    assert events[-1].type == "response.completed"
    assert checked(events[-1].response).output_text == "hello world"


async def test_the_stream_helper(sdk: openai.AsyncOpenAI) -> None:
    """It checks the events against each other, and puts the answer together again."""
    async with sdk.responses.stream(model="fake", input="say hello world") as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        answer = await stream.get_final_response()
    assert snapshots == ["hello ", "hello world"]
    assert answer.output_text == "hello world"


class Point(pydantic.BaseModel):
    x: int
    y: int


async def test_a_structured_answer(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    say: Any = {"model": "fake", "input": 'say {"x": 1, "y": 2}', "text_format": Point}
    answer = await sdk.responses.parse(**say, extra_body={"min_p": 0.1, "seed": 3})
    assert answer.output_parsed == Point(x=1, y=2)
    (request,) = engine.requests
    assert request.params.structure is not None
    assert json.loads(request.params.structure.text)["required"] == ["x", "y"]
    assert (request.params.min_p, request.params.seed) == (0.1, 3)
    async with sdk.responses.stream(**say) as stream:
        assert (await stream.get_final_response()).output_parsed == Point(x=1, y=2)


async def test_calls(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    call = '<tool_call>\n{"name": "Point", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
    tool: Any = {"type": "function", "name": "Point", "parameters": Point.model_json_schema(), "strict": True}
    ask: Any = {"model": "fake", "input": f"say <think>Hm</think>{call}", "tools": [tool]}
    engine.info = replace(engine.info, thought_mark="<think>")
    answer = checked(await sdk.responses.create(**ask))
    thought, made = answer.output
    assert isinstance(thought, ResponseReasoningItem)
    assert isinstance(made, ResponseFunctionToolCall)
    assert (made.name, json.loads(made.arguments)) == ("Point", {"x": 1, "y": 2})
    async with sdk.responses.stream(**ask) as stream:
        snapshots = []
        async for event in stream:
            assert type(EVENT.validate_python(event.to_dict())).__name__ == type(event).__name__.split("[")[0]
            if event.type == "response.function_call_arguments.delta":
                snapshots.append(event.snapshot)
        streamed = await stream.get_final_response()
    assert snapshots[-1] == made.arguments
    assert [item.type for item in streamed.output] == ["reasoning", "function_call"]
    # The whole answer goes back with what the function said.
    items: Any = [
        {"role": "user", "content": "hi"},
        *answer.output,
        {"type": "function_call_output", "call_id": made.call_id, "output": "say done"},
    ]
    assert (await sdk.responses.create(model="fake", input=items)).output_text == "done"
    roles = [message["role"] for message in engine.requests[-1].messages or ()]
    assert roles == ["user", "assistant", "tool"]
    assert (engine.requests[-1].messages or ())[1]["reasoning_content"] == "Hm"


async def test_an_incomplete_response(sdk: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "fake", "input": "forever", "max_output_tokens": 2}
    answer = checked(await sdk.responses.create(**ask))
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await sdk.responses.create(**ask, stream=True)]
    assert events[-1].type == "response.incomplete"
    assert checked(events[-1].response).output_text == "ha ha "


async def test_a_conversation(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    first = await sdk.responses.create(model="fake", input="say hello")
    second = await sdk.responses.create(model="fake", input="say more", previous_response_id=first.id)
    assert checked(second).previous_response_id == first.id
    assert [m["content"] for m in engine.requests[-1].messages or ()] == ["say hello", "hello", "say more"]
    assert (await sdk.responses.retrieve(second.id)).output_text == "more"
    await sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await sdk.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        await sdk.responses.create(model="fake", input="hi", previous_response_id=second.id)
    assert unknown.value.code == "previous_response_not_found"
    # The other way: the items of the answer are sent back as they came.
    items: Any = [
        {"role": "user", "content": "say hello"},
        *first.output,
        {"role": "user", "content": "say more"},
    ]
    assert (await sdk.responses.create(model="fake", input=items)).output_text == "more"
    assert [m["content"] for m in engine.requests[-1].messages or ()] == ["say hello", "hello", "say more"]


async def test_errors_arrive_as_the_library_knows_them(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.responses.create(model="fake", input="refuse")
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.responses.create(model="other", input="hi")
    assert engine.requests == []
    with pytest.raises(openai.InternalServerError):
        await sdk.responses.create(model="fake", input="fail")
    assert len(engine.requests) == 1  # and it did not try again


async def test_an_error_in_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.responses.create(model="fake", input="fail", stream=True)
    *_, error, failed = [event async for event in stream]
    for event in (error, failed):
        assert type(EVENT.validate_python(event.to_dict())) is type(event)
    assert error.type == "error"
    assert error.message == "the fake backend failed"
    assert failed.type == "response.failed"
    assert checked(failed.response).error is not None


async def test_the_tokens_of_an_input_are_counted(sdk: openai.AsyncOpenAI) -> None:
    counted = await sdk.responses.input_tokens.count(model="fake", input="hello", instructions="be brief")
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == 1 + len("[system]be brief[user]hello{}")
