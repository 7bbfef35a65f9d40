"""A server without -m offers what `hetrun list` shows, under the same names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from hetrun import cli
from hetrun.cli.serve import in_words, shelf_of
from hetrun.client import model_pool
from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.local_servers import PrivateClient, alike, private_socket, running_servers
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.config import Settings, dirs
from hetrun.errors import OptionError, UserError
from hetrun.loader.hub import stores
from hetrun.loader.hub.cache import cache_folder
from hetrun.loader.hub.catalog import StoredModels, name_in_list
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.private_socket import private_app
from tests.support.fakes import INFO, FakeEngine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demonstration model alone; every look at the stores is taken."""
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF of a fake")
    monkeypatch.setattr(stores, "demo_model", lambda: path)
    for variable in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(model_pool, "SCAN_AGAIN_S", 0.0)
    return path


def own(name: str) -> Path:
    path = dirs().data / "models" / f"{name}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF of a fake")
    return path


def of_ollama(tag: str) -> None:
    root = Path.home() / ".ollama" / "models"
    blob = "sha256-" + "ab" * 32
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / blob).write_bytes(b"GGUF of a fake")
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / tag
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": stores.MODEL_LAYER, "digest": blob.replace("-", ":")}
    manifest.write_text(json.dumps({"layers": [layer]}))


def of_hub() -> None:
    repo = cache_folder() / "models--user--repo"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "repo-Q4_K_M.gguf").write_bytes(b"GGUF of a fake")


def engine(found: CatalogModel, ram: int | None) -> ChatClient:
    fake = FakeEngine()
    fake.info = replace(INFO, path=str(found.path))
    return LocalClient(fake)


@asynccontextmanager
async def serving(strict: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    catalog = StoredModels()
    shelf = ModelPool(catalog.found().values(), engine, ram=8 << 30, catalog=catalog)
    transport = httpx.ASGITransport(create_app(shelf, strict=strict))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await shelf.close()


async def answered_by(http: httpx.AsyncClient, **more: object) -> str:
    body = {"messages": [{"role": "user", "content": "say hello"}], **more}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


async def listed(http: httpx.AsyncClient) -> dict[str, str]:
    models = (await http.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def test_every_name_that_run_takes_finds_them_and_list_s_is_given_back(demo: Path) -> None:
    own("tiny-Q8_0")
    of_ollama("8b")
    of_hub()
    async with serving() as http:
        names = ("smollm2", "hf:user/repo:Q4_K_M", "ollama:qwen3:8b", "tiny-Q8_0")
        assert await listed(http) == dict.fromkeys(names, "unloaded")
        for name, spellings in {
            "smollm2": ("demo", "SmolLM2-135M-Instruct.Q4_1", demo.name),
            "tiny-Q8_0": ("tiny-Q8_0.gguf",),
            "ollama:qwen3:8b": ("qwen3:8b",),
            "hf:user/repo:Q4_K_M": ("hf:user/repo", "user/repo:Q4_K_M", "repo-Q4_K_M"),
        }.items():
            for spelling in (name, *spellings):
                assert await answered_by(http, model=spelling) == name
        assert await answered_by(http) == "hf:user/repo:Q4_K_M"  # the one that was used last
        for unknown in ("gpt-4o", "hf:../x", "hf:user/other", "/etc/passwd", "\0"):
            refused = await http.post("/v1/completions", json={"prompt": "x", "model": unknown})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert f"this server has {', '.join(names)}" in refused.text


async def test_a_model_that_comes_is_offered_and_one_that_goes_is_not(demo: Path) -> None:
    async with serving() as http:
        assert await answered_by(http) == "smollm2"  # while there is only one
        own("first")
        assert await answered_by(http, model="first") == "first"
        second = own("second")
        assert await listed(http) == {"smollm2": "unloaded", "first": "loaded", "second": "unloaded"}
        second.unlink()
        assert list(await listed(http)) == ["smollm2", "first"]
        assert (await http.post("/v1/completions", json={"prompt": "x", "model": "any"})).status_code == 404


async def test_two_looks_at_the_stores_are_some_time_apart(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "SCAN_AGAIN_S", 1e9)
    async with serving() as http:
        own("first")
        assert list(await listed(http)) == ["smollm2"]


@pytest.mark.parametrize("strict", [False, True])
async def test_the_only_model_answers_to_no_other_name(demo: Path, strict: bool) -> None:
    async with serving(strict=strict) as http:
        for name in ("smollm2", "demo", demo.name):
            assert await answered_by(http, model=name) == "smollm2"
        refused = await http.post("/v1/completions", json={"prompt": "x", "model": "any"})
        assert refused.status_code == 404
        assert "this server has smollm2" in refused.json()["error"]["message"]


async def test_the_only_model_has_the_whole_budget_until_there_is_another(demo: Path) -> None:
    budgets: list[tuple[str, int | None]] = []

    def start(found: CatalogModel, ram: int | None) -> ChatClient:
        budgets.append((found.name, ram))
        return engine(found, ram)

    catalog = StoredModels()
    shelf = ModelPool(catalog.found().values(), start, ram=8 << 30, catalog=catalog)
    assert shelf.only
    await shelf.only.info()
    own("first")
    other = await shelf.look_for("first")
    assert other
    await other.info()
    assert budgets == [("smollm2", None), ("first", 4 << 30)]
    assert [model.found.name for model in shelf.loaded] == ["first"]  # it left no room for a second one
    await shelf.close()


async def test_ps_shows_the_names_of_list(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    catalog = StoredModels()
    shelf = ModelPool(catalog.found().values(), engine, catalog=catalog)
    assert shelf.only
    await shelf.only.info()
    with private_socket() as bound:
        options = alike(Settings.resolve())
        app = private_app(shelf, asyncio.Event(), address="http://x", needs_key=False, options=options)
        async with listen.served(app, bound):
            [server] = await asyncio.to_thread(running_servers)
            facts = await PrivateClient(server.socket).facts()
            assert [(model.name, model.status) for model in facts.models] == [("smollm2", "loaded")]
            assert await asyncio.to_thread(cli.exit_code, ["ps"]) == 0
    await shelf.close()
    assert capsys.readouterr().out.splitlines()[1].startswith("smollm2  ")


# --- what serve begins with


def resolved(**given: object) -> Settings:
    return Settings.resolve(environ={"HOME": str(Path.home())}, **given)


def test_serve_alone_offers_all_and_one_that_is_named_alone(demo: Path) -> None:
    assert list(shelf_of(resolved()).models) == ["smollm2"]
    first = own("first")
    assert list(shelf_of(resolved()).models) == ["smollm2", "first"]
    assert list(shelf_of(resolved(model=str(first))).models) == ["first"]
    assert list(shelf_of(resolved(model=str(demo))).models) == ["smollm2"]
    assert list(shelf_of(resolved(models=(str(demo),))).models) == [demo.stem]


def test_a_file_of_one_model_needs_a_name_where_there_are_several(demo: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert list(shelf_of(resolved(prompt_cache=cache)).models) == ["smollm2"]
    own("first")
    with pytest.raises(OptionError, match="--prompt-cache is a file of one model: name the model with -m"):
        shelf_of(resolved(prompt_cache=cache))


def test_no_model_at_all(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.unlink()
    monkeypatch.setattr("hetrun.config.demo_model", lambda: None)
    with pytest.raises(UserError, match="no model was named, and the demonstration model is not installed"):
        shelf_of(resolved())


@pytest.mark.parametrize("spoil", [lambda path: path.symlink_to("/no/such"), lambda path: path.mkdir()])
def test_what_is_no_file_does_not_hide_the_others(demo: Path, spoil: Callable[[Path], None]) -> None:
    bad = own("bad")
    bad.unlink()
    spoil(bad)
    own("good")
    assert list(shelf_of(resolved()).models) == ["smollm2", "good"]


def test_names_of_paths(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(demo)
    folder = tmp_path / "some.model"
    folder.mkdir()
    assert name_in_list(folder) == "some.model"
    (folder / "inside.Q8_0.gguf").write_bytes(b"GGUF")
    assert [
        name_in_list(path) for path in (tmp_path / "link.gguf", folder, tmp_path / "no-00001-of-00002.gguf")
    ] == [
        "smollm2",
        "inside.Q8_0",
        "no",
    ]


def test_many_models_in_words() -> None:
    assert in_words(["a", "b"]) == "2 models (a, b)"
    assert in_words([str(i) for i in range(12)]).endswith("8, 9 and 2 more)")
