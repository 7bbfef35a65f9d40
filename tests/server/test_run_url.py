"""`hetrun run --url`, and the client beneath it and `chat --url`, of a server with several models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import cli
from hetrun.client import http_client
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import GenerateRequest, ModelInfo
from hetrun.client.http_client import RemoteClient
from hetrun.client.interface import ChatClient, Health
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.client.queries import Layers, PlanNow, Render, StateQuery, Tokenize, TokenizerInfo, WhatIf
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import UserError
from hetrun.server import listen
from hetrun.server.app import create_app
from tests.support.fakes import INFO, FakeEngine

KEY = "sesame"


@asynccontextmanager
async def served(client: ChatClient, key: str | None = None) -> AsyncIterator[str]:
    with listen.listening(listen.ListenAddress(port=0)) as bound:
        async with listen.served(create_app(client, api_key=key), bound):
            yield listen.url(bound)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    """A server in a thread: the command has a loop of its own."""
    found: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with served(LocalClient(engine), KEY) as where:
            found.append(where)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def run(*arguments: str) -> int:
    return cli.exit_code(["run", *arguments])


# --- run


def test_a_server_answers_as_an_engine_here_does(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--url",
        url,
        "--api-key",
        KEY,
        "--system",
        "Be brief.",
        "-n",
        "9",
        "--temp",
        "0.5",
        "--seed",
        "3",
    )
    assert run("say hello world", *options) == 0
    assert capsys.readouterr() == ("hello world\n", "")  # no terminal, no remarks
    [request] = engine.requests
    assert [message["content"] for message in request.messages or ()] == ["Be brief.", "say hello world"]
    assert (request.params.max_tokens, request.params.temperature, request.params.seed) == (9, 0.5, 3)
    assert run("say hello", *options, "-v") == 0
    assert "tokens at" in capsys.readouterr().err


def test_json_of_a_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETRUN_API_KEY", KEY)
    monkeypatch.setenv("HETRUN_URL", url)
    assert run("say hello world", "--json", "--logprobs", "1", "-n", "1") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["text"], said["finish_reason"], said["model"]) == ("hello ", "length", "fake")
    assert (said["tokens"], said["server"]) == (None, url)
    assert said["usage"]["prompt_tokens"] == 7
    assert said["logprobs"][0]["id"] is None
    assert said["logprobs"][0]["token"] == "hello "
    assert run("a b c", "--raw", "-n", "0", "--json", "--prompt-logprobs", "1") == 0
    said = json.loads(capsys.readouterr().out)
    assert [score and score["token"] for score in said["prompt_logprobs"]] == [None, "b ", "c"]


def test_raw_texts_are_continued(url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("say so", "--raw", "--url", url, "--api-key", KEY) == 0
    assert capsys.readouterr().out == "so\n"
    assert engine.requests[0].text == "say so"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "URL"], "Incorrect API key"),
        (["--url", "URL", "--api-key", KEY, "-m", "other"], "has no model other; it has: fake"),
        (["--url", "URL", "--api-key", KEY, "--ram", "1GiB"], "leave out --ram or --url"),
        (["--url", "URL", "--api-key", KEY, "--prompt-logprobs", "1", "--json"], "needs --raw and -n 0"),
        (["--url", "unix:/no/such.sock"], "cannot be reached"),
        (["--url", "ftp://x"], "--url ftp://x must be like"),
        (["--api-key", KEY], "--api-key needs -f or --url"),
        (["--url", "URL", "-f", "-"], "--url cannot be combined with -f: use --workers"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_what_is_wrong_is_one_sentence(
    url: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("hi", *(url if argument == "URL" else argument for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert said in err


def test_an_answer_that_fails_midway_keeps_what_was_written(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fail", "--url", url, "--api-key", KEY) == 2
    out, err = capsys.readouterr()
    assert out == "one two \n"
    assert "the fake backend failed" in err


# --- several models


class Slow(LocalClient):
    """A model that is loaded when it is let."""

    def __init__(self, info: ModelInfo) -> None:
        fake = FakeEngine()
        fake.info = info
        super().__init__(fake)
        self.loaded = asyncio.Event()

    @property
    def health(self) -> Health:
        return super().health if self.loaded.is_set() else Health("loading", 0.5)

    async def info(self) -> ModelInfo:
        await self.loaded.wait()
        return await super().info()


async def test_of_several_models_all_is_said_of_the_chosen_one() -> None:
    asked: list[str] = []

    def start(found: CatalogModel, ram: int | None) -> ChatClient:
        client = Slow(replace(INFO, path=str(found.path), context=1000 if found.name == "a" else 2000))
        client.loaded.set()
        ask = client.ask

        async def noted(question: object) -> object:
            asked.append(found.name)
            return await ask(question)  # type: ignore[arg-type]

        client.ask = noted  # type: ignore[method-assign,assignment]
        return client

    found = [CatalogModel(name, Path(f"/models/{name}.gguf"), 1 << 20) for name in ("a", "b", "c")]
    shelf = ModelPool(found, start, ram=1 << 31)
    async with served(shelf) as url:
        guessing = RemoteClient(url)
        assert (await guessing.info()).context == 0  # nothing is loaded before it is asked
        async with aclosing(guessing.stream(request("say hello"))) as events:
            assert [event.text async for event in events][:1] == ["hello"]
        assert ((await guessing.info()).id, (await guessing.info()).context) == ("a", 1000)
        client = RemoteClient(url, model="b")
        assert (await client.info()).context == 2000
        asked.clear()
        questions = (StateQuery(), Layers(), PlanNow(), TokenizerInfo(), Tokenize("x"), WhatIf({}), RENDER)
        for question in questions:
            await client.ask(question)
        assert set(asked) == {"b"}
        unnamed = RemoteClient(url)
        await unnamed.info()
        assert unnamed.model == "a"  # loaded, as b is
        assert [info.id for info in await unnamed.models()] == ["a", "b", "c"]
        with pytest.raises(UserError, match="has no model d; it has: "):
            await RemoteClient(url, model="d").info()
    await shelf.close()


RENDER = Render(({"role": "user", "content": "x"},))


def request(text: str) -> GenerateRequest:
    return GenerateRequest(SamplingParams(), messages=({"role": "user", "content": text},))


async def test_a_load_on_demand_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "PATIENCE_S", 0.0)
    slow: list[Slow] = []

    def start(found: CatalogModel, ram: int | None) -> ChatClient:
        slow.append(client := Slow(replace(INFO, path=str(found.path))))
        return client

    told: asyncio.Queue[str] = asyncio.Queue()
    shelf = ModelPool([CatalogModel(name, Path(f"/models/{name}.gguf"), 1) for name in ("a", "b")], start)
    async with served(shelf) as url:
        guessing = RemoteClient(url)
        assert (await guessing.info()).id == "a"
        assert guessing.is_guess  # nothing is loaded for that
        assert slow == []
        client = RemoteClient(url, model="b", tell=told.put_nowait)
        async with aclosing(client.stream(request("say hello"))) as events:
            first = asyncio.ensure_future(anext(events))
            assert await told.get() == "loading b ..."
            assert (client.health.status, client.health.reason) == ("loading", "loading b ...")
            while not slow:
                await asyncio.sleep(0.001)
            slow[0].loaded.set()
            assert (await first).text == "hello"
            assert client.health.status == "ok"
        assert told.empty()  # it was told once
        assert (await client.info()).context == 2048  # which was not known before
        assert len(slow) == 1
    await shelf.close()
