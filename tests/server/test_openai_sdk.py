"""The official client library against the app, in process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import openai
import pydantic
import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.errors import DeadlineExceeded, HetrunError, Overloaded
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine


@pytest.fixture
async def sdk(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(create_app(LocalClient(engine), strict=True, api_key="secret"))
    # Its newer releases are typed for httpx2 and take both.
    http = cast("Any", httpx.AsyncClient(transport=transport))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="secret", http_client=http) as client:
        yield client


async def test_a_whole_answer(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "say hello world"}], logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "A"


async def test_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "say hello world"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_the_stream_helper(sdk: openai.AsyncOpenAI) -> None:
    """It checks the chunks against each other, and puts the answer together again."""
    async with sdk.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "say hello world"}]
    ) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert kinds.count("content.delta") == 3  # the first is the empty one that carries the role
    assert kinds[-1] == "content.done"
    assert answer.choices[0].message.content == "hello world"


class Point(pydantic.BaseModel):
    x: int
    y: int


async def test_a_structured_answer(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    """The library makes the schema of a class, and the class's object of the answer."""
    answer = await sdk.chat.completions.parse(
        model="fake",
        messages=[{"role": "user", "content": 'say {"x": 1, "y": 2}'}],
        response_format=Point,
        presence_penalty=0.5,
        extra_body={"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.parsed == Point(x=1, y=2)
    (request,) = engine.requests
    assert request.params.structure is not None
    assert json.loads(request.params.structure.text)["required"] == ["x", "y"]
    assert (request.params.presence_penalty, request.params.min_p) == (0.5, 0.1)
    assert request.template_options == {"enable_thinking": False}


async def test_a_schema_that_cannot_be_used(sdk: openai.AsyncOpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="mistake") as bad:
            await sdk.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "unfit json_schema"}],
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                },
                stream=stream,
            )
        assert bad.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="must be text, json_object or json_schema"):
        await sdk.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            response_format=cast("Any", {"type": "xml"}),
        )


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(
        model="fake", prompt=["say hello world", "say bye"], echo=True, logprobs=1, n=2, seed=7
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == ["say hello worldhello world"] * 2 + ["say byebye"] * 2
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens == ["say ", "hello ", "world", "hello ", "world", "<end>"]
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[1:3] == [-0.2, -0.2]
    stream = await sdk.completions.create(model="fake", prompt=[115, 97, 121, 32, 97], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a"
    assert chunks[-1].choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as bad:
        await sdk.completions.create(model="fake", prompt="refuse")
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")


async def test_several_answers(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "say hello world"}], n=3, stream=True
    )
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["hello world"] * 3


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["fake"]
    assert (await sdk.models.retrieve("fake")).owned_by == "hetrun"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.models.retrieve("other")


async def test_errors_arrive_as_the_library_knows_them(sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    ask = sdk.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(model="fake", messages=[{"role": "user", "content": "refuse"}])
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="n must be an integer from 1 to 128"):
        await ask(model="fake", messages=[{"role": "user", "content": "hi"}], n=0)
    assert engine.requests == []
    with pytest.raises(openai.InternalServerError):
        await ask(model="fake", messages=[{"role": "user", "content": "fail"}])
    assert len(engine.requests) == 1  # and it did not try again
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").models.list()


async def test_an_error_in_a_stream_is_raised(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "fail"}], stream=True
    )
    with pytest.raises(openai.APIError, match="the fake backend failed"):
        _ = [chunk async for chunk in stream]


async def test_the_library_asks_again_when_it_was_told_to(
    sdk: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    for stream in (False, True):
        engine.refusals = [Overloaded("the queue is full", 0.02), Overloaded("the queue is full", 0.01)]
        answer = await sdk.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "say hello"}], stream=stream
        )
        assert engine.refusals == []
        if isinstance(answer, openai.AsyncStream):
            await answer.close()
        else:
            assert answer.choices[0].message.content == "hello"
    engine.refusals = [Overloaded("the queue is full", 0.01)] * 3
    with pytest.raises(openai.RateLimitError, match="queue is full") as busy:
        await sdk.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert (busy.value.code, busy.value.type) == ("overloaded", "rate_limit_error")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("the prompt is too much for this deadline"), openai.RateLimitError),
        (Overloaded("the queue is full", 600), openai.RateLimitError),  # longer than the library would wait
        (DeadlineExceeded("the deadline of 5 s passed"), openai.InternalServerError),
    ],
)
async def test_the_library_does_not_ask_again_where_that_is_vain(
    sdk: openai.AsyncOpenAI, engine: FakeEngine, error: HetrunError, kind: type[openai.APIStatusError]
) -> None:
    engine.refusals = [error]
    with pytest.raises(kind):
        await sdk.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"deadline_s": 5, "priority": 1},
            user="me",
        )
    assert (engine.refusals, engine.requests) == ([], [])
