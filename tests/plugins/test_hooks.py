"""Plugins that hook in: what they hear, what they add to the server, and what they cannot break."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client import hook_dispatcher
from hetrun.client.engine_client import LocalClient
from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.hooks import hookimpl
from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import BackendError
from hetrun.server.app import create_app
from hetrun.system import entry_points
from tests.plugins.strangers import Register
from tests.support.fakes import INFO, FakeEngine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was loaded before was loaded without this test's plugins, and the next must not have them."""
    hook_dispatcher.plugins.cache_clear()
    yield
    if listening := hook_dispatcher.plugins():
        listening.close()
    hook_dispatcher.plugins.cache_clear()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


class Listener:
    """Hears everything."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, object]] = queue.Queue()
        self.threads = set[str]()

    @hookimpl
    def hetrun_asked(self, request: GenerateRequest) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.put(("asked", request.text))

    @hookimpl
    def hetrun_answered(self, last: Event, info: ModelInfo) -> None:  # not all of the arguments
        self.heard.put(("answered", last.finish_reason or type(last.error)))
        assert info == INFO

    def next(self) -> tuple[str, object]:
        return self.heard.get(timeout=10)


class Failing:
    """Raises whatever it hears."""

    @hookimpl
    def hetrun_asked(self) -> None:
        raise ZeroDivisionError("by a plugin")


async def ask(engine: FakeEngine, text: str, most: int | None = None) -> list[Event]:
    """Events of an answer, at most this many."""
    stream, events = LocalClient(engine).stream(GenerateRequest(SamplingParams(), text=text)), list[Event]()
    try:
        async for event in stream:
            events.append(event)
            if len(events) == most:
                break
    finally:
        await stream.aclose()
    return events


async def test_they_hear_of_every_request_and_of_its_end(engine: FakeEngine, register: Register) -> None:
    listener = Listener()
    register("plugins", "ears", listener)
    await ask(engine, "say nothing")
    assert [listener.next(), listener.next()] == [("asked", "say nothing"), ("answered", "stop")]
    await ask(engine, "fail")
    assert [listener.next(), listener.next()] == [("asked", "fail"), ("answered", BackendError)]
    await ask(engine, "forever", most=2)
    assert [listener.next(), listener.next()] == [("asked", "forever"), ("answered", "cancelled")]
    assert listener.threads == {"hetrun-plugins"}
    assert listener.heard.empty()


async def test_one_that_raises_is_left_out_and_the_others_hear_on(
    engine: FakeEngine, register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    bad = register("plugins", "bad", Failing())
    register("plugins", "ears", listener)
    for _ in range(3):
        assert (await ask(engine, "say hello"))[-1].kind == "done"
        assert [listener.next()[0], listener.next()[0]] == ["asked", "answered"]
    assert entry_points.left_out()[bad] == "hetrun_asked fails: ZeroDivisionError: by a plugin"
    said = [r.message for r in caplog.records if "the plugin bad of stranger 0.1 is left out" in r.message]
    assert len(said) == 1


async def test_one_that_hangs_holds_no_request_up(engine: FakeEngine, register: Register) -> None:
    free = threading.Event()

    class Hanging:
        @hookimpl
        def hetrun_asked(self) -> None:
            free.wait(30)

    register("plugins", "slow", Hanging())
    async with asyncio.timeout(10):
        for _ in range(5):
            await ask(engine, "say hello")
    free.set()


class Unknown:
    @hookimpl
    def hetrun_everything(self) -> None:
        """There is no such hook."""


class Odd:
    @hookimpl
    def hetrun_asked(self, weather: str) -> None:
        """With an argument that no hook has."""


@pytest.mark.parametrize(
    ("plugin", "said"), [(Unknown(), "unknown hook 'hetrun_everything'"), (Odd(), "weather")]
)
async def test_one_that_cannot_hook_in(
    engine: FakeEngine, register: Register, plugin: object, said: str
) -> None:
    bad, listener = register("plugins", "bad", plugin), Listener()
    register("plugins", "ears", listener)
    await ask(engine, "say hello")
    assert listener.next() == ("asked", "say hello")
    assert said in entry_points.left_out()[bad]


# --- endpoints


def adding(*routes: object) -> object:
    class Adding:
        @hookimpl
        def hetrun_routes(self, client: ChatClient) -> Sequence[object]:
            return routes

    return Adding()


async def hello(request: Request) -> Response:
    return JSONResponse({"hello": "from a plugin"})


async def failing(request: Request) -> Response:
    raise KeyError("a plugin's bug")


async def get(engine: FakeEngine, path: str, api_key: str | None = None) -> httpx.Response:
    app = create_app(LocalClient(engine), api_key=api_key)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.get(path)


async def test_an_endpoint_of_a_plugin_answers_behind_our_guards(
    engine: FakeEngine, register: Register
) -> None:
    register("plugins", "more", adding(Route("/hello", hello), Route("/health", failing)))
    assert (await get(engine, "/hello")).json() == {"hello": "from a plugin"}
    assert (await get(engine, "/hello", api_key="secret")).status_code == 401
    assert (await get(engine, "/health")).status_code == 200  # ours goes first


async def test_an_endpoint_that_fails_says_whose_it_is(engine: FakeEngine, register: Register) -> None:
    register("plugins", "more", adding(Route("/hello", hello), Route("/bad", failing)))
    answer = await get(engine, "/bad")
    assert answer.status_code == 500
    assert (
        answer.json()["error"]["message"]
        == 'the plugin more of stranger 0.1 failed: KeyError: "a plugin\'s bug"'
    )
    assert (await get(engine, "/hello")).status_code == 200


@pytest.mark.parametrize("plugin", [adding("/hello"), adding(Route("/hello", hello), None)])
async def test_routes_that_are_none(engine: FakeEngine, register: Register, plugin: object) -> None:
    bad = register("plugins", "bad", plugin)
    register("plugins", "more", adding(Route("/there", hello)))
    assert (await get(engine, "/hello")).status_code == 404
    assert (await get(engine, "/there")).status_code == 200
    assert "must return a list" in entry_points.left_out()[bad]


def test_without_plugins_nothing_is_done() -> None:
    assert hook_dispatcher.plugins() is None
    assert hook_dispatcher.heard(GenerateRequest(SamplingParams(), text="x"), lambda: None) is None
