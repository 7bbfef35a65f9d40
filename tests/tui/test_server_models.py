"""The chat over a server of several models: name and context are those of the model that answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Static

from hetrun.cli.chat import doors_of_server
from hetrun.client import http_client
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import ModelInfo
from hetrun.client.http_client import RemoteClient
from hetrun.client.interface import ChatClient, Health
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.config import Settings
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.tui.app import ChatApp
from hetrun.tui.widgets.machine import MachinePane
from tests.server.test_remote_apis import ANTHROPIC, OLLAMA, serving as scripted
from tests.support.fakes import INFO, FakeEngine
from tests.tui.driver import Driver

PANES = (140, 45)  # the machine is shown


class Gated(LocalClient):
    """Is loaded when the gate is open."""

    def __init__(self, engine: FakeEngine, gate: asyncio.Event) -> None:
        super().__init__(engine)
        self._gate = gate

    @property
    def health(self) -> Health:
        return super().health if self._gate.is_set() else Health("loading", 0.5)

    async def info(self) -> ModelInfo:
        await self._gate.wait()
        return await super().info()


class Server:
    """A shelf of scripted engines, each with a context of its own, which a test may change between loads."""

    def __init__(self, names: Sequence[str]) -> None:
        self.contexts = {name: 1000 * (n + 1) for n, name in enumerate(names)}
        self.loads: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        found = [CatalogModel(name, Path(f"/models/{name}.gguf"), 1 << 20) for name in names]
        self.shelf = ModelPool(found, self._start)

    def _start(self, found: CatalogModel, ram: int | None) -> ChatClient:
        self.loads.append(found.name)
        fake = FakeEngine()
        fake.info = replace(INFO, path=str(found.path), context=self.contexts[found.name])
        return Gated(fake, self.gate)


@asynccontextmanager
async def serving(server: Server, place: Path) -> AsyncIterator[None]:
    with listen.listening(listen.ListenAddress(uds=place)) as bound:
        async with listen.served(create_app(server.shelf.only or server.shelf), bound):
            yield
    await server.shelf.close()


@asynccontextmanager
async def chat_over(place: Path) -> AsyncIterator[Driver]:
    url = f"unix:{place}"
    app = ChatApp(RemoteClient(url), doors=doors_of_server(Settings.resolve(environ={}, url=url), url))
    async with app.run_test(size=PANES) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        yield chat


async def shows(chat: Driver, name: str, context: int) -> None:
    """Wait until line and pane are of this model."""
    await chat.until(lambda: chat.status[0] == name and f" of {context} tokens" in chat.status[1])
    await chat.until(lambda: f" of {context:,}\n" in pane(chat) and "layers" in pane(chat))


def pane(chat: Driver) -> str:
    return str(chat.screen.query_one(MachinePane).query_one("Static").render())


async def test_a_model_that_the_first_message_loads_is_known_then(tmp_path: Path) -> None:
    server = Server(("a", "b"))
    async with serving(server, tmp_path / "s"), chat_over(tmp_path / "s") as chat:
        assert server.loads == []  # to look at it loads nothing
        detail = str(chat.screen.query_one("Welcome .detail", Static).content)
        assert detail == f"at unix:{tmp_path / 's'}\nchat template: the server"  # and no zeros
        await chat.exchange("say hello")
        await shows(chat, "a", 1000)
        assert "cache hits" in pane(chat)  # what was measured of the first answer stays
        assert server.loads == ["a"]


async def test_a_model_that_is_chosen_is_loaded_and_known(tmp_path: Path) -> None:
    server = Server(("a", "b"))
    async with serving(server, tmp_path / "s"), chat_over(tmp_path / "s") as chat:
        await chat.exchange("say hello")
        await chat.command("/model b")
        await chat.until(
            lambda: chat.screen.parts.engine.info is not None and chat.screen.parts.engine.info.id == "b"
        )
        await chat.exchange("say so")
        await shows(chat, "b", 2000)


async def test_a_model_that_went_and_came_back_has_its_present_context(tmp_path: Path) -> None:
    server = Server(("a", "b"))
    async with serving(server, tmp_path / "s"), chat_over(tmp_path / "s") as chat:
        await chat.exchange("say hello")
        await shows(chat, "a", 1000)
        await server.shelf.models["a"].close()  # as when another model needs its memory
        server.contexts["a"] = 512
        await chat.exchange("say on")
        await shows(chat, "a", 512)
        assert server.loads == ["a", "a"]


@pytest.mark.parametrize(
    ("routes", "name", "others"),
    [(OLLAMA, "qwen3:8b", ["llama3.2:1b"]), (ANTHROPIC, "claude-small", [])],
    ids=["ollama", "anthropic"],
)
async def test_a_server_with_another_api_answers_and_lists_its_models(
    routes: Mapping[str, tuple[int, object]], name: str, others: list[str], tmp_path: Path
) -> None:
    url = f"unix:{tmp_path / 's'}"
    async with scripted(routes, tmp_path / "s"), chat_over(tmp_path / "s") as chat:
        assert chat.screen.parts.engine.info is not None
        assert chat.screen.parts.engine.info.id == name
        await chat.exchange("hi")
        assert "Hello" in chat.shown
        doors = doors_of_server(Settings.resolve(environ={}, url=url), url)
        assert doors.models
        offered = await asyncio.to_thread(doors.models)
        assert [model.label for model in offered] == [name, *others]


async def test_a_server_that_was_started_again_with_another_model(tmp_path: Path) -> None:
    async with serving(Server(("a",)), tmp_path / "s"):
        running = chat_over(tmp_path / "s")
        chat = await running.__aenter__()
        await chat.exchange("say hello")
        await shows(chat, "a", 1000)
    try:
        async with serving(Server(("z",)), tmp_path / "s"):
            await chat.exchange("say on")
            await shows(chat, "z", 1000)
    finally:
        await running.__aexit__(None, None, None)


async def test_a_load_is_told_while_it_lasts_without_a_percentage_that_no_server_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "PATIENCE_S", 0.0)
    server = Server(("a", "b"))
    server.gate.clear()
    async with serving(server, tmp_path / "s"), chat_over(tmp_path / "s") as chat:
        await chat.send("say hello")
        await chat.until(lambda: "… loading the model\n" in f"{chat.shown}\n")
        server.gate.set()
        await chat.answered()
        server.gate.clear()
        await chat.command("/model b")
        await chat.until(lambda: chat.status[0] == "loading")
        server.gate.set()
        await chat.until(lambda: chat.status[0] == "b")
