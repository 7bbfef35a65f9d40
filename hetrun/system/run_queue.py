"""How long a process could not run because others had the cores, in the scheduler's own words, and limits of
time that do not count it.

The second number of /proc/PID/task/TID/schedstat is the time that a thread was ready to run and had no core.
It grows on a busy machine, and where a container has used its share up; it does not while a thread sleeps or
computes. It is true inside containers as well, where /proc/stat may show other cores.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from hetrun.system.sysfs import line_of

NS = 1e-9
LOOK_S, SHORTEST_S = 0.1, 0.01  # between two looks of a limit; the second near its end
# Times as long a limit may take on a busy machine: what spins for ever waits for cores, too.
MOST_STRETCH = 20.0
FORM = re.compile(r"\d{1,19} (\d{1,19}) \d{1,19}")  # it ran, it waited, how often


class RunQueue:
    """Compares how long the threads of a process waited for cores between one look and the next."""

    def __init__(self, pid: int, root: Path = Path("/proc")) -> None:
        self._tasks = root / str(pid) / "task"
        self._before: dict[str, int] = {}

    def forget(self) -> None:
        """The next look has nothing to compare with."""
        self._before = {}

    def look(self) -> float:
        """Seconds that they waited since the last look, all together; 0 where nothing is known."""
        before, self._before = self._before, self._read()
        if not before:
            return 0.0
        # A thread that was not there has waited only since; the number of one that ended may come back.
        return NS * sum(max(0, now - before.get(thread, 0)) for thread, now in self._before.items())

    def _read(self) -> dict[str, int]:
        """Nanoseconds that each thread waited ever; none where the kernel does not say, or it is gone."""
        try:
            threads = [task.name for task in self._tasks.iterdir()]
        except OSError:
            return {}
        found = {thread: line_of(self._tasks / thread / "schedstat") for thread in threads}
        return {thread: int(said[1]) for thread, line in found.items() if (said := FORM.fullmatch(line))}


class Standstill:
    """How long nothing has come of a process, and how much of that is its own doing."""

    def __init__(self, queue: RunQueue, most: float) -> None:
        """A busy machine explains that something takes `most` times as long, and no more: threads that spin
        for ever wait for cores, too."""
        self.seconds = 0.0
        self._waited = 0.0  # the part of it in which some thread had no core
        self._queue = queue
        self._most = most

    def begin(self) -> None:
        """Something has come."""
        self.seconds = self._waited = 0.0
        self._queue.forget()

    def add(self, elapsed: float) -> None:
        """Nothing has come for `elapsed` more seconds."""
        # The sum over the threads, not the most of them: they wait for each other after each operation, so
        # the whole stands still while any of them has no core.
        self._waited += min(self._queue.look(), elapsed)
        self.seconds += elapsed

    @property
    def stretch(self) -> float:
        """How many times as long as on a machine of its own it may take."""
        own = max(self.seconds - self._waited, self.seconds / self._most)
        return self.seconds / own if own else 1.0


class TimeLimit:
    """A limit for what other processes do, or this one. Time in which one of them waited for a core, or this
    one could not look, does not count, up to `most` times the limit."""

    def __init__(self, seconds: float, *pids: int, most: float = MOST_STRETCH) -> None:
        """Begins with the first call of `wait_s`. A pid of 0 is of no process."""
        self.seconds = seconds
        self._queues = [RunQueue(pid) for pid in set(pids) - {0}]
        self._most = most
        self._before: float | None = None
        self._counted = self._elapsed = 0.0

    def wait_s(self) -> float:
        """How long to wait until the next call; raises TimeoutError if the limit is over."""
        now = monotonic()
        if self._before is None:
            self._before = now
        if (elapsed := now - self._before) >= min(LOOK_S / 2, self._left):  # mostly an answer comes before
            self._before = now
            # As in the watchdog: who looks late has waited for a core itself, or was stopped.
            self._count(min(elapsed, 2 * LOOK_S))
        if self._left <= 0:
            raise TimeoutError
        return min(max(self._left, SHORTEST_S), LOOK_S)

    @property
    def _left(self) -> float:
        return min(self.seconds - self._counted, self._most * self.seconds - self._elapsed)

    def _count(self, elapsed: float) -> None:
        self._counted += max(0.0, elapsed - sum(queue.look() for queue in self._queues))
        self._elapsed += elapsed


@asynccontextmanager
async def time_limit(seconds: float, *pids: int) -> AsyncGenerator[None, None]:
    """As asyncio.timeout, but with a `TimeLimit`."""
    import asyncio  # on use: a worker's process does without

    async def watch() -> None:
        try:
            while True:
                await asyncio.sleep(limit.wait_s())
        except TimeoutError:
            timeout.reschedule(asyncio.get_running_loop().time())

    limit = TimeLimit(seconds, *pids)
    async with asyncio.timeout(None) as timeout:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
