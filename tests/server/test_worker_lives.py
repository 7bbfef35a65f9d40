"""Workers that die: what is asked again, who is to blame, when the next one begins, what is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from hypothesis import given, strategies as st

from hetrun.client import worker_main, worker_process, worker_supervisor
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import Event, GenerateRequest, Timings, TokenLogprob, Usage
from hetrun.client.sampling_params import SamplingParams
from hetrun.client.wire_protocol import EventsMessage, packed, unpacked
from hetrun.client.worker_main import _arrived
from hetrun.config import Settings
from hetrun.errors import BackendError, EngineStopped, HetrunError, ModelFileError
from hetrun.server.app import create_app
from tests.server.engines import TOKENS
from tests.support import lives
from tests.support.limits import Within
from tests.support.tiers import exhaustive

FAKE = "tests.support.fakes:FakeEngine"
TOLD = "tests.server.engines:Told"
LONGER_THAN_A_TEST_S = 90.0  # who waits for this hangs


def ask(text: str, max_tokens: int | None = None, whole: bool = False) -> GenerateRequest:
    return GenerateRequest(SamplingParams(max_tokens=max_tokens), text=text, whole=whole)


async def collect(client: WorkerClient, request: GenerateRequest) -> list[Event]:
    return [event async for event in client.stream(request)]


def text_of(events: list[Event]) -> str:
    assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].kind == "done", events[-1].error
    return "".join(event.text for event in events)


@asynccontextmanager
async def opened(engine: str = FAKE) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(Settings(), engine=engine)
    try:
        yield client
    finally:
        await client.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether there is such a process, also as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(worker_supervisor, "MOST_DELAY_S", 0.01)
    return tmp_path / "script"


def scripted(script: Path, words: str) -> WorkerClient:
    script.write_text(words)
    return WorkerClient(Settings.resolve(environ={}, plan=str(script)), engine="tests.support.lives:engine")


# --- asked again


@pytest.mark.parametrize("whole", [True, False])
async def test_what_nothing_was_sent_of_is_asked_again(tmp_path: Path, whole: bool) -> None:
    async with opened() as client:
        await client.info()
        first = client.pid
        assert text_of(await collect(client, ask(f"once {tmp_path / 'x'} well", whole=whole))) == "well"
        assert client.pid != first
        assert not alive(first)


async def test_a_whole_answer_may_be_asked_again_in_the_middle(tmp_path: Path) -> None:
    async with opened(TOLD) as client:
        await client.info()
        first = client.pid
        events = await collect(client, ask(f"halfway {tmp_path / 'x'}", whole=True))
        assert client.pid != first
        assert text_of(events) == "ha " * TOKENS
        assert [event.token for event in events[:-1]] == list(range(1, TOKENS + 1))


async def test_a_whole_answer_that_is_cancelled_ends() -> None:
    async with opened() as client:
        asked = asyncio.create_task(collect(client, ask("forever", whole=True)))
        await client.info()
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert text_of(await collect(client, ask("say fine", whole=True))) == "fine"
        await until(lambda: client._supervisor._life.idle)


async def test_who_kills_every_worker_gets_an_error_and_the_others_their_answers() -> None:
    async with opened() as client:
        others = [asyncio.create_task(collect(client, ask("forever", 200, whole=True))) for _ in range(4)]
        (event,) = [e for e in await collect(client, ask("crash", whole=True)) if e.last]
        assert isinstance(event.error, BackendError)
        assert "3 processes ended" in str(event.error)
        assert "SIGABRT" in str(event.error)
        for other in others:
            assert text_of(await other) == "ha " * 200


async def test_an_engine_that_ends_by_itself_is_a_death() -> None:
    async with opened() as client:
        first = (await client.info(), client.pid)[1]
        (event,) = await collect(client, ask("stop"))
        assert isinstance(event.error, BackendError)
        assert "the fake engine's thread has ended" in str(event.error)
        assert text_of(await collect(client, ask("say fine"))) == "fine"
        assert client.pid != first


async def test_closing_while_it_restarts_ends_all_that_waits(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", LONGER_THAN_A_TEST_S)
    client = scripted(script, "ok endless")
    await client.info()
    asked = asyncio.create_task(collect(client, ask("forever", whole=True)))
    await asyncio.sleep(0.02)
    first = client.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: client.health.status == "loading")
    late = asyncio.create_task(collect(client, ask("say late")))
    await client.close()
    for task in (asked, late):
        (event,) = await task
        assert isinstance(event.error, EngineStopped)
        assert "was closed" in str(event.error)
    assert not alive(first)
    assert not alive(client.pid)
    assert client.health.status == "failed"


async def test_of_the_servers_clients_only_one_that_reads_a_stream_notices(tmp_path: Path) -> None:
    def asking(text: str, **more: object) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}], **more}

    async with opened() as client:
        await client.info()
        transport = httpx.ASGITransport(create_app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
            post = partial(http.post, "/v1/chat/completions")
            cut, once, beside = await asyncio.gather(
                post(json=asking("crash", stream=True)),
                post(json=asking(f"once {tmp_path / 'x'} well")),
                post(json=asking("forever", max_tokens=50)),
            )
            assert "the rest of this answer is lost: send the request again" in cut.text
            assert once.json()["choices"][0]["message"]["content"] == "well"
            assert beside.json()["choices"][0]["message"]["content"] == "ha " * 50
            blamed = await post(json=asking("crash"))
            assert blamed.status_code == 500
            assert blamed.headers["x-should-retry"] == "false"
            assert (await post(json=asking("say fine"))).status_code == 200


# --- when the next one begins


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("wrong", ModelFileError, "not a model any more"),
        ("bug", HetrunError, "a mistake"),
        ("abort", EngineStopped, "SIGABRT"),
    ],
)
async def test_the_first_load_is_not_tried_twice(
    script: Path, word: str, error: type[Exception], said: str
) -> None:
    client = scripted(script, word)
    with pytest.raises(Exception, match=said) as caught:
        await client.info()
    assert isinstance(caught.value, error) or word == "bug"
    assert len(lives.born(script)) == 1
    assert client.health.status == "failed"
    await client.close()


async def test_later_loads_are_tried_again(script: Path) -> None:
    client = scripted(script, "ok abort wrong bug ok")
    info = await client.info()
    os.kill(client.pid, signal.SIGKILL)
    assert text_of(await collect(client, ask("say fine"))) == "fine"
    assert len(lives.born(script)) == 5
    assert client.health.status == "ok"
    assert await client.info() == info
    await client.close()
    assert not any(map(alive, lives.born(script)))


async def test_it_gives_up_in_the_end(script: Path) -> None:
    client = scripted(script, "ok wrong")
    await client.info()
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.health.status == "loading")
    assert "SIGKILL" in client.health.reason
    (event,) = await collect(client, ask("say fine"))
    assert isinstance(event.error, EngineStopped)
    assert "not a model any more" in str(event.error)
    with pytest.raises(EngineStopped, match="not a model any more"):
        await client.info()
    assert client.health.status == "failed"
    assert len(lives.born(script)) == 1 + worker_supervisor.MOST_FAILED
    await client.close()


def test_later_and_later() -> None:
    assert [worker_supervisor.delay_s(n) for n in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert worker_supervisor.delay_s(10_000) == 30


async def test_who_dies_with_nothing_to_do_is_followed_all_the_same(script: Path) -> None:
    client = scripted(script, "ok")
    for n in range(1, 5):
        await until(lambda: client.health.status == "ok")
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda n=n: len(lives.born(script)) == n + 1)  # type: ignore[misc]
    assert text_of(await collect(client, ask("say fine"))) == "fine"
    await client.close()


# --- under load


async def _user(client: WorkerClient, number: int, over: Callable[[], bool]) -> tuple[int, int]:
    """Ask until it is over and there was an answer; how many answers and errors there were."""
    answers = errors = 0
    while not (over() and answers):
        whole = number % 2 == 0
        events = await collect(client, ask(f"forever w{number}", 40, whole))
        assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
        if events[-1].kind == "done":
            assert "".join(event.text for event in events) == f"w{number} " * 40
            answers += 1
        else:
            # What was sent on stays; nothing of it comes twice.
            assert [event.token for event in events[:-1]] == list(range(1, len(events)))
            errors += 1
    return answers, errors


@pytest.mark.parametrize("deaths", [3, pytest.param(50, marks=(pytest.mark.slow, exhaustive))])
async def test_each_request_ends_once_and_nothing_is_left_behind(deaths: int, within: Within) -> None:
    chance = random.Random(deaths)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    pids: list[int] = []
    async with opened() as client:
        await client.info()
        users = [asyncio.create_task(_user(client, n, lambda: len(pids) > deaths)) for n in range(6)]
        while len(pids) <= deaths:
            await until(lambda: client.health.status == "ok")
            pids.append(client.pid)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            os.kill(pids[-1], chance.choice((signal.SIGKILL, signal.SIGABRT)))
            await until(lambda: client.pid != pids[-1])
        counted = await asyncio.gather(*users)
        assert sum(answers for answers, _ in counted) >= len(users)
        assert threading.active_count() <= threads + 4  # reader, watch, writer, and asyncio's own
        pids.append(client.pid)
    assert not any(map(alive, pids))
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    with within(5):
        await until(lambda: not any("hetrun" in thread.name for thread in threading.enumerate()))


# --- what crosses the pipe

EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["prompt", "token", "done"]),
    text=st.text(max_size=5),
    token=st.none() | st.integers(0, 99),
    logprob=st.none() | st.builds(TokenLogprob, st.integers(0, 9), st.just(-0.5)),
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    usage=st.just(Event("token").usage) | st.builds(Usage, st.integers(0, 9)),
    timings=st.just(Event("token").timings) | st.just(Timings(1.0)),
    prompt_logprobs=st.just(()) | st.just((TokenLogprob(1, -1.0),)),
    echo=st.just(()) | st.just((b"a", b"\xc3")),
)


@given(st.integers(0), st.lists(EVENTS, min_size=1, max_size=5))
def test_answers_are_the_same_on_the_other_side(key: int, events: list[Event]) -> None:
    answer = EventsMessage(key, tuple(events))
    assert unpacked(packed(answer)) == answer


def test_the_time_a_request_waited_is_gone_from_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_main, "monotonic", lambda: 104.0)
    request = GenerateRequest(SamplingParams(), text="x", deadline_s=10.0)
    assert _arrived(request, 100.0).deadline_s == 6
    assert _arrived(request, 64.0).deadline_s == 0
    assert _arrived(GenerateRequest(SamplingParams(), text="x"), 0.0).deadline_s is None
