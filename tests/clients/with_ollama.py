"""Ollama's own library for Python, whole and streamed, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import ollama

from tests.clients.checks import (
    KEY,
    MESSAGES,
    MODEL,
    SCHEMA,
    SEEING_URL,
    SEEN,
    TOO_LONG,
    TOOL,
    URL,
    check,
    expect,
    good_city,
    package,
)

HOST = URL.removesuffix("/v1")
HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(HOST, headers=HEADERS)
SHORT: Any = {"num_predict": 8}
LONG: Any = {"num_predict": 60, "temperature": 0}


def refuses(status: int, does: Callable[[], object], words: str = "") -> None:
    """It raises the library's error with this status, and a sentence."""
    try:
        does()
    except ollama.ResponseError as error:
        expect(error.status_code == status and words in error.error, (error.status_code, error.error))
        expect(not error.error.startswith("{"), error.error)
        return
    raise AssertionError("no ResponseError")


def listed() -> None:
    (model,) = client.list().models
    expect(model.model == f"{MODEL}:latest" and bool(model.digest and model.modified_at), model)
    expect(model.details is not None and model.details.family == "llama", model)


def pictures() -> None:
    there = ollama.Client(SEEING_URL.removesuffix("/v1"), headers=HEADERS)
    expect("vision" in (there.show(SEEN["model"]).capabilities or []), there.show(SEEN["model"]).capabilities)
    file = base64.b64decode(SEEN["picture"])
    for image in (SEEN["picture"], file):
        message: Any = {"role": "user", "content": SEEN["question"], "images": [image]}
        answer = there.chat(SEEN["model"], [message], options={"num_predict": 8, "temperature": 0})
        expect(answer.prompt_eval_count == SEEN["tokens"] and bool(answer.message.content), answer)
    prompt = there.generate(SEEN["model"], SEEN["question"], images=[file], options={"num_predict": 8})
    expect(prompt.prompt_eval_count == SEEN["tokens"], prompt)


def shown() -> None:
    found = client.show(f"{MODEL}:latest")
    expect(found.capabilities is not None and "completion" in found.capabilities, found)
    info = found.modelinfo or {}
    expect(info[f"{info['general.architecture']}.context_length"] > 0, info)


def running() -> None:
    (model,) = client.ps().models
    expect(model.name == f"{MODEL}:latest" and bool(model.size and model.expires_at), model)


def chatted() -> None:
    answer = client.chat(MODEL, MESSAGES, options=SHORT, keep_alive="10m")
    expect(bool(answer.message.content) and answer.done is True, answer)
    counts = (answer.eval_count, answer.prompt_eval_count, answer.total_duration)
    expect(all(count and count > 0 for count in counts), answer)


def streamed() -> None:
    parts = list(client.chat(MODEL, MESSAGES, options=SHORT, stream=True))
    expect(bool("".join(part.message.content or "" for part in parts)), parts)
    expect([part.done for part in parts] == [False] * (len(parts) - 1) + [True], parts)
    expect(parts[-1].done_reason in ("stop", "length"), parts[-1])


def with_tools() -> None:
    """The model may call or not; what comes is what the library's types say."""
    answer = client.chat(MODEL, MESSAGES, tools=[TOOL], options=LONG)
    for call in answer.message.tool_calls or ():
        expect(isinstance(call.function.arguments, dict), call)
    call = {"function": {"name": "look_up", "arguments": {"city": "Rome", "number": 1}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It is old.", "tool_name": "look_up"},
    ]
    expect(client.chat(MODEL, history, tools=[TOOL], options=SHORT).done is True, history)


def left() -> None:
    for part in client.chat(MODEL, MESSAGES, options={"num_predict": 500}, stream=True):
        if part.message.content:
            break


def formatted() -> None:
    good_city(client.chat(MODEL, MESSAGES, format=SCHEMA, options=LONG).message.content)
    answer = client.generate(
        MODEL, "Say hello in JSON.", format="json", options={"num_predict": 40, "seed": 3}
    )
    if answer.done_reason == "stop":
        expect(isinstance(json.loads(answer.response or ""), dict), answer)


def thinking() -> None:
    refuses(400, lambda: client.chat(MODEL, MESSAGES, think=True), "does not support thinking")
    expect(bool(client.chat(MODEL, MESSAGES, think=False, options=SHORT).message.content), "")


def generated() -> None:
    answer = client.generate(MODEL, "Say hello.", system="Be brief.", options=SHORT)
    expect(bool(answer.response), answer)
    parts = list(client.generate(MODEL, "One, two,", raw=True, options=SHORT, stream=True, logprobs=True))
    expect(bool("".join(part.response or "" for part in parts)), parts)
    expect(bool(parts[0].logprobs), parts[0])


def loaded() -> None:
    expect(client.generate(MODEL, keep_alive=0).done_reason == "unload", "")
    expect(not client.ps().models, client.ps())
    expect(client.generate(MODEL).done_reason == "load", "")
    expect(len(client.ps().models) == 1, client.ps())


def embedded() -> None:
    answer = client.embed(MODEL, ["one", "two"], dimensions=100)
    expect([len(vector) for vector in answer.embeddings] == [100, 100], answer)
    expect(len(client.embeddings(MODEL, "one").embedding) > 100, "")


def pulled() -> None:
    expect(client.pull(MODEL).status == "success", "")  # it is here
    refuses(400, lambda: client.pull("llama3.2"), "Hugging Face's hub")
    last = list(client.pull(MODEL, stream=True))[-1]
    expect(last.status == "success", last)


def refused() -> None:
    refuses(404, lambda: client.delete("nowhere"), "not found")
    refuses(501, lambda: client.copy(MODEL, "other"))
    refuses(501, lambda: client.create("other", from_=MODEL))
    refuses(400, lambda: client.chat(MODEL, MESSAGES, options={"temperature": -1}), "temperature")
    refuses(400, lambda: client.chat(MODEL, TOO_LONG), "context")
    refuses(404, lambda: client.chat("nowhere", MESSAGES), "not found")
    refuses(401, lambda: ollama.Client(HOST, headers={"Authorization": "Bearer wrong"}).list(), "key")


async def _asynchronous() -> None:
    other = ollama.AsyncClient(HOST, headers=HEADERS)
    expect(len((await other.list()).models) == 1, "")
    answers = await asyncio.gather(*(other.chat(MODEL, MESSAGES, options=SHORT) for _ in range(3)))
    expect(all(answer.message.content for answer in answers), answers)
    parts = [part async for part in await other.chat(MODEL, MESSAGES, options=SHORT, stream=True)]
    expect(parts[-1].done is True, parts)
    expect(len((await other.embed(MODEL, "one")).embeddings) == 1, "")


if __name__ == "__main__":
    package("ollama")
    check("list", listed)
    check("show", shown)
    check("chat", chatted)
    check("ps", running)
    check("stream", streamed)
    check("pictures", pictures)
    check("tools", with_tools)
    check("leave", left)
    check("structured", formatted)
    check("think", thinking)
    check("generate", generated)
    check("load", loaded)
    check("embed", embedded)
    check("pull", pulled)
    check("refused", refused)
    check("async", lambda: asyncio.run(_asynchronous()))
