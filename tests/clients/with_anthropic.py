"""Anthropic's Python library: over TCP with a key, and over a Unix socket."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import anthropic
import httpx2

from tests.clients.checks import (
    KEY,
    MODEL,
    SCHEMA,
    TOO_LONG,
    UDS,
    URL,
    check,
    expect,
    good_city,
    package,
    raises,
)

SAID: Any = [{"role": "user", "content": "Say hello."}]
TOOLS: Any = [{"name": "look_up", "description": "Look a city up.", "input_schema": SCHEMA}]
USE: Any = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
COLD = {"temperature": 0}  # which newer models of Anthropic do not take, nor does the library
PICTURE: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0"}}]


def tcp(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=key, max_retries=0)


def uds() -> anthropic.Anthropic:
    http: Any = httpx2.Client(transport=httpx2.HTTPTransport(uds=UDS))
    return anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=http, max_retries=0)


def create(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, messages=SAID, max_tokens=8, system="Be brief.")
    expect(answer.content[0].type == "text" and bool(answer.content[0].text), answer)
    expect(answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0, answer)


def stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, messages=SAID, max_tokens=8) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect(bool(text) and final.content[0].type == "text" and final.content[0].text == text, final)
    expect(final.usage.output_tokens > 0 and final.stop_reason is not None, final)


def events(client: anthropic.Anthropic) -> None:
    kinds = [
        event.type for event in client.messages.create(model=MODEL, messages=SAID, max_tokens=4, stream=True)
    ]
    expect(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds)


def stopped(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, messages=SAID, max_tokens=200, extra_body=COLD, stop_sequences=["l", "e", "i", "o", "a"]
    )
    expect(
        answer.stop_reason == "stop_sequence" and answer.stop_sequence in ("l", "e", "i", "o", "a"), answer
    )


def called(client: anthropic.Anthropic) -> None:
    """A call, and its result sent back."""
    answer = client.messages.create(
        model=MODEL, messages=SAID, max_tokens=100, extra_body=COLD, tools=TOOLS, tool_choice=USE
    )
    expect(answer.stop_reason == "tool_use", answer)
    call = next(block for block in answer.content if block.type == "tool_use")
    good_city(json.dumps(call.input))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    more: Any = [
        *SAID,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    then = client.messages.create(model=MODEL, messages=more, max_tokens=8, tools=TOOLS)
    expect(then.usage.output_tokens > 0, then)
    expect((then.usage.cache_read_input_tokens or 0) > 0, then.usage)


def call_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, messages=SAID, max_tokens=100, extra_body=COLD, tools=TOOLS, tool_choice=USE
    ) as found:
        final = found.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    good_city(json.dumps(call.input))


def structured(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(
        model=MODEL, messages=SAID, max_tokens=60, extra_body=COLD, output_config=form
    )
    good_city(answer.content[0].text if answer.content[0].type == "text" else None)


def counted(client: anthropic.Anthropic) -> None:
    few = client.messages.count_tokens(model=MODEL, messages=SAID).input_tokens
    more = client.messages.count_tokens(
        model=MODEL, messages=SAID, system="Be brief.", tools=TOOLS
    ).input_tokens
    answer = client.messages.create(model=MODEL, messages=SAID, max_tokens=1)
    expect(0 < few < more, (few, more))
    expect(
        few == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0), (few, answer.usage)
    )


def listed(client: anthropic.Anthropic) -> None:
    found = list(client.models.list())
    expect([model.id for model in found] == [MODEL] and found[0].created_at.year > 2000, found)


def errors(client: anthropic.Anthropic) -> None:
    create = client.messages.create
    raises(anthropic.NotFoundError, lambda: create(model="other", messages=SAID, max_tokens=1))
    raises(anthropic.BadRequestError, lambda: create(model=MODEL, messages=TOO_LONG, max_tokens=1))
    pictured: Any = [{"role": "user", "content": PICTURE}]
    raises(anthropic.BadRequestError, lambda: create(model=MODEL, messages=pictured, max_tokens=1))
    raises(anthropic.BadRequestError, lambda: create(model=MODEL, messages=SAID, max_tokens=0))


def no_key() -> None:
    raises(
        anthropic.AuthenticationError,
        lambda: tcp("wrong").messages.create(model=MODEL, messages=SAID, max_tokens=1),
    )


def asynchronous() -> None:
    async def ask() -> None:
        async with anthropic.AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY) as client:
            async with client.messages.stream(model=MODEL, messages=SAID, max_tokens=8) as found:
                text = "".join([part async for part in found.text_stream])
        expect(bool(text), text)

    asyncio.run(ask())


if __name__ == "__main__":
    package("anthropic")
    for name, client in (("tcp", tcp()), ("uds", uds())):
        for does in (
            create,
            stream,
            events,
            stopped,
            called,
            call_streamed,
            structured,
            counted,
            listed,
            errors,
        ):
            check(f"{does.__name__} {name}", partial(does, client))
    check("no key", no_key)
    check("async", asynchronous)
