"""Anthropic's Python library, over TCP with a key."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic

from tests.clients.checks import (
    KEY,
    MESSAGES,
    MODEL,
    SCHEMA,
    SEEING_URL,
    SEEN,
    TOO_LONG,
    URL,
    check,
    expect,
    good_city,
    package,
    raises,
    sees,
)

BASE = URL.removesuffix("/v1")
SAID: Any = MESSAGES
GREEDY: Any = {"temperature": 0}  # its newest release has no such argument
TOOLS: Any = [{"name": "look_up", "description": "Look a city up.", "input_schema": SCHEMA}]
FORCED: Any = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
CLIENT = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)


def ask(**more: Any) -> Any:  # noqa: ANN401 - types of the library
    return CLIENT.messages.create(**{"model": MODEL, "messages": SAID, "max_tokens": 8, **more})


def create() -> None:
    answer = ask(system=[{"type": "text", "text": "You are kind."}], stop_sequences=["never this"])
    expect(answer.content[0].type == "text" and bool(answer.content[0].text), answer)
    expect(answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0, answer)
    expect(str(answer._request_id).startswith("req_"), answer)


def pictures() -> None:
    client = anthropic.Anthropic(base_url=SEEING_URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": SEEN["picture"]}
    blocks: Any = [{"type": "text", "text": SEEN["question"]}, {"type": "image", "source": source}]
    said: Any = [{"role": "user", "content": blocks}]
    answer: Any = client.messages.create(
        model=SEEN["model"], messages=said, max_tokens=8, extra_body={"temperature": 0}
    )
    used = answer.usage
    sees(answer.content[0].text, used.input_tokens + (used.cache_read_input_tokens or 0))


def stream() -> None:
    with CLIENT.messages.stream(model=MODEL, messages=SAID, max_tokens=8) as events:
        text = "".join(events.text_stream)
        answer: Any = events.get_final_message()
    expect(bool(text) and answer.content[0].text == text, answer)
    used = answer.usage
    expect(used.output_tokens > 0 and used.input_tokens + used.cache_read_input_tokens > 0, answer)


def raw_stream() -> None:
    kinds = [event.type for event in ask(stream=True)]
    expect((kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"]), kinds)


def tools() -> None:
    more = {"tools": TOOLS, "max_tokens": 80, "extra_body": GREEDY}
    answer = ask(tool_choice=FORCED, **more)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    expect(answer.stop_reason == "tool_use" and call.name == "look_up", answer)
    expect(call.input["city"] in ("Paris", "Rome"), call)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "A city."}]}
    back = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    expect(ask(messages=back, **more).usage.cache_read_input_tokens > 0, "nothing cached")


def streamed_tools() -> None:
    with CLIENT.messages.stream(
        model=MODEL, messages=SAID, max_tokens=80, tools=TOOLS, tool_choice=FORCED, extra_body=GREEDY
    ) as events:
        answer: Any = events.get_final_message()
    calls = [block for block in answer.content if block.type == "tool_use"]
    expect(len(calls) == 1 and calls[0].input["number"] in (1, 2), answer)


def structured() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    good_city(ask(output_config=form, max_tokens=60, extra_body=GREEDY).content[0].text)


def count_tokens() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=SAID).input_tokens
    used = ask().usage
    expect(counted == used.input_tokens + used.cache_read_input_tokens, (counted, used))


def models() -> None:
    (model,) = CLIENT.models.list()
    expect((model.id, model.type) == (MODEL, "model") and bool(model.created_at), model)
    expect(CLIENT.models.retrieve(MODEL).display_name == MODEL, model)


def asynchronous() -> None:
    async def both() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=BASE, auth_token=KEY, max_retries=0) as client:
            said: Any = {"model": MODEL, "messages": SAID, "max_tokens": 8}
            async with client.messages.stream(**said) as events:
                streamed = await events.get_final_message()
            return await client.messages.create(**said), streamed

    for answer in asyncio.run(both()):
        expect(bool(answer.content[0].text), answer)


def errors() -> None:
    """Each status as the class that the library has for it."""
    check("400", lambda: raises(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": -1})))
    check("too long", lambda: raises(anthropic.BadRequestError, lambda: ask(messages=TOO_LONG)))
    check("404", lambda: raises(anthropic.NotFoundError, lambda: ask(model="another")))
    stranger = anthropic.Anthropic(base_url=BASE, api_key="wrong", max_retries=0)
    check("401", lambda: raises(anthropic.AuthenticationError, stranger.models.list))
    picture: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    check("image", lambda: raises(anthropic.BadRequestError, lambda: ask(messages=picture)))


if __name__ == "__main__":
    package("anthropic")
    for does in (
        create,
        stream,
        raw_stream,
        tools,
        streamed_tools,
        structured,
        count_tokens,
        models,
        pictures,
    ):
        check(does.__name__, does)
    check("async", asynchronous)
    errors()
