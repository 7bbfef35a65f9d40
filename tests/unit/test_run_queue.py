"""How long a process waited for cores, by made-up words of a scheduler, and how much patience that gives."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from subprocess import DEVNULL, PIPE

import pytest

from hetrun.system import run_queue, subprocesses
from hetrun.system.run_queue import RunQueue, Standstill, TimeLimit, time_limit

SECOND = 1_000_000_000  # the scheduler counts nanoseconds


class Threads:
    """The folder that /proc has of a process."""

    def __init__(self, root: Path, pid: int = 7) -> None:
        self.folder = root / str(pid) / "task"
        self.queue = RunQueue(pid, root)

    def waited(self, thread: int, seconds: float, text: str = "{ran} {waited} 12\n") -> None:
        folder = self.folder / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(text.format(ran=5, waited=round(seconds * SECOND)))


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    return Threads(tmp_path)


def test_it_is_what_all_threads_waited_since_the_last_look(threads: Threads) -> None:
    threads.waited(7, 100.0)
    threads.waited(8, 50.0)
    assert threads.queue.look() == 0, "there is nothing to compare with"
    threads.waited(7, 100.5)
    threads.waited(8, 50.25)
    assert threads.queue.look() == pytest.approx(0.75)
    assert threads.queue.look() == 0
    threads.waited(8, 51.25)
    threads.queue.forget()
    assert threads.queue.look() == 0


def test_threads_come_and_go(threads: Threads) -> None:
    threads.waited(7, 1.0)
    threads.waited(8, 9.0)
    threads.queue.look()
    rmtree(threads.folder / "8")
    threads.waited(9, 0.5)
    assert threads.queue.look() == pytest.approx(0.5), "a new one has waited since it began"
    threads.waited(9, 0.0)
    assert threads.queue.look() == 0, "another one that got the same number"


@pytest.mark.parametrize(
    "text", ["", "5", "5 {waited}", "a b c", "5 -{waited} 12", "5 {waited} 12 9", "5 ² 1"]
)
def test_what_a_kernel_does_not_say_is_nothing(threads: Threads, text: str) -> None:
    for seconds in (1.0, 2.0):
        threads.waited(7, seconds, text)
        assert threads.queue.look() == 0


def test_a_process_that_is_not_there_waits_for_nothing(threads: Threads) -> None:
    assert threads.queue.look() == threads.queue.look() == 0
    threads.waited(7, 3.0)
    assert threads.queue.look() == 0, "it is not known since when"


def test_this_process_can_be_asked() -> None:
    queue = RunQueue(os.getpid())
    assert [queue.look() >= 0.0 for _ in range(2)] == [True, True]


class Told(RunQueue):
    """Says what it is told."""

    def __init__(self, waited: float) -> None:
        super().__init__(0)
        self.waited = waited

    def look(self) -> float:
        return self.waited


@pytest.mark.parametrize(
    ("waited", "stretch"),
    [
        (0.0, 1.0),  # it sleeps, or computes on cores of its own
        (0.5, 2.0),
        (0.75, 4.0),
        (0.9, 8.0),  # nothing is explained for ever
        (3.0, 8.0),  # several threads
    ],
)
def test_patience_follows_the_time_without_a_core(waited: float, stretch: float) -> None:
    still = Standstill(Told(waited), most=8.0)
    assert still.stretch == 1.0
    for _ in range(3):
        still.add(1.0)
    assert still.seconds == 3.0
    assert still.stretch == pytest.approx(stretch)
    still.begin()
    assert (still.seconds, still.stretch) == (0.0, 1.0)


def test_a_busy_minute_is_no_excuse_for_the_next() -> None:
    queue = Told(1000.0)  # many threads
    still = Standstill(queue, most=8.0)
    for _ in range(60):
        still.add(1.0)
    queue.waited = 0.0
    for _ in range(60):
        still.add(1.0)
    assert still.stretch == pytest.approx(2.0)


class MadeUpClock:
    """The time that a limit sees: all that it waits for passes, and `late_s` more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.late_s = 0.0
        monkeypatch.setattr(run_queue, "monotonic", lambda: self.now)

    def until_over(self, limit: TimeLimit) -> float:
        began = self.now
        with suppress(TimeoutError):
            while self.now < began + 1000.0:
                self.now += limit.wait_s() + self.late_s
        return self.now - began


@pytest.mark.parametrize(
    ("share", "seconds"),
    [
        (0.0, 1.2),  # it sleeps, is stopped, or computes on a core of its own
        (0.5, 2.4),
        (0.75, 4.8),
        (1.0, 24.0),  # nothing is waited for without an end
        (8.0, 24.0),  # many threads
    ],
)
def test_a_limit_does_not_count_time_without_a_core(
    monkeypatch: pytest.MonkeyPatch, share: float, seconds: float
) -> None:
    clock, limit = MadeUpClock(monkeypatch), TimeLimit(1.2)
    seen = clock.now

    class Waits(RunQueue):
        """Its thread had no core for a share of the time."""

        def look(self) -> float:
            nonlocal seen
            before, seen = seen, clock.now
            return share * (seen - before)

    limit._queues = [Waits(0)]
    assert clock.until_over(limit) == pytest.approx(seconds, abs=2 * run_queue.LOOK_S)


def test_time_in_which_we_could_not_look_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limit = MadeUpClock(monkeypatch), TimeLimit(1.0)
    limit.wait_s()
    clock.now += 3600.0  # stopped by Ctrl-Z
    assert limit.wait_s() > 0
    clock.late_s = 0.9
    assert clock.until_over(limit) == pytest.approx(4.0, abs=1.0)


def test_an_answer_that_comes_at_once_costs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limit = MadeUpClock(monkeypatch), TimeLimit(1.0, os.getpid(), 0)
    [queue] = limit._queues
    monkeypatch.setattr(queue, "look", lambda: pytest.fail("it looked"))
    for _ in range(40):
        assert limit.wait_s() == run_queue.LOOK_S
        clock.now += 0.001


async def test_a_limit_ends_what_is_awaited() -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(0.01, os.getpid()):
            await asyncio.Event().wait()
    async with time_limit(60.0):
        pass
    with pytest.raises(KeyError):
        async with time_limit(60.0):
            raise KeyError


def test_a_command_that_takes_too_long_is_ended() -> None:
    code = "import sys; print(sys.stdin.read().upper(), end=''); sys.exit(3)"
    command = [sys.executable, "-c", code]
    many = b"x" * (1 << 20)
    assert subprocesses.run(command, 60.0, given=many, out=PIPE, err=DEVNULL) == (3, many.upper())
    assert subprocesses.run(command, 60.0, out=PIPE, err=DEVNULL) == (3, b"")
    with pytest.raises(TimeoutError):
        subprocesses.run([sys.executable, "-c", "input()\nwhile True: input"], 0.0, out=PIPE, err=DEVNULL)
