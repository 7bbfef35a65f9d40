"""The client of a running server: against our own, over TCP and a Unix socket, and against broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.http_client import RemoteClient
from hetrun.client.queries import (
    Counts,
    Detokenize,
    EngineState,
    Layers,
    Render,
    SetRam,
    Slot,
    StateQuery,
    Tokenize,
    TokenizerInfo,
    WhatIf,
)
from hetrun.client.remote.interface import THINKING, THOUGHT
from hetrun.client.remote.openai_format import read
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError, UserError
from hetrun.server import listen
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine


@asynccontextmanager
async def remote(engine: FakeEngine, place: listen.ListenAddress) -> AsyncIterator[RemoteClient]:
    stop, started = asyncio.Event(), asyncio.Event()
    with listen.listening(place) as bound:
        running = asyncio.create_task(listen.serve(create_app(LocalClient(engine)), bound, stop, started.set))
        await started.wait()
        client = RemoteClient(f"unix:{place.uds}" if place.uds else f"{listen.url(bound)}/v1")
        yield client
        await client.close()
        stop.set()
        await asyncio.wait_for(running, 10)


@pytest.fixture(params=["tcp", "unix"])
async def client(
    request: pytest.FixtureRequest, engine: FakeEngine, tmp_path: Path
) -> AsyncIterator[RemoteClient]:
    place = (
        listen.ListenAddress(port=0)
        if request.param == "tcp"
        else listen.ListenAddress(uds=tmp_path / "hetrun.sock")
    )
    async with remote(engine, place) as found:
        yield found


def asking(text: str, params: SamplingParams | None = None) -> GenerateRequest:
    return GenerateRequest(params or SamplingParams(), messages=({"role": "user", "content": text},))


async def events_of(client: RemoteClient, request: GenerateRequest) -> list[Event]:
    async with aclosing(client.stream(request)) as events:
        return [event async for event in events]


async def test_an_answer_comes_piece_by_piece(client: RemoteClient, engine: FakeEngine) -> None:
    info = await client.info()
    assert (info.id, info.context, info.architecture) == ("fake", 2048, "llama")
    params = SamplingParams(temperature=0.25, top_k=7, stop=("x",), seed=3, max_tokens=9)
    *tokens, last = await events_of(client, asking("say hello world", params))
    assert [event.text for event in tokens] == ["hello ", "world"]
    assert last.kind == "done"
    assert last.finish_reason == "stop"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (7, 2, 3)
    assert last.timings.decode_tok_s > 0
    assert engine.requests[0].params == params


async def test_leaving_stops_the_server_s_answer(client: RemoteClient, engine: FakeEngine) -> None:
    async with aclosing(client.stream(asking("forever"))) as events:
        async for event in events:
            assert event.text == "ha "
            break
    assert await asyncio.to_thread(engine.idle.wait, 5)
    assert engine.cancelled == [1]


async def test_thoughts_come_within_their_marks(client: RemoteClient) -> None:
    found = await events_of(client, asking("say <think>hm</think>so"))
    text = "".join(event.text for event in found)
    assert text in (f"{THINKING}hm{THOUGHT}so", "<think>hm</think>so")


async def test_errors_are_events(client: RemoteClient) -> None:
    [refused] = await events_of(client, asking("refuse"))
    assert refused.kind == "error"
    assert "shorten it" in str(refused.error)
    *_, failed = await events_of(client, asking("fail"))
    assert failed.kind == "error"
    assert "the fake backend failed" in str(failed.error)


async def test_questions_that_the_server_has_routes_for(client: RemoteClient, engine: FakeEngine) -> None:
    assert await client.ask(Tokenize("ab")) == [0, 97, 98]
    assert (await client.ask(Render(({"role": "user", "content": "x"},)))).startswith("[user]x{")
    assert (await client.ask(TokenizerInfo())).template == "{{ messages }}"
    assert (await client.ask(SetRam(5 << 20)))["KV"] == 1000
    state = await client.ask(StateQuery())
    assert state.context == 2048
    assert state.streaming is not None
    assert state.streaming.budget == 5 << 20
    assert [slot.state for slot in state.slots] == ["answer", "waiting"]
    assert state == replace(engine.ask(StateQuery()), at=state.at)
    assert await client.ask(Layers()) == engine.ask(Layers())
    with pytest.raises(UserError, match="does not offer that"):
        await client.ask(Detokenize((1,)))


async def test_what_other_options_would_mean(client: RemoteClient, engine: FakeEngine) -> None:
    changes = {"ctx": "4096", "threads": 1, "kv_type": "q8_0"}
    assert await client.ask(WhatIf(changes)) == engine.ask(WhatIf(changes))
    with pytest.raises(UserError, match="too little"):
        await client.ask(WhatIf({"ram": "1kB"}))
    with pytest.raises(UserError, match="Unrecognized request argument: model_path"):
        await client.ask(WhatIf({"model_path": "/etc"}))
    with pytest.raises(UserError, match="ctx"):
        await client.ask(WhatIf({"ctx": [1]}))


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        (EngineState, {"counts": {}, "slots": [{}]}, "missing"),
        (EngineState, {"counts": [], "slots": []}, "is no Counts"),
        (EngineState, {}, "missing"),
        (Counts, {"requests": {"stop": 1e999}}, "is no int"),
        (Counts, {"steps": 10**400}, "is no int"),
        (Counts, {"step_s": 10.0**300}, "is no float"),
        (Counts, {"step_s": True}, "is no float"),
        (Counts, {"begun": True}, "is no int"),
        (Slot, {"id": 1, "state": "asleep", "seconds": 1}, "asleep"),
    ],
)
def test_what_a_strange_server_says_is_no_state(kind: type, said: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(kind, said)


async def test_more_alternatives_than_servers_give(client: RemoteClient) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=8)
    prompt, _ = await events_of(client, GenerateRequest(params, text="a b c", echo=True))
    assert len(prompt.prompt_logprobs) == 2


async def test_probabilities_of_a_text(client: RemoteClient) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=2)
    prompt, done = await events_of(client, GenerateRequest(params, text="a b c", echo=True))
    assert [score.piece for score in prompt.prompt_logprobs] == [b"b ", b"c"]
    assert prompt.prompt_logprobs[0].top_pieces[:2] == (b"A", b"B")
    assert done.kind == "done"


async def test_no_server_is_there(tmp_path: Path) -> None:
    client = RemoteClient(f"unix:{tmp_path}/none")
    with pytest.raises(UserError, match="cannot be reached"):
        await client.info()
    [event] = await events_of(client, asking("say x"))
    assert "cannot be reached" in str(event.error)


def test_what_is_no_address() -> None:
    with pytest.raises(OptionError, match="--url ftp://x"):
        RemoteClient("ftp://x")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"nonsense\r\n\r\n", "closed the connection"),
        (b"", "closed the connection"),
        (HEAD, "closed the connection in the middle"),
        (HEAD + b"data: {\n\n", "not a JSON object"),
        (HEAD + b"data: [1]\n\n", "not a JSON object"),
        (HEAD + b'data: {"error": {"message": "it burns"}}\n\n', "it burns"),
        (
            HEAD + b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n',
            "closed the connection in the middle",
        ),
        (HEAD + b"x" * (5 << 20), "an endless line"),
        (b"HTTP/1.1 418 No\r\nContent-Length: 21\r\n\r\n" + b'{"error": "a teapot"}', "a teapot"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
    ],
    ids=range(10),
)
async def test_a_broken_server_is_an_error(tmp_path: Path, answer: bytes, said: str) -> None:
    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readuntil(b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "m"}]}'
        listed = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(listed if first.startswith(b"GET") else answer)
        writer.close()

    path = str(tmp_path / "socket")
    async with await asyncio.start_unix_server(met, path):
        *_, last = await events_of(RemoteClient(f"unix:{path}"), asking("say x"))
    assert last.kind == "error"
    assert said in str(last.error)
    assert len(str(last.error)) < 700
