"""The client of servers that have Ollama's or Anthropic's API: scripted ones that answer like real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from hetrun import cli
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.http_client import RemoteClient
from hetrun.client.queries import StateQuery
from hetrun.client.remote.interface import THINKING, THOUGHT
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError, UserError
from hetrun.server import listen
from hetrun.server.app import create_app
from tests.support.fakes import FakeEngine

Json = dict[str, Any]


class Scripted:
    """A server with an answer for each route: an object, or the bytes of a stream. Others are 404, with a
    body that is no JSON, as Ollama's router says it."""

    def __init__(self, routes: Mapping[str, tuple[int, object]]) -> None:
        self.routes = routes
        self.asked: list[tuple[str, dict[str, str], Any]] = []

    def bodies(self, route: str) -> list[Any]:
        return [body for asked, _, body in self.asked if asked == route]

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.splitlines()
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split()
        route = f"{method} {path.partition('?')[0]}"
        self.asked.append((route, headers, json.loads(body) if body else None))
        status, said = self.routes.get(route, (404, b"404 page not found"))
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(routes: Mapping[str, tuple[int, object]], place: Path) -> AsyncIterator[Scripted]:
    server = Scripted(routes)
    async with await asyncio.start_unix_server(server.meet, str(place)):
        yield server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "s"


def asking(*texts: str, **more: object) -> GenerateRequest:
    roles = ("system", "user", "assistant", "user") if len(texts) > 1 else ("user",)
    messages = tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=False))
    options = cast(Json, more.pop("template_options", {}))
    params = SamplingParams.from_mapping(more)
    return GenerateRequest(params, messages=messages, template_options=options)


async def events_of(client: RemoteClient, request: GenerateRequest) -> list[Event]:
    async with aclosing(client.stream(request)) as events:
        return [event async for event in events]


def lines(*objects: Json) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in objects)


# --- Ollama


def part(thinking: str = "", content: str = "") -> Json:
    message = {"role": "assistant", "content": content} | ({"thinking": thinking} if thinking else {})
    return {"model": "qwen3:8b", "created_at": "2026-07-01T10:00:00Z", "message": message, "done": False}


ENDED = {
    "done": True,
    "done_reason": "length",
    "total_duration": 5_000_000_000,
    "load_duration": 1_000_000,
    "prompt_eval_count": 20,
    "prompt_eval_duration": 500_000_000,
    "eval_count": 30,
    "eval_duration": 2_000_000_000,
}
TAGS = {
    "models": [
        {"name": name, "model": name, "size": size, "digest": "sha256:0", "details": {"family": "qwen3"}}
        for name, size in (("llama3.2:1b", 1 << 30), ("qwen3:8b", 5 << 30))
    ]
}
OLLAMA: dict[str, tuple[int, object]] = {
    "GET /api/version": (200, {"version": "0.13.1"}),
    "GET /api/tags": (200, TAGS),
    "GET /api/ps": (200, {"models": [{"name": "qwen3:8b", "model": "qwen3:8b", "context_length": 4096}]}),
    "POST /api/show": (
        200,
        {
            "model_info": {
                "general.architecture": "qwen3",
                "general.parameter_count": 8_000_000_000,
                "qwen3.context_length": 40960,
            },
            "capabilities": ["completion", "tools", "thinking"],
        },
    ),
    "POST /api/chat": (
        200,
        lines(part("h"), part("m"), part(content="Hel"), part(content="lo"), part() | ENDED),
    ),
    "POST /api/generate": (200, lines({"response": "so", "done": False}, {"response": "", **ENDED})),
}


async def test_ollama_is_recognised_and_answers(place: Path) -> None:
    async with serving(OLLAMA, place) as server:
        client = RemoteClient(f"unix:{place}", api_key="k")
        info = await client.info()
        assert (info.id, info.context, info.architecture) == (
            "qwen3:8b",
            4096,
            "qwen3",
        )  # the one that is loaded
        assert (info.parameters, info.file_bytes) == (8_000_000_000, 5 << 30)
        assert [model.id for model in await client.models()] == ["qwen3:8b", "llama3.2:1b"]
        request = asking(
            *("Be brief.", "hi", "ho", "again"),
            **{"max_tokens": 9, "temperature": 0.5, "seed": 3, "stop": ("x",), "top_k": 7},
            template_options={"enable_thinking": True},
        )
        *tokens, last = await events_of(client, request)
        assert "".join(event.text for event in tokens) == f"{THINKING}hm{THOUGHT}Hello"
        assert (last.kind, last.finish_reason) == ("done", "length")
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 30)
        assert (last.timings.prompt_tok_s, last.timings.decode_tok_s) == (40.0, 15.0)
        [body] = server.bodies("POST /api/chat")
        assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
        options = {"num_predict": 9, "temperature": 0.5, "seed": 3, "stop": ["x"], "top_k": 7}
        assert (body["model"], body["options"], body["think"]) == ("qwen3:8b", options, True)
        assert server.asked[-1][1]["authorization"] == "Bearer k"
        [text, _] = await events_of(client, GenerateRequest(SamplingParams(), text="say"))
        assert text.text == "so"
        assert server.bodies("POST /api/generate")[0]["raw"] is True
        with pytest.raises(UserError, match="does not offer that in Ollama's API"):
            await client.ask(StateQuery())


async def test_a_model_that_ollama_has_not_loaded_is_not_asked_for_by_routes_of_others(place: Path) -> None:
    async with serving(OLLAMA, place) as server:
        client = RemoteClient(f"unix:{place}", model="llama3.2:1b")
        assert (await client.info()).context == 40960
        assert {"GET /props", "POST /api/chat"}.isdisjoint(route for route, _, _ in server.asked)
        with pytest.raises(UserError, match=r"has no model mistral; it has: qwen3:8b, llama3\.2:1b"):
            await RemoteClient(f"unix:{place}", model="mistral").info()
    async with serving(OLLAMA | {"GET /api/ps": (200, {"models": []})}, place.with_name("t")) as server:
        client = RemoteClient(f"unix:{place.with_name('t')}")
        await client.info()
        assert client.is_guess


async def test_the_tag_latest_may_be_left_out(place: Path) -> None:
    tags = {"models": [{"name": "llama3.2:latest"}, {"name": "tiny:latest"}]}
    async with serving(OLLAMA | {"GET /api/tags": (200, tags)}, place):
        assert (await RemoteClient(f"unix:{place}", model="tiny").info()).id == "tiny:latest"


async def test_errors_of_ollama_are_sentences(place: Path) -> None:
    refused = OLLAMA | {
        "POST /api/chat": (404, {"error": 'model "qwen3:8b" not found, try pulling it first'})
    }
    async with serving(refused, place):
        [event] = await events_of(RemoteClient(f"unix:{place}"), asking("hi"))
        assert "try pulling it first" in str(event.error)
        unknown = asking("hi", grammar='root ::= "x"')
        [event] = await events_of(RemoteClient(f"unix:{place}"), unknown)
        assert str(event.error) == "Ollama's API has no grammar: leave out --grammar"
    broken = OLLAMA | {
        "POST /api/chat": (200, lines(part(content="Hel"), {"error": "an error was encountered"}))
    }
    async with serving(broken, place.with_name("t")):
        text, event = await events_of(RemoteClient(f"unix:{place.with_name('t')}"), asking("hi"))
        assert (text.text, "an error was encountered" in str(event.error)) == ("Hel", True)
    cut = OLLAMA | {"POST /api/chat": (200, lines(part(content="Hel")))}
    async with serving(cut, place.with_name("u")):
        _, event = await events_of(RemoteClient(f"unix:{place.with_name('u')}"), asking("hi"))
        assert "in the middle of its answer" in str(event.error)


# --- Anthropic


def events(*objects: Json) -> bytes:
    return b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in objects)


def delta(index: int, kind: str, **more: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}


def failed(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


CLAUDE = {
    "type": "model",
    "id": "claude-small",
    "display_name": "Claude Small",
    "created_at": "2026-01-01T00:00:00Z",
    "max_input_tokens": 200_000,
    "max_tokens": 6000,
}
USAGE = {
    "input_tokens": 5,
    "cache_read_input_tokens": 7,
    "cache_creation_input_tokens": 8,
    "output_tokens": 1,
}
ANSWER = events(
    {"type": "message_start", "message": {"id": "msg_1", "role": "assistant", "content": [], "usage": USAGE}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "ping"},
    delta(0, "thinking_delta", thinking="hm"),
    delta(0, "signature_delta", signature="abc"),
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    delta(1, "text_delta", text="Hel"),
    delta(1, "text_delta", text="lo"),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"output_tokens": 12},
    },
    {"type": "message_stop"},
)
ANTHROPIC: dict[str, tuple[int, object]] = {
    "GET /v1/models": (200, {"data": [CLAUDE], "has_more": False, "first_id": "x", "last_id": "x"}),
    "POST /v1/messages": (200, ANSWER),
}


async def test_anthropic_is_recognised_and_answers(place: Path) -> None:
    async with serving(ANTHROPIC, place) as server:
        client = RemoteClient(f"unix:{place}", api_key="k")
        info = await client.info()
        assert (info.id, info.context, info.name) == ("claude-small", 200_000, "Claude Small")
        request = asking(
            *("Be brief.", "hi", "ho", "again"), **{"temperature": 0.5, "seed": 3, "stop": "x", "top_k": 7}
        )
        *tokens, last = await events_of(client, request)
        assert "".join(event.text for event in tokens) == f"{THINKING}hm{THOUGHT}Hello"
        assert (last.kind, last.finish_reason) == ("done", "length")
        usage = last.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 12, 7)
        assert last.timings.decode_tok_s > 0
        _, headers, body = server.asked[-1]
        assert (headers["x-api-key"], headers["anthropic-version"]) == ("k", "2023-06-01")
        assert "authorization" not in headers
        assert body == {
            "model": "claude-small",
            "stream": True,
            "max_tokens": 6000,
            "system": "Be brief.",
            "temperature": 0.5,
            "top_k": 7,
            "stop_sequences": ["x"],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "ho"},
                {"role": "user", "content": "again"},
            ],
        }


@pytest.mark.parametrize(
    ("options", "limit", "thinking"),
    [
        ({"enable_thinking": True}, 4000, {"type": "enabled", "budget_tokens": 2000}),
        ({"enable_thinking": True}, 100, {"type": "disabled"}),
        ({"enable_thinking": False}, 4000, {"type": "disabled"}),
        ({}, 4000, None),
    ],
)
async def test_reasoning_is_asked_for_within_the_limit(
    options: Json, limit: int, thinking: Json | None, place: Path
) -> None:
    async with serving(ANTHROPIC, place) as server:
        await events_of(
            RemoteClient(f"unix:{place}"), asking("hi", max_tokens=limit, template_options=options)
        )
        [body] = server.bodies("POST /v1/messages")
        assert (body["max_tokens"], body.get("thinking")) == (limit, thinking)


async def test_errors_of_anthropic_are_sentences(place: Path) -> None:
    no_key = ANTHROPIC | {
        "GET /v1/models": (401, failed("authentication_error", "x-api-key header is required"))
    }
    async with serving(no_key, place):
        with pytest.raises(UserError, match="x-api-key header is required; give its key with --api-key"):
            await RemoteClient(f"unix:{place}").info()
    late = ANTHROPIC | {
        "POST /v1/messages": (
            200,
            events(delta(0, "text_delta", text="Hel"), failed("overloaded_error", "Overloaded")),
        )
    }
    async with serving(late, place.with_name("t")):
        client = RemoteClient(f"unix:{place.with_name('t')}")
        text, event = await events_of(client, asking("hi"))
        assert (text.text, "Overloaded" in str(event.error)) == ("Hel", True)
        [event] = await events_of(client, GenerateRequest(SamplingParams(), text="say"))
        assert isinstance(event.error, OptionError)
        assert "answers messages only: leave out --raw" in str(event.error)


async def test_a_gateway_without_a_list_needs_the_name_of_a_model(place: Path) -> None:
    routes: dict[str, tuple[int, object]] = {
        "POST /v1/messages": (400, failed("invalid_request_error", "model: Field required"))
    }
    async with serving(routes, place):
        with pytest.raises(UserError, match="name the model with -m"):
            await RemoteClient(f"unix:{place}").info()
    async with serving({"POST /v1/messages": (200, ANSWER)}, place.with_name("t")) as server:
        client = RemoteClient(f"unix:{place.with_name('t')}", model="glm", api="anthropic")
        assert (await events_of(client, asking("hi")))[-1].finish_reason == "length"
        assert server.bodies("POST /v1/messages")[0]["model"] == "glm"


# --- which one


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({}, "status 404"),
        ({"GET /v1/models": (401, {"error": {"message": "Incorrect API key"}})}, "Incorrect API key"),
        ({"GET /v1/models": (500, {"error": "it burns"})}, "it burns"),
    ],
)
async def test_a_server_with_none_of_them_says_its_error(
    routes: Mapping[str, tuple[int, object]], said: str, place: Path
) -> None:
    async with serving(routes, place):
        with pytest.raises(UserError, match=said):
            await RemoteClient(f"unix:{place}").info()


async def test_an_api_that_is_named_is_not_looked_for(place: Path) -> None:
    both: dict[str, tuple[int, object]] = {
        **OLLAMA,
        "GET /v1/models": (200, {"object": "list", "data": [{"id": "qwen3:8b", "object": "model"}]}),
    }
    async with serving(both, place) as server:
        assert (await RemoteClient(f"unix:{place}").info()).context == 0  # OpenAI's list does not say it
        assert not [route for route, _, _ in server.asked if "/api/" in route]
        server.asked.clear()
        assert (await RemoteClient(f"unix:{place}", api="ollama").info()).context == 4096
        assert "GET /v1/models" not in [route for route, _, _ in server.asked]


async def test_a_server_of_hetrun_s_is_asked_in_its_own_api(engine: FakeEngine, place: Path) -> None:
    with listen.listening(listen.ListenAddress(uds=place)) as bound:
        async with listen.served(create_app(LocalClient(engine)), bound):
            client = RemoteClient(f"unix:{place}")
            assert (await client.info()).id == "fake"
            assert (await client.ask(StateQuery())).context == 2048


def run(routes: Mapping[str, tuple[int, object]], place: Path, *arguments: str) -> tuple[int, Scripted]:
    """The command, against a scripted server in another thread."""

    async def both() -> tuple[int, Scripted]:
        async with serving(routes, place) as server:
            command = ["run", "hi", "--url", f"unix:{place}", *arguments]
            return await asyncio.to_thread(cli.exit_code, command), server

    return asyncio.run(both())


@pytest.mark.parametrize("arguments", [(), ("--api", "ollama")])
def test_run_with_ollama(arguments: Sequence[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, server = run(OLLAMA, place, "--seed", "5", "--json", *arguments)
    said = json.loads(capsys.readouterr().out)
    assert (code, said["model"], said["usage"]["completion_tokens"]) == (0, "qwen3:8b", 30)
    assert said["text"].endswith("Hello")
    assert server.bodies("POST /api/chat")[0]["options"] == {"seed": 5}


def test_run_with_anthropic(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(ANTHROPIC, place, "--api-key", "k", "-n", "50")
    assert code == 0
    assert capsys.readouterr().out.endswith("Hello\n")


def test_api_needs_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.exit_code(["run", "hi", "--api", "ollama"]) == 2
    assert "--api needs --url" in capsys.readouterr().err
