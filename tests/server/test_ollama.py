"""Ollama's API: what its clients send, what they read, and the shape of errors."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from hetrun import __version__
from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.errors import ContextFull, UserError
from hetrun.server import body as bodies
from hetrun.server.app import create_app
from hetrun.server.library import ModelFacts, NotHere, NotOurs, Progress, RemovableModel
from hetrun.server.ollama.models import OLLAMA_VERSION
from hetrun.server.ollama.options import keep_alive_s
from tests.clients import editors
from tests.server.test_openapi import validator
from tests.server.test_tools import BOTH, CALL, TOOLS
from tests.support.fakes import INFO, FakeEngine

GIB = 1 << 30
FACTS = ModelFacts(
    "llama",
    "gguf",
    134_515_008,
    "Q8_0",
    8192,
    {
        "general.architecture": "llama",
        "general.basename": "Fake",
        "general.name": "hidden",
        "llama.rope": [1, 2],
    },
    "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages }}<think></think>",
    takes_tools=True,
    fills=False,
    embeds=False,
)


def chat(content: str = "say hello world", **more: object) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "stream": False} | more


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def said(response: httpx.Response, status: int) -> str:
    """The text of an error."""
    assert response.status_code == status, response.text
    validator("OllamaError").validate(response.json())
    assert set(response.json()) == {"error"}
    text = response.json()["error"]
    assert isinstance(text, str)
    return text


@dataclass
class Shelves:
    """A library whose files are only told of."""

    has: dict[str, Path] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    steps: Callable[[Progress], None] = lambda progress: None  # of a download
    facts_of: dict[str, ModelFacts] = field(default_factory=dict)

    def facts(self, model: Path) -> ModelFacts:
        if model.stem in self.facts_of:
            return self.facts_of[model.stem]
        raise UserError(f"{model} cannot be read")

    def known(self, name: str) -> str:
        return name.replace("hf.co/", "hf:")

    def check_pull(self, name: str) -> None:
        if "/" not in name:
            raise UserError(f"{name} is not on the hub")

    def pull(self, name: str, progress: Progress) -> CatalogModel:
        self.steps(progress)
        return CatalogModel(self.known(name), Path(f"/cache/{name}.gguf"), 5)

    def removal(self, name: str) -> RemovableModel:
        if name.startswith("ollama:"):
            raise NotOurs("remove it with ollama rm")
        if name not in self.has:
            raise NotHere("there is none")
        return RemovableModel(name, (self.has[name],))

    def remove(self, what: RemovableModel) -> None:
        self.removed.append(what.name)


def started(found: CatalogModel, ram: int | None) -> ChatClient:
    fake = FakeEngine()
    fake.info = replace(INFO, path=str(found.path), name=f"{found.name} by Nemo")
    return LocalClient(fake)


@pytest.fixture
def library() -> Shelves:
    return Shelves()


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[ModelPool]:
    models = []
    for name in ("large", "small"):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(name.encode())
        models.append(CatalogModel(name, path, GIB))
    found = ModelPool(models, started, ram=3 * GIB)
    yield found
    await found.close()


@pytest.fixture
async def several(shelf: ModelPool, library: Shelves) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(shelf, library=library))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


# --- what editors ask first


async def test_versions(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/version")).json() == {"version": OLLAMA_VERSION, "hetrun": __version__}
    for path in ("/", "/api/version", "/api/tags"):
        answer = await http.head(path)
        assert (answer.status_code, answer.text) == (200, "")


async def test_a_single_model(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/api/tags")).json()
    validator("OllamaModels").validate(listed)
    (model,) = listed["models"]
    assert (model["name"], model["model"], model["size"]) == ("fake:latest", "fake:latest", INFO.file_bytes)
    assert model["details"]["family"] == "llama"
    assert model["details"]["parameter_size"] == "135M"
    assert len(model["digest"]) == 64
    assert datetime.fromisoformat(model["modified_at"]).tzinfo
    for asked in ({"model": "fake:latest"}, {"name": "fake"}, {"model": "fake.gguf", "verbose": True}):
        shown = (await http.post("/api/show", json=asked)).json()
        validator("OllamaModel").validate(shown)
        assert shown["template"] == "{{ messages }}"
        assert shown["capabilities"] == ["completion"]
        assert shown["parameters"] == f"{'num_ctx':<30} 2048"
        info = shown["model_info"]
        assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 2048)
    running = (await http.get("/api/ps")).json()
    validator("OllamaLoadedModels").validate(running)
    (one,) = running["models"]
    assert (one["name"], one["context_length"], one["size"]) == ("fake:latest", 2048, 200 << 20)
    assert datetime.fromisoformat(one["expires_at"]).year > 2300  # never


async def test_models_are_described_without_loading_them(
    several: httpx.AsyncClient, library: Shelves, shelf: ModelPool
) -> None:
    library.facts_of = {"small": FACTS, "large": replace(FACTS, template="", takes_tools=False, embeds=True)}
    _large, small = (await several.get("/api/tags")).json()["models"]
    assert (small["name"], small["details"]["quantization_level"]) == ("small:latest", "Q8_0")
    assert small["details"]["parameter_size"] == "134.52M"
    shown = (await several.post("/api/show", json={"model": "small:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == FACTS.template
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.basename": "Fake",
        "general.parameter_count": 134_515_008,
        "llama.context_length": 8192,
        "llama.rope": [1, 2],
    }
    copilot = {"User-Agent": "GitHubCopilotChat/0.30"}  # which shows this name in its list
    shown = (await several.post("/api/show", json={"model": "small"}, headers=copilot)).json()
    assert shown["model_info"]["general.basename"] == "small:latest"
    shown = (await several.post("/api/show", json={"model": "large"})).json()
    assert shown["capabilities"] == ["embedding"]
    assert not shelf.loaded
    assert (await several.get("/api/ps")).json() == {"models": []}


async def test_facts_are_read_again_when_the_file_changes(
    several: httpx.AsyncClient, library: Shelves, shelf: ModelPool
) -> None:
    library.facts_of = {"small": FACTS, "large": FACTS}
    first = {model["name"]: model for model in (await several.get("/api/tags")).json()["models"]}
    library.facts_of["small"] = replace(FACTS, quantization="Q4_0")
    shelf.models["small"].found.path.write_bytes(b"something longer")
    second = {model["name"]: model for model in (await several.get("/api/tags")).json()["models"]}
    assert first["large:latest"] == second["large:latest"]
    assert second["small:latest"]["details"]["quantization_level"] == "Q4_0"
    assert first["small:latest"]["digest"] != second["small:latest"]["digest"]


async def test_names_of_models(several: httpx.AsyncClient, engine: FakeEngine) -> None:
    for name in ("small", "small:latest", "small.gguf"):
        answer = (await several.post("/api/chat", json=chat(model=name))).json()
        assert (answer["model"], answer["message"]["content"]) == (name, "hello world")
        listed = await several.post("/v1/chat/completions", json=chat(model=name))
        assert listed.json()["model"] == "small"  # editors send the listed name to OpenAI's API, too
    text = said(await several.post("/api/chat", json=chat(model="medium:7b")), 404)
    assert text == "model 'medium:7b' not found: this server has large:latest, small:latest"
    assert said(await several.post("/api/show", json={"model": "medium"}), 404)
    strict = create_app(LocalClient(engine), strict=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(strict), base_url="http://test") as client:
        assert said(await client.post("/api/chat", json=chat(model="other")), 404)
        assert (await client.post("/api/chat", json=chat(model="fake:latest"))).status_code == 200


@pytest.mark.parametrize("editor", editors.editors(), ids=lambda editor: str(editor["name"]))
def test_what_editors_read_is_there(
    engine: FakeEngine, library: Shelves, editor: editors.Editor, tmp_path: Path
) -> None:
    (tmp_path / "fake.gguf").touch()
    engine.info = replace(engine.info, path=str(tmp_path / "fake.gguf"))
    library.facts_of = {"fake": FACTS}
    app = create_app(LocalClient(engine), library=library)
    with TestClient(app) as client:

        def send(asked: editors.Asked) -> str:
            method, path = asked.request["method"], asked.request["path"]
            answer = client.request(method, path, content=asked.body, headers=asked.headers)
            assert answer.status_code == 200, answer.text
            return answer.text

        assert editors.replay(editor, send) > 0


# --- chat


async def test_a_whole_answer(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/api/chat", json=chat(model="any:thing"))).json()
    validator("OllamaChatAnswer").validate(answer)
    assert answer["message"] == {"role": "assistant", "content": "hello world"}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("any:thing", True, "stop")
    assert datetime.fromisoformat(answer["created_at"]).tzinfo == UTC
    assert (answer["prompt_eval_count"], answer["eval_count"], answer["load_duration"]) == (7, 2, 0)
    assert answer["prompt_eval_duration"] == 4 * 10**9 // 800  # the other three were cached
    assert answer["eval_duration"] == 10**9 // 150  # from the first token on
    assert 0 < answer["total_duration"] < 60 * 10**9


async def test_an_answer_is_streamed_unless_the_client_says_otherwise(http: httpx.AsyncClient) -> None:
    for stream in ({}, {"stream": None}, {"stream": True}):
        asked = {name: value for name, value in chat().items() if name != "stream"} | stream
        *parts, last = lines(await http.post("/api/chat", json=asked))
        assert [part["message"]["content"] for part in parts] == ["hello ", "world"]
        assert all(part["done"] is False and part["model"] == "fake" for part in parts)
        assert last["message"] == {"role": "assistant", "content": ""}
        assert last["done"] is True
        assert last["done_reason"] == "stop"
        assert last["eval_count"] == 2
        for part in (*parts, last):
            validator("OllamaChatAnswer").validate(part)


async def test_options(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 30.0,  # as languages without integers write it
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "seed": 7,
        "stop": ["\n"],
        "num_predict": 1,
    }
    ignored = {"num_ctx": 4096, "num_gpu": -1, "num_thread": 8, "use_mmap": True, "tfs_z": 1.0, "num_keep": 4}
    answer = await http.post(
        "/api/chat", json=chat(options=options | ignored | {"unheard_of": 1, "stop": None})
    )
    assert answer.json()["done_reason"] == "length"
    assert answer.json()["message"]["content"] == "hello "
    params = engine.requests[-1].params
    assert params.max_tokens == 1
    assert params.stop == ()
    for name, value in options.items():
        if name not in ("num_predict", "stop"):
            assert getattr(params, name) == value, name
    await http.post("/api/chat", json=chat(options=options))
    assert engine.requests[-1].params.stop == ("\n",)
    for limit in (0, -1, -2):
        await http.post("/api/chat", json=chat(options={"num_predict": limit, "seed": -7}))
        params = engine.requests[-1].params
        assert (params.max_tokens, params.seed, params.temperature) == (None, None, 0.8)
    engine.info = replace(engine.info, temperature=0.6)  # the file's recommendation
    await http.post("/api/chat", json=chat())
    assert engine.requests[-1].params.temperature == 0.6


async def test_strict_servers_know_all_options(engine: FakeEngine) -> None:
    strict = create_app(LocalClient(engine), strict=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(strict), base_url="http://test") as client:
        for path, wrong in (
            ("/api/chat", chat(options={"num_predcit": 5})),
            ("/api/chat", chat(massages=[])),
            ("/api/embed", {"input": "a", "options": {"num_predcit": 5}}),
        ):
            assert (
                "num_predict" in (text := said(await client.post(path, json=wrong), 400))
                or "messages" in text
            )
        fine = chat(options={"num_ctx": 5, "num_predict": 5}, keep_alive=-1, think=False, truncate=True)
        assert (await client.post("/api/chat", json=fine)).status_code == 200


async def test_calls_have_their_arguments_as_objects(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = chat(f"say {BOTH}", tools=TOOLS)
    whole = (await http.post("/api/chat", json=asked)).json()
    validator("OllamaChatAnswer").validate(whole)
    assert (whole["message"]["content"], whole["done_reason"]) == ("Let me look.", "stop")
    *parts, last = lines(await http.post("/api/chat", json=asked | {"stream": True}))
    streamed = [call for part in parts for call in part["message"].get("tool_calls", [])]
    for calls in (whole["message"]["tool_calls"], streamed):
        assert [call["function"] for call in calls] == [
            {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
            {"index": 1, "name": "now", "arguments": {}},
        ]
        assert len({call["id"] for call in calls}) == 2
    assert "".join(part["message"]["content"] for part in parts) == "Let me look."
    assert engine.requests[0].tools == tuple(TOOLS)
    assert last["message"] == {"role": "assistant", "content": ""}


async def test_a_call_that_was_cut_off_is_text(http: httpx.AsyncClient) -> None:
    begun = CALL.partition('"Oslo')[0].replace(" ", "")
    answer = (await http.post("/api/chat", json=chat(f"say {begun}", tools=TOOLS))).json()
    assert "tool_calls" not in answer["message"]
    assert '"city"' in answer["message"]["content"]


async def test_results_of_calls_find_their_calls(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"function": {"name": "now", "arguments": {}}}
    other = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    history = [
        {"role": "User", "content": "what time is it?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, other, call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "later", "name": "now"},
        {"role": "assistant", "tool_calls": [other | {"id": "call_x"}]},
        {"role": "tool", "content": "sun", "tool_call_id": "call_x"},
        {"role": "user", "content": "say thanks"},
    ]
    answer = await http.post("/api/chat", json=chat() | {"messages": history})
    assert answer.status_code == 200
    messages: Any = engine.requests[-1].messages
    first, second, third = (one["id"] for one in messages[1]["tool_calls"])
    assert len({first, second, third}) == 3
    assert all(len(i) == 9 and i.isalnum() for i in (first, second))
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == [second, first, third, "call_x"]
    assert messages[0] == {"role": "user", "content": "what time is it?"}
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][1]["function"]["arguments"] == {"city": "Oslo"}


async def test_thinking(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    refused = said(await http.post("/api/chat", json=chat(think=True)), 400)
    assert refused == '"fake" does not support thinking'
    assert (await http.post("/api/chat", json=chat(think=False))).status_code == 200
    engine.info = replace(engine.info, thought_mark="<think>")
    asked = chat("muse hm</think>hello")
    answer = (await http.post("/api/chat", json=asked | {"think": True})).json()
    assert answer["message"] == {"role": "assistant", "content": "hello", "thinking": "hm"}
    assert engine.requests[-1].template_options == {"enable_thinking": True}
    await http.post("/api/chat", json=chat(think="low"))
    options = engine.requests[-1].template_options
    assert (options["reasoning_effort"], options["enable_thinking"]) == ("low", True)
    *parts, _ = lines(await http.post("/api/chat", json=asked | {"stream": True}))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    generated = (
        await http.post("/api/generate", json={"prompt": "muse hm</think>hello", "stream": False})
    ).json()
    assert (generated["response"], generated["thinking"]) == ("hello", "hm")


async def test_formats(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for path, asked in (("/api/chat", chat()), ("/api/generate", {"prompt": "say hi"})):
        for given, wanted in (("json", {"type": "object"}), (schema, schema)):
            assert (await http.post(path, json=asked | {"format": given})).status_code == 200
            assert json.loads(str(engine.requests[-1].params.json_schema)) == wanted
        for nothing in ("", None):
            await http.post(path, json=asked | {"format": nothing})
            assert engine.requests[-1].params.structure is None
    text = said(await http.post("/api/chat", json=chat("unfit json_schema", format=schema)), 400)
    assert text == "format: there is a mistake in it"


async def test_log_probabilities(http: httpx.AsyncClient) -> None:
    asked = chat(logprobs=True, top_logprobs=2)
    whole = (await http.post("/api/chat", json=asked)).json()["logprobs"]
    *parts, _ = lines(await http.post("/api/chat", json=asked | {"stream": True}))
    for scores in (whole, [score for part in parts for score in part["logprobs"]]):
        assert [score["token"] for score in scores] == ["hello ", "world"]
        assert all(len(score["top_logprobs"]) == 2 for score in scores)


# --- generate


async def test_a_prompt_is_a_message(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"model": "fake", "prompt": "say hello world", "system": "Be brief.", "stream": False}
    answer = (await http.post("/api/generate", json=asked)).json()
    validator("OllamaGenerated").validate(answer)
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("hello world", True, "stop")
    assert engine.requests[-1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "say hello world"},
    )
    *parts, last = lines(await http.post("/api/generate", json=asked | {"stream": True}))
    assert [part["response"] for part in parts] == ["hello ", "world"]
    assert (last["response"], last["eval_count"]) == ("", 2)


async def test_a_raw_prompt_is_sent_as_it_is(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"prompt": "say hello", "raw": True, "stream": False, "options": {"num_predict": 9}}
    assert (await http.post("/api/generate", json=asked)).json()["response"] == "hello"
    assert (engine.requests[-1].text, engine.requests[-1].params.max_tokens) == ("say hello", 9)
    assert said(await http.post("/api/generate", json=asked | {"system": "Be brief."}), 400).startswith("raw")


# --- loading and unloading


async def test_requests_that_only_load_or_unload(several: httpx.AsyncClient, shelf: ModelPool) -> None:
    for path, said_in in (("/api/generate", "response"), ("/api/chat", "message")):
        answer = (await several.post(path, json={"model": "small"})).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert said_in in answer
        assert [m["name"] for m in (await several.get("/api/ps")).json()["models"]] == ["small:latest"]
        answer = (await several.post(path, json={"model": "small", "keep_alive": 0})).json()
        assert (answer["done"], answer["done_reason"]) == (True, "unload")
        assert not shelf.loaded
    assert (await several.post("/api/embed", json={"model": "small"})).json() == {
        "model": "small",
        "embeddings": [],
    }
    assert [model.found.name for model in shelf.loaded] == ["small"]


async def test_how_long_a_model_stays(several: httpx.AsyncClient, shelf: ModelPool) -> None:
    small = shelf.models["small"]

    async def left_s() -> float:
        (model,) = (await several.get("/api/ps")).json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()

    await several.post("/api/chat", json=chat(model="small", keep_alive="10m"))
    assert 540 < await left_s() <= 600
    await several.post("/api/chat", json=chat(model="small"))  # it remembers
    assert 540 < await left_s() <= 600
    await several.post("/api/generate", json={"model": "small", "prompt": "say hi", "keep_alive": -1})
    assert await left_s() > 10**9
    answer = await several.post("/api/chat", json=chat(model="small", keep_alive=0))
    assert answer.json()["message"]["content"] == "hello world"
    async with asyncio.timeout(30):
        while shelf.loaded:
            await asyncio.sleep(0.01)
    assert small.idle_s is None  # the server's own rule applies to the next one


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300),
        (1.5, 1.5),
        (0, 0),
        (-1, float("inf")),
        (-0.5, float("inf")),
        (1e300, float("inf")),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("0", 0),
        ("0s", 0),
        ("-1", float("inf")),
        ("-1m", float("inf")),
        ("24h", 86400),
        (None, None),
    ],
)
def test_durations(given: object, seconds: float | None) -> None:
    assert keep_alive_s({"keep_alive": given}) == seconds


# --- embeddings


async def test_embeddings(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await http.post("/api/embed", json={"model": "fake", "input": ["abc", "b"]})).json()
    validator("OllamaEmbeddings").validate(answer)
    first, second = answer["embeddings"]
    assert sum(x * x for x in first) == pytest.approx(1)
    assert len(second) == 4
    assert (answer["model"], answer["prompt_eval_count"]) == ("fake", 14)
    one = (await http.post("/api/embed", json={"input": "abc", "dimensions": 2})).json()
    assert len(one["embeddings"]) == 1
    assert len(one["embeddings"][0]) == 2
    older = (await http.post("/api/embeddings", json={"prompt": "abc"})).json()
    assert older == {"embedding": list(struct.unpack("<4f", struct.pack("<4f", 3, ord("a"), ord("c"), 1)))}
    assert (await http.post("/api/embeddings", json={"prompt": ""})).json() == {"embedding": []}


async def test_texts_that_are_too_long_are_cut_off(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = "a" * 3000
    assert (await http.post("/api/embed", json={"input": text})).status_code == 200
    assert engine.requests[-1].tokens is not None
    assert len(engine.requests[-1].tokens) == INFO.context
    assert (await http.post("/api/embed", json={"input": "b" * 100})).status_code == 200
    assert engine.requests[-1].text == "b" * 100
    engine.refusals = [ContextFull("it has 3000 tokens")]
    assert "too long" in said(await http.post("/api/embed", json={"input": text, "truncate": False}), 400)


# --- what is wrong

PICTURE = {"role": "user", "content": "what is it?", "images": ["aGk="]}
ROWS: list[tuple[str, object, str]] = [
    ("/api/chat", {"messages": "hi"}, "messages must be a list"),
    ("/api/chat", {"messages": ["hi"]}, "messages[0] must be an object"),
    ("/api/chat", {"messages": [{"content": "hi"}]}, "messages[0].role is missing"),
    ("/api/chat", {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role must be one of"),
    ("/api/chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be"),
    ("/api/chat", {"messages": [PICTURE]}, "messages[0].images[0]: this is not a picture"),
    (
        "/api/chat",
        {"messages": [{"role": "assistant", "tool_calls": [3]}]},
        "messages[0].tool_calls[0] must be",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "tool_calls[0].function must be",
    ),
    ("/api/chat", {"model": 7}, "model must be a string"),
    ("/api/chat", {"stream": "yes"}, "stream must be true or false"),
    ("/api/chat", {"options": []}, "options must be an object"),
    ("/api/chat", {"options": {"temperature": -1}}, "temperature must be"),
    ("/api/chat", {"options": {"temperature": "hot"}}, "temperature must be"),
    ("/api/chat", {"options": {"top_p": 2}}, "top_p must be"),
    ("/api/chat", {"options": {"top_k": 1.5}}, "top_k must be"),
    ("/api/chat", {"options": {"num_predict": "ten"}}, "num_predict must be"),
    ("/api/chat", {"options": {"num_predict": -5}}, "num_predict must be"),
    ("/api/chat", {"options": {"num_ctx": "large"}}, "options.num_ctx must be a number"),
    ("/api/chat", {"options": {"use_mmap": 1}}, "options.use_mmap must be true or false"),
    ("/api/chat", {"options": {"stop": 5}}, "stop must be"),
    ("/api/chat", {"options": {"stop": [""]}}, "stop"),
    ("/api/chat", {"options": {"seed": "x"}}, "seed must be"),
    ("/api/chat", {"options": {"mirostat": 3}}, "mirostat must be"),
    ("/api/chat", {"format": "xml"}, 'format must be "json" or a JSON schema'),
    ("/api/chat", {"format": True}, "format must be"),
    ("/api/chat", {"think": "deeply"}, "think must be"),
    ("/api/chat", {"think": 1}, "think must be"),
    ("/api/chat", {"keep_alive": "a while"}, "keep_alive must be"),
    ("/api/chat", {"keep_alive": True}, "keep_alive must be"),
    ("/api/chat", {"keep_alive": "1d"}, "keep_alive must be"),
    ("/api/chat", {"tools": {}}, "tools must be a list"),
    ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function is missing"),
    ("/api/chat", {"top_logprobs": 50, "logprobs": True}, "top_logprobs must be"),
    ("/api/chat", {"messages": [{"role": "user", "content": "refuse"}]}, "maximum context length"),
    ("/api/generate", {"prompt": 3}, "prompt must be a string"),
    ("/api/generate", {"images": ["aGk="]}, "images[0]: this is not a picture"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template: "),
    ("/api/generate", {"context": [1, 2]}, "context is not kept here"),
    ("/api/generate", {"context": "x"}, "context must be a list"),
    ("/api/generate", {"raw": "yes"}, "raw must be true or false"),
    ("/api/generate", {"raw": True, "context": [1]}, "raw: true"),
    ("/api/embed", {"input": 3}, "input must be"),
    ("/api/embed", {"input": ["a", 3]}, "input[1] must be a text"),
    ("/api/embed", {"input": "a", "dimensions": -1}, "dimensions must be"),
    ("/api/embed", {"input": "a", "truncate": 1}, "truncate must be"),
    ("/api/embeddings", {"prompt": ["a"]}, "prompt must be a string"),
    ("/api/show", {}, "model is required"),
    ("/api/show", {"model": ["fake"]}, "model must be a string"),
]


@pytest.mark.parametrize(("path", "fields", "wanted"), ROWS)
async def test_what_is_wrong_is_said(
    http: httpx.AsyncClient, path: str, fields: dict[str, object], wanted: str
) -> None:
    usual: dict[str, object] = {"/api/chat": chat(), "/api/generate": {"prompt": "say hi"}}.get(path, {})
    text = said(await http.post(path, json=usual | fields), 400)
    assert wanted in text
    assert "response_format" not in text
    assert "n_predict" not in text.replace("num_predict", "")


async def test_bodies_and_methods(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (b"", b"{", b"[1]", b"\xff", b"3"):
        said(await http.post("/api/chat", content=wrong), 400)
    said(await http.get("/api/chat"), 405)
    said(await http.post("/api/tags"), 405)
    said(await http.post("/api/nowhere"), 404)
    monkeypatch.setattr(bodies, "MAX_BYTES", 100)
    said(await http.post("/api/chat", json=chat("x" * 200)), 413)


async def test_errors_of_the_server_as_a_whole(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), api_key="secret", hosts=("here",), most_requests=0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        assert "key" in said(await client.get("/api/tags"), 401)
        key = {"Authorization": "Bearer secret"}
        assert (await client.get("/api/tags", headers=key)).status_code == 200
        assert (await client.head("/")).status_code == 200  # by which clients see that there is a server
        assert "in progress" in said(await client.post("/api/chat", json=chat(), headers=key), 429)
        elsewhere = key | {"Host": "elsewhere.example"}
        assert "does not answer" in said(await client.get("/api/tags", headers=elsewhere), 421)
        page = key | {"Origin": "https://page.example"}
        assert "may not use" in said(await client.get("/api/tags", headers=page), 403)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_an_error_in_the_middle_is_a_line(http: httpx.AsyncClient, path: str) -> None:
    asked = chat("fail", stream=True) if path == "/api/chat" else {"prompt": "fail"}
    *parts, last = lines(await http.post(path, json=asked))
    assert len(parts) == 2
    assert last == {"error": "the fake backend failed"}
    assert said(await http.post(path, json=asked | {"stream": False}), 500) == "the fake backend failed"


async def test_a_gap_in_a_text_is_filled(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"prompt": "def f(", "suffix": "return 1", "stream": False, "options": {"num_predict": 9}}
    assert "cannot fill in the middle" in said(await http.post("/api/generate", json=asked), 501)
    engine.info = replace(engine.info, fills=True)
    answer = (await http.post("/api/generate", json=asked)).json()
    assert answer["response"] == "def f(|return 1||9"  # as the scripted engine repeats its prompt
    assert engine.requests[-1].tokens is not None
    assert (await http.post("/api/generate", json=asked | {"prompt": ""})).json()["done_reason"] == "stop"
    shown = (await http.post("/api/show", json={"model": "fake"})).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"]  # by which Continue knows it


async def test_programs_see_what_they_look_for_at_the_root(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), ollama_client=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/")).text == "Ollama is running"
        page = await client.get("/", headers={"Accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")


# --- downloads and removals


async def test_a_download_is_told_in_lines(
    several: httpx.AsyncClient, library: Shelves, shelf: ModelPool
) -> None:
    def steps(progress: Progress) -> None:
        for done in (0, 5, 10):
            progress(done, 10, "model.gguf")

    library.steps = steps
    asked = {"model": "hf.co/user/repo:Q4_K_M"}
    first, *parts, last = lines(await several.post("/api/pull", json=asked))
    assert (first["status"], last["status"]) == ("pulling manifest", "success")
    progress = [part for part in parts if "total" in part]
    assert progress[-1]["completed"] == progress[-1]["total"] == 10
    assert len({part["digest"] for part in progress}) == 1
    for part in (first, *parts, last):
        validator("OllamaProgress").validate(part)
    assert "hf:user/repo:Q4_K_M" in [m["name"] for m in (await several.get("/api/tags")).json()["models"]]
    assert shelf.find("hf:user/repo:Q4_K_M")
    answer = await several.post("/api/chat", json=chat(model="hf.co/user/repo:Q4_K_M"))
    assert answer.json()["message"]["content"] == "hello world"


async def test_models_that_are_here_are_not_downloaded(several: httpx.AsyncClient, library: Shelves) -> None:
    def never(progress: Progress) -> None:
        raise AssertionError("it is here")

    library.steps = never
    whole = await several.post("/api/pull", json={"name": "small:latest", "stream": False})
    assert (whole.status_code, whole.json()) == (200, {"status": "success"})


async def test_downloads_that_fail(several: httpx.AsyncClient, library: Shelves) -> None:
    def fails(progress: Progress) -> None:
        raise UserError("the hub cannot be reached")

    library.steps = fails
    assert (
        said(await several.post("/api/pull", json={"model": "llama3.2"}), 400) == "llama3.2 is not on the hub"
    )
    first, last = lines(await several.post("/api/pull", json={"model": "hf:a/b"}))
    assert (first["status"], last) == ("pulling manifest", {"error": "the hub cannot be reached"})
    whole = await several.post("/api/pull", json={"model": "hf:a/b", "stream": False})
    assert said(whole, 400) == "the hub cannot be reached"
    assert said(await several.post("/api/pull", json={}), 400) == "model is required"
    said(await several.post("/api/pull", json={"model": "x" * 600}), 400)


async def test_a_download_ends_when_nobody_waits_for_it(shelf: ModelPool, library: Shelves) -> None:
    ended = threading.Event()

    def endless(progress: Progress) -> None:
        try:
            while True:
                progress(1, 2, "model.gguf")
        finally:
            ended.set()

    library.steps = endless
    app, gone = create_app(shelf, library=library), asyncio.Event()
    given = iter([{"type": "http.request", "body": b'{"model": "hf:a/b"}', "more_body": False}])

    async def receive() -> dict[str, object]:
        if (first := next(given, None)) is not None:
            return first
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if b"completed" in message.get("body", b""):
            gone.set()

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/api/pull",
        "raw_path": b"/api/pull",
        "query_string": b"",
    }
    scope |= {"headers": [], "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80), "scheme": "http"}
    scope |= {"http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"}}
    await app(scope, receive, send)
    assert await asyncio.to_thread(ended.wait, 30)


async def test_a_model_is_deleted(several: httpx.AsyncClient, library: Shelves, shelf: ModelPool) -> None:
    await several.post("/api/chat", json=chat(model="small"))
    library.has = {"small": shelf.models["small"].found.path}
    answer = await several.request("DELETE", "/api/delete", json={"model": "small:latest"})
    assert (answer.status_code, answer.content, library.removed) == (200, b"", ["small"])
    assert list(shelf.models) == ["large"]
    assert not shelf.loaded
    for name, status in (("medium", 404), ("ollama:tiny:latest", 403)):
        said(await several.request("DELETE", "/api/delete", json={"name": name}), status)
    said(await several.request("DELETE", "/api/delete", json={}), 400)


async def test_the_model_of_a_server_is_not_deleted(library: Shelves) -> None:
    found = CatalogModel("tiny", Path("/models/tiny.gguf"), 5)
    shelf = ModelPool([found], started)
    library.has = {"tiny": found.path}
    transport = httpx.ASGITransport(create_app(shelf.models["tiny"], library=library))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        refused = await client.request("DELETE", "/api/delete", json={"model": "tiny"})
        assert "is the model of this server" in said(refused, 409)
    assert not library.removed
    await shelf.close()


@pytest.mark.parametrize(
    ("address", "headers", "key", "status"),
    [
        ("127.0.0.1", {}, None, 400),  # it may, but names nothing
        ("::1", {}, None, 400),
        ("192.168.0.7", {}, None, 403),
        ("127.0.0.1", {"X-Forwarded-For": "8.8.8.8"}, None, 403),
        ("127.0.0.1", {"Origin": "http://test"}, None, 403),
        ("192.168.0.7", {"Authorization": "Bearer secret"}, "secret", 400),
        ("127.0.0.1", {}, "secret", 401),
    ],
)
async def test_who_may_download_and_delete(
    engine: FakeEngine, library: Shelves, address: str, headers: dict[str, str], key: str | None, status: int
) -> None:
    app = create_app(LocalClient(engine), library=library, api_key=key, origins=("http://test",))
    transport = httpx.ASGITransport(app, client=(address, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            said(await client.request(method, path, json={}, headers=headers), status)
