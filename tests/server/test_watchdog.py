"""Workers that do not get on: noticed, said, and ended when it lasts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetrun.client import worker_process, worker_supervisor
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import CurrentStep, Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.client.watchdog import Watchdog
from hetrun.client.wire_protocol import Message, Patience, Pulse, StepResumed, StepStalled
from hetrun.config import Settings
from hetrun.errors import BackendError
from hetrun.server.app import create_app
from hetrun.system.run_queue import RunQueue
from tests.support.burners import burners

ENGINE = "tests.server.engines:Told"
# A step of the fake engine is predicted to take a millisecond: it is stuck behind a fifth of a second.
FOREVER = Patience(look=0.02, least=0.2, silent=20, kill_least=3600)
SHORT = Patience(look=0.02, least=0.2, silent=20, kill_times=1.5, kill_least=0.3)
LONGER_THAN_A_TEST_S = 90.0  # who waits for this hangs


@pytest.fixture(autouse=True)
def little_time_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "STACKS_S", 0.1)


def ask(text: str) -> GenerateRequest:
    return GenerateRequest(SamplingParams(), text=text, whole=True)


async def collect(client: WorkerClient, text: str) -> list[Event]:
    return [event async for event in client.stream(ask(text))]


@asynccontextmanager
async def opened(
    patience: Patience, log: BufferedRandom | None = None
) -> AsyncIterator[tuple[WorkerClient, httpx.AsyncClient]]:
    client = WorkerClient(Settings(), engine=ENGINE, patience=patience, log=log)
    transport = httpx.ASGITransport(create_app(client))
    try:
        await client.info()
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield client, http
    finally:
        await client.close()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def health(http: httpx.AsyncClient) -> tuple[int, dict[str, Any]]:
    response = await http.get("/health")
    return response.status_code, response.json()


async def test_a_step_that_takes_too_long_is_named_until_it_ends(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        async with opened(FOREVER, log) as (client, http):
            first = client.pid
            assert await health(http) == (200, {"status": "ok"})
            asked = asyncio.create_task(collect(client, f"lock {tmp_path / 'free'}"))
            await until(lambda: client.health.status == "stuck")
            status, said = await health(http)
            assert (status, said["status"], said["segment"]) == (503, "stuck", "blk.7.ffn")
            assert said["seconds"] >= 0.2
            assert said["expected"] == 0.001
            (tmp_path / "free").touch()
            assert "".join(event.text for event in await asked) == "free again"
            await until(lambda: client.health.status == "ok")
            assert await health(http) == (200, {"status": "ok"})
            assert client.pid == first
        text = (tmp_path / "log").read_text()
        assert "blk.7.ffn" in text
        assert "in deadlock" in text  # the stack of the engine's thread


async def test_a_step_that_never_ends_costs_a_restart(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        async with opened(SHORT, log) as (client, _):
            (event,) = await collect(client, "lock /never")
            assert isinstance(event.error, BackendError)
            assert "was stuck in blk.7.ffn for" in str(event.error)
            assert (await collect(client, "say fine"))[-1].kind == "done"
        assert "in deadlock" in (tmp_path / "log").read_text()


async def test_a_call_that_keeps_the_interpreter_lock_is_noticed_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker_supervisor, "delay_s", lambda failures: LONGER_THAN_A_TEST_S
    )  # to the next life
    with (tmp_path / "log").open("w+b") as log:
        patience = Patience(look=0.1, silent=1.0, kill_times=1.5, kill_least=3600)
        async with opened(patience, log) as (client, http):
            asked = asyncio.create_task(collect(client, "hold"))
            await until(lambda: client.health.status == "stuck")
            status, said = await health(http)
            assert (status, said["status"], said["segment"]) == (503, "stuck", None)
            client._supervisor._life._patience = Patience(
                look=0.1, silent=1.0, kill_times=1.5, kill_least=1.5
            )
            await until(lambda: client.health.status == "loading")
            status, said = await health(http)
            assert (status, said["status"]) == (503, "loading")
            assert "gave no sign of life" in said["reason"]
            assert "in deadlock" in (tmp_path / "log").read_text()
            assert not asked.done()  # the next life is to have it
            asked.cancel()


async def test_a_process_that_was_stopped_is_noticed_and_one_that_goes_on_is_kept() -> None:
    async with opened(Patience(look=0.05, silent=0.5, kill_least=3600)) as (client, _):
        first = client.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: client.health.status == "stuck")
        os.kill(first, signal.SIGCONT)
        await until(lambda: client.health.status == "ok")
        assert (await collect(client, "say fine"))[-1].kind == "done"
        assert client.pid == first


async def test_a_process_that_stays_stopped_is_ended() -> None:
    async with opened(Patience(look=0.05, silent=0.5, kill_times=1.2, kill_least=0.6)) as (client, _):
        os.kill(client.pid, signal.SIGSTOP)
        assert (await collect(client, "say fine"))[-1].kind == "done"


async def test_closing_does_not_wait_for_who_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", LONGER_THAN_A_TEST_S)
    client = WorkerClient(Settings(), engine=ENGINE, patience=FOREVER)
    await client.info()
    asked = asyncio.create_task(collect(client, "lock /never"))
    await until(lambda: client.health.status == "stuck")
    await client.close()
    (event,) = await asked
    assert "was closed" in str(event.error)


BOTH = """
import asyncio
from hetrun.client.engine_client import WorkerClient
from hetrun.config import Settings
from hetrun.client.wire_protocol import Patience

async def main():
    patience = Patience(look=0.05, silent=0.5, kill_times=1.0, kill_least=0.6)
    client = WorkerClient(Settings(), engine="tests.support.fakes:FakeEngine", patience=patience)
    await client.info()
    print(client.pid, flush=True)
    while input() != "end":
        print(client.pid, client.health.status, flush=True)
    await client.close()

asyncio.run(main())
"""


def test_a_job_that_was_stopped_as_a_whole_goes_on() -> None:
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BOTH], text=True, **pipe) as front:  # type: ignore[call-overload]
        worker = int(front.stdout.readline())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(front.pid, number)
            os.kill(worker, number)
            time.sleep(0.8)  # longer than anybody who looks at the clock would wait
        front.stdin.write("\n")
        front.stdin.flush()
        assert front.stdout.readline() == f"{worker} ok\n"
        front.stdin.write("end\n")


# --- the watchdog itself


class Queue(RunQueue):
    """How long threads waited for cores since the last look, as it is told."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waited = 0.0

    def look(self) -> float:
        return self.waited


class Step:
    """What an engine does, as it is told."""

    def __init__(self) -> None:
        self.doing: CurrentStep | None = None
        self.said: list[Message] = []
        self.queue = Queue()
        self.dog = Watchdog(lambda: self.doing, Patience(look=1.0), self.said.append, queue=self.queue)

    def look(self, doing: CurrentStep | None, elapsed: float = 1.0) -> list[Message]:
        self.doing = doing
        self.said.clear()
        self.dog.look(elapsed)
        assert self.said[0] == Pulse()
        return self.said[1:]


def test_how_long_a_step_may_take() -> None:
    step, doing = Step(), CurrentStep(1.0, 0.5, "blk.0")  # 20 times 0.5 s
    assert [step.look(doing) for _ in range(11)] == [[]] * 11
    assert step.look(doing) == [StepStalled("blk.0", 11.0, 0.5, 10.0)]
    assert step.look(doing) == [StepStalled("blk.0", 12.0, 0.5, 10.0)]
    assert step.look(CurrentStep(9.0, 0.5, "blk.0")) == [StepResumed()]
    assert step.look(None) == []


def test_a_quick_step_has_five_seconds_and_an_unknown_one_a_minute() -> None:
    for expected, limit in ((0.001, 5), (None, 60)):
        step, doing = Step(), CurrentStep(1.0, expected, "")
        assert [step.look(doing) for _ in range(limit + 1)] == [[]] * (limit + 1)
        assert step.look(doing) == [StepStalled("", limit + 1.0, expected, float(limit))]


def test_steps_that_change_are_never_stuck_and_a_night_is_no_long_step() -> None:
    step = Step()
    assert [step.look(CurrentStep(float(i), 0.001, "")) for i in range(1, 20)] == [[]] * 19
    doing = CurrentStep(99.0, 0.001, "")
    assert [step.look(doing, 30_000.0) for _ in range(3)] == [[]] * 3


def test_a_step_in_which_segments_begin_gets_on() -> None:
    step, names = Step(), ("blk.0", "blk.1")
    assert [step.look(CurrentStep(1.0, 0.001, names[i % 2])) for i in range(20)] == [[]] * 20
    assert [step.look(CurrentStep(1.0, 0.001, "model", i)) for i in range(20)] == [[]] * 20, "pass after pass"
    still = CurrentStep(1.0, 0.001, "model", 19)
    assert [step.look(still) for _ in range(5)] == [[]] * 5
    assert step.look(still) == [StepStalled("model", 6.0, 0.001, 5.0)]
    assert step.look(CurrentStep(1.0, 0.001, "model", 20)) == [StepResumed()]


def test_a_step_that_waits_for_cores_has_more_time_and_is_not_reported(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "hetrun")
    step, doing = Step(), CurrentStep(1.0, 0.127, "embed..blk.28.ffn.down")
    step.queue.waited = 0.75  # of every second
    assert [step.look(doing) for _ in range(21)] == [[]] * 21
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert (
        "the machine is busy: a step has been in embed..blk.28.ffn.down for 6.0 s, 0.127 s"
        in record.getMessage()
    )
    assert capfd.readouterr() == ("", ""), "no stacks"
    assert step.look(doing) == [StepStalled(doing.what, 21.0, 0.127, 20.0)]


def test_a_hang_beside_busy_programs_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    step, doing = Step(), CurrentStep(1.0, 0.001, "blk.0")
    step.queue.waited = 0.01  # threads that sleep for ever wait for no core; only the watchdog itself does
    assert [step.look(doing) for _ in range(6)] == [[]] * 6
    (stuck,) = step.look(doing)
    assert isinstance(stuck, StepStalled)
    assert (stuck.what, stuck.seconds) == ("blk.0", 6.0)
    assert 5.0 < stuck.limit_s < 5.1
    assert "thread 0x" in capfd.readouterr().err
    step.queue.waited = 3.9  # four that spin for ever
    spinning = CurrentStep(2.0, 0.001, "blk.0")
    assert step.look(spinning) == [StepResumed()]
    assert [step.look(spinning) for _ in range(40)] == [[]] * 40, "eight times five seconds"
    assert step.look(spinning) == [StepStalled("blk.0", 41.0, 0.001, 40.0)]


# The process says nothing and is not looked at by itself in a test: an hour is longer.
SILENT = Patience(look=3600.0)


async def test_a_silent_process_that_waits_for_cores_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(SILENT) as (client, http):
        life, queue = client._supervisor._life, Queue()
        life._silence._queue = queue
        queue.waited = 0.75  # of every second
        life.look(1.0)  # it was heard when it was ready
        for _ in range(38):
            life.look(1.0)
        assert await health(http) == (200, {"status": "ok"})
        assert not caplog.records
        for _ in range(4):
            life.look(1.0)
        said = (await health(http))[1]
        assert said["status"] == "stuck"
        assert 40.0 < said["seconds"] < 44.0
        assert "no sign of life for 4" in caplog.text
        first = client.pid
        assert (await collect(client, "say fine"))[-1].kind == "done"

        def heard() -> bool:
            life.look(0.0)
            return client.health.status == "ok"

        await until(heard)
        assert await health(http) == (200, {"status": "ok"})
        assert client.pid == first


async def test_a_silent_process_that_sleeps_is_ended_as_ever() -> None:
    async with opened(SILENT) as (client, _):
        first, life = client.pid, client._supervisor._life
        life._silence._queue = Queue()
        for _ in range(31):
            life.look(1.0)
        assert client.health.status == "stuck"
        life.look(1.0)  # ends it
        await until(lambda: client.pid != first)
        assert "gave no sign of life for 31 s" in life.obituary


# --- on cores that other programs keep busy


@pytest.mark.alone
@pytest.mark.slow
async def test_beside_busy_programs_who_computes_is_well_and_who_hangs_is_not(tmp_path: Path) -> None:
    patience = Patience(look=0.1, least=1.0, silent=20, kill_times=1.5, kill_least=0.3)
    with (tmp_path / "log").open("w+b") as log, burners(each=4):
        async with opened(patience, log) as (client, http):
            first = client.pid
            asked = asyncio.create_task(collect(client, "compute 3.0"))  # in one step, of a millisecond
            while not asked.done():
                assert await health(http) == (200, {"status": "ok"})
                await asyncio.sleep(0.05)
            assert "".join(event.text for event in asked.result()) == "computed"
            assert "Stacks of all threads" not in (tmp_path / "log").read_text()
            for hang in ("lock /never", "compute inf"):
                (event,) = await collect(client, hang)
                assert "was stuck in blk.7.ffn for" in str(event.error)
            assert client.pid != first
        assert "in deadlock" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("expected", "limit", "end"), [(0.01, 5, 30), (1.0, 20, 60), (None, 60, 180)])
def test_limits(expected: float | None, limit: float, end: float) -> None:
    assert Patience().limit(expected) == limit
    assert Patience().end(limit) == end
