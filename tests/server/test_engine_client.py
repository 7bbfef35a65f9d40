"""The client contract, with an engine in this process and in one of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from hetrun.client import worker_process
from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.errors import BackendError, ContextFull, EngineStopped, HetrunError, ModelFileError
from tests.support.fakes import ENDLESS, INFO, REFUSED, TIMINGS, FakeEngine
from tests.support.limits import Within

FAKE = "tests.support.fakes:FakeEngine"


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[ChatClient]:
    client: ChatClient = (
        LocalClient(FakeEngine()) if kind == "local" else WorkerClient(Settings(), engine=FAKE)
    )
    try:
        yield client
    finally:
        await client.close()


def ask(text: str, max_tokens: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        SamplingParams(max_tokens=max_tokens), messages=({"role": "user", "content": text},)
    )


async def collect(client: ChatClient, text: str, max_tokens: int | None = None) -> list[Event]:
    return [event async for event in client.stream(ask(text, max_tokens))]


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_tokens_stream_and_end_with_done(kind: str) -> None:
    async with opened(kind) as client:
        assert await client.info() == INFO
        assert client.progress == 1.0
        events = await collect(client, "say one two three")
    assert [event.kind for event in events] == ["token"] * 3 + ["done"]
    assert "".join(event.text for event in events) == "one two three"
    assert [event.token for event in events[:-1]] == [1, 2, 3]
    assert events[-1].finish_reason == "stop"
    assert events[-1].usage.completion_tokens == 3
    assert events[-1].timings == TIMINGS


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_an_embedding_is_one_event_with_a_vector(kind: str) -> None:
    request = GenerateRequest(SamplingParams(), text="say hello", pooling="mean", whole=True)
    async with opened(kind) as client:
        (event,) = [event async for event in client.stream(request)]
    assert event.embedding == struct.pack("<4f", 9, ord("s"), ord("o"), 1)
    assert (event.finish_reason, event.usage.prompt_tokens) == ("stop", 7)


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_two_requests_run_at_once(kind: str) -> None:
    async with opened(kind) as client:
        first = client.stream(ask("forever"))
        async with aclosing(first):
            assert (await anext(first)).text == "ha "
            # The first one would never end: the second is answered beside it.
            events = await collect(client, "say hello")
            assert [event.text for event in events] == ["hello", ""]
            assert (await anext(first)).text == "ha "


async def test_closing_the_stream_cancels_the_request() -> None:
    engine = FakeEngine()
    client = LocalClient(engine)
    stream = client.stream(ask("forever"))
    await anext(stream)
    await stream.aclose()
    assert engine.cancelled == [1]
    assert await asyncio.to_thread(engine.idle.wait, 5)
    await client.close()


async def test_cancelling_the_task_cancels_the_request() -> None:
    engine = FakeEngine()
    client = LocalClient(engine)
    started = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream(ask("forever")):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == [1]
    await client.close()


async def test_a_finished_request_is_not_cancelled() -> None:
    engine = FakeEngine()
    client = LocalClient(engine)
    await collect(client, "say hello")
    assert engine.cancelled == []
    await client.close()


async def test_cancelled_in_the_worker_others_go_on() -> None:
    async with opened("worker") as client:
        stopped, kept = client.stream(ask("forever")), client.stream(ask("forever", max_tokens=200))
        await anext(stopped)
        await anext(kept)
        await stopped.aclose()
        events = [event async for event in kept]
    assert events[-1].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 200


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_a_failure_is_the_last_event(kind: str) -> None:
    async with opened(kind) as client:
        events = await collect(client, "fail")
        assert [event.kind for event in events] == ["token", "token", "error"]
        assert isinstance(events[-1].error, BackendError)
        assert str(events[-1].error) == "the fake backend failed"
        assert (await collect(client, "say fine"))[-1].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_a_refused_request_is_an_error_event(kind: str) -> None:
    async with opened(kind) as client:
        (event,) = await collect(client, "refuse")
        assert isinstance(event.error, ContextFull)
        assert "5000 tokens" in str(event.error)


async def test_an_error_that_cannot_be_pickled_still_says_what_happened() -> None:
    async with opened("worker") as client:
        event = (await collect(client, "odd"))[-1]
        assert isinstance(event.error, HetrunError)
        assert str(event.error) == "LockedError: this error holds a lock"
        assert any("in _reply" in note for note in event.error.__notes__)


async def test_an_error_while_loading_arrives_as_the_same_class() -> None:
    client = WorkerClient(Settings.resolve(model=REFUSED), engine=FAKE)
    for _ in range(2):  # every caller gets it
        with pytest.raises(ModelFileError) as caught:
            await client.info()
        assert (caught.value.path, caught.value.reason) == (REFUSED, "it is not a model")
    (event,) = await collect(client, "say hello")
    assert isinstance(event.error, ModelFileError)
    await client.close()


async def test_the_worker_is_given_what_was_chosen_and_nothing_else() -> None:
    settings = Settings.resolve(environ={"HETRUN_CTX": "99"}, backends=["x"], plan="/tmp/plan.json")
    client = WorkerClient(settings, engine=FAKE)
    events = await collect(client, "options")
    assert events[0].text == "{'backends': ('x',), 'ctx': 99, 'plan': PosixPath('/tmp/plan.json')}"
    await client.close()


async def test_kill_in_the_middle_ends_every_request_with_one_error_and_later_ones_are_answered() -> None:
    async with opened("worker") as client:
        assert isinstance(client, WorkerClient)
        streams = [client.stream(ask("forever")) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        first = client.pid
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            events = [event async for event in stream]
            assert [event.kind for event in events if event.kind != "token"] == ["error"]
            assert isinstance(events[-1].error, EngineStopped)
            assert "SIGKILL" in str(events[-1].error)
            assert "send the request again" in str(events[-1].error)
        assert [event.text for event in await collect(client, "say hello")] == ["hello", ""]
        assert client.pid != first
        assert await client.info() == INFO


async def test_a_native_crash_is_named_and_quoted(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        client = WorkerClient(Settings(), engine=FAKE, log=log)
        await client.info()
        log.write(b"GGML_ASSERT(eps >= 0) failed\n")
        log.flush()
        events = await collect(client, "crash")
        assert "".join(event.text for event in events) == "one two "
        assert "crashed (SIGABRT)" in str(events[-1].error)
        assert "GGML_ASSERT(eps >= 0) failed" in str(events[-1].error)
        await client.close()


async def test_closing_while_it_loads_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", 90.0)  # longer than a test may take
    client = WorkerClient(Settings.resolve(model=ENDLESS), engine=FAKE)
    while client.progress < 0.5:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(client.info())
    await client.close()
    with pytest.raises(EngineStopped, match="was closed"):
        await waiting


async def test_giving_up_on_a_model_that_loads_leaves_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    client = WorkerClient(Settings.resolve(model=ENDLESS), engine=FAKE)
    waiting = asyncio.create_task(client.info())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.close()
    gc.collect()
    assert caplog.records == []


async def test_the_worker_survives_ctrl_c() -> None:
    async with opened("worker") as client:
        assert isinstance(client, WorkerClient)
        os.kill(client.pid, signal.SIGINT)  # it may not even have ended its start
        await client.info()
        os.kill(client.pid, signal.SIGINT)
        assert (await collect(client, "say still here"))[-1].finish_reason == "stop"


PARENT = """
import asyncio
from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings

async def main():
    client = WorkerClient(Settings.resolve(model={model!r}), engine="tests.support.fakes:FakeEngine")
    print(client.pid, flush=True)
    if {model!r} is None:
        await client.info()
    print("here", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("model", [None, ENDLESS], ids=["idle", "loading"])
async def test_the_worker_ends_when_its_parent_is_killed(model: str | None, within: Within) -> None:
    code = PARENT.format(model=model)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "here\n"
        parent.kill()
        with within(5):
            ended, _, _ = await asyncio.to_thread(select.select, [worker], [], [], 50)
        os.close(worker)
    assert ended


async def test_what_the_engine_prints_never_reaches_our_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    client = WorkerClient(Settings(), engine="tests.server.test_engine_client:noisy_engine")
    await client.info()
    await client.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "printed by a library" in err


def noisy_engine(**options: object) -> FakeEngine:
    print("printed by a library", flush=True)
    return FakeEngine()


async def test_a_slow_reader_blocks_no_other_request() -> None:
    """Ten thousand tokens wait in the client while they are not read; the engine goes on with other work."""
    threads = threading.active_count()
    engine = FakeEngine(pace_s=0.0)
    client = LocalClient(engine)
    slow = client.stream(ask("forever", max_tokens=10_000))
    await anext(slow)
    assert await asyncio.to_thread(engine.idle.wait, 20)
    assert threading.active_count() <= threads + 2  # the engine's, and the one that waits for it
    assert len([event async for event in slow]) == 10_000
    await client.close()


async def test_what_the_engine_remarks_is_told_by_its_front(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    client = WorkerClient(Settings(), engine="tests.server.test_engine_client:remarking_engine")
    await client.info()
    await client.close()
    said = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert said == [("hetrun.engine", "WARNING", "the disk is 100% full")]
    assert "the disk" not in capfd.readouterr().err


def remarking_engine(**options: object) -> FakeEngine:
    logging.getLogger("hetrun.planner").warning("the disk is %d%% full", 100)
    logging.getLogger("hetrun.planner").info("no one asked for this")
    return FakeEngine()
