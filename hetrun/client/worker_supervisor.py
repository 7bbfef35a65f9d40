"""Keeps an engine's process running: when one life ends, the next begins.

After a life that had requests or was ready, the next one begins at once. After repeated failures to load, or
repeated ends while idle, the next one begins later and later, and finally not at all. The first load is not
tried twice: the user is waiting for its error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from time import monotonic
from typing import BinaryIO, TypeVar

from hetrun.client.events import ModelInfo
from hetrun.client.interface import Health
from hetrun.client.queries import Question
from hetrun.client.wire_protocol import LoadMessage
from hetrun.client.worker_process import Life
from hetrun.errors import EngineStopped

log = logging.getLogger(__name__)

A = TypeVar("A")

MOST_DELAY_S = 30.0
MOST_FAILED = 6  # loads in a row
SOUND_S = 60.0  # a process that lived this long was healthy


class Supervisor:
    """The current life, and its successors."""

    def __init__(self, load: LoadMessage, log: BinaryIO | None = None) -> None:
        """The first life begins now."""
        self._load = load
        self._log = log
        self._lock = threading.Lock()  # a life begins, or nothing begins any more
        self._closing = threading.Event()
        self._ready: Future[Life] = Future()  # the current life, once it is ready
        self._info: ModelInfo | None = None
        self.failed: Exception | None = None  # why no requests are answered any more
        self._reason = ""
        self._failed_loads = 0  # in a row
        self._idle_deaths = 0  # in a row
        self._life = Life(load, log)
        self._threads = [
            threading.Thread(target=work, name=f"hetrun-worker-{name}", daemon=True)
            for name, work in (("reader", self._live), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def progress(self) -> float:
        return self._life.progress

    @property
    def pid(self) -> int:
        return self._life.pid

    @property
    def health(self) -> Health:
        life = self._life
        if self.failed is not None:
            return Health("failed", life.progress, str(self.failed))
        if not self._ready.done():
            return Health("loading", life.progress, self._reason)
        if stuck := life.stuck:
            return Health("stuck", reason=self._reason, stuck=stuck, streaming=life.streaming)
        return Health("ok", reason=self._reason, streaming=life.streaming)

    @property
    def known(self) -> ModelInfo | None:
        """The model that runs or last ran, if known."""
        return self._info

    async def info(self) -> ModelInfo:
        """The model that runs, or last ran during a restart; raises if there is none (any more)."""
        if self.failed is not None:
            raise self.failed
        if self._info is None:
            await self.ready()
        assert self._info is not None
        return self._info

    async def ready(self) -> Life:
        """A life that accepts requests; waits while it loads, and raises if there is none."""
        ready = self._ready
        if ready.done():
            return ready.result()
        # Shielded: a caller that gives up must not cancel the others' wait.
        answer = asyncio.wrap_future(ready)
        answer.add_done_callback(_looked_at)
        return await asyncio.shield(answer)

    async def ask(self, question: Question[A]) -> A:
        """Query the current life, or the next; `WorkerDied` if it dies meanwhile."""
        while True:
            life = await self.ready()
            if (answer := life.ask(question)) is not None:
                return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the current life; no further one begins."""
        self._closing.set()
        with self._lock:
            life = self._life
        life.stop()
        for thread in self._threads:
            thread.join()

    # --- on the supervisor's threads

    def _live(self) -> None:
        try:
            life: Life | None = self._life
            while life is not None:
                life.run(self._became_ready)
                life = self._next(life)
        except BaseException as error:  # a bug; no caller may wait forever because of it
            log.exception("the supervisor failed")
            self._give_up(EngineStopped(f"hetrun failed ({type(error).__name__}: {error}); please report it"))

    def _watch(self) -> None:
        # Looks are counted instead of clock time, because the machine may have slept or the job been stopped.
        most, last = 2 * self._load.patience.look, monotonic()
        while not self._closing.wait(self._load.patience.look):
            now = monotonic()
            self._life.look(min(now - last, most))
            last = now

    def _became_ready(self) -> None:
        if self._reason:
            log.warning("the engine's process is ready again")
        self._info = self._life.info
        self._failed_loads = 0
        self._ready.set_result(self._life)

    def _next(self, life: Life) -> Life | None:
        """The next life; None if there is none."""
        self._load = life.load
        self._count(life)
        if (end := self._end(life)) is not None:
            self._give_up(end)
            life.bury()
            return None
        self._reason = life.obituary
        delay = delay_s(self._failures)
        log.warning("%s. It is being restarted%s", self._reason, f" in {delay:.0f} s" if delay else "")
        if self._ready.done():
            self._ready = Future()  # first: requests that learn of the death ask for the next life
        life.bury()
        return self._begin(delay)

    def _count(self, life: Life) -> None:
        if life.info is None:
            self._failed_loads += 1
        elif life.answered or not life.idle or life.age_s > SOUND_S:
            self._idle_deaths = 0
        else:
            self._idle_deaths += 1

    def _end(self, life: Life) -> Exception | None:
        """Why there is no further life; None if there is one."""
        if self._closing.is_set():
            return EngineStopped("the engine was closed")
        if self._info is None:  # the first load
            return life.error or EngineStopped(f"{life.obituary}. Start hetrun again to continue")
        if self._failed_loads == MOST_FAILED:
            why = life.error or life.obituary
            return EngineStopped(f"reloading the model failed {MOST_FAILED} times; the last error: {why}")
        return None

    @property
    def _failures(self) -> int:
        """Failures in a row; a single death while idle may have been an accident."""
        return self._failed_loads + max(self._idle_deaths - 1, 0)

    def _begin(self, delay: float) -> Life | None:
        while not self._closing.wait(delay):
            with self._lock:
                if self._closing.is_set():
                    break
                try:
                    self._life = Life(self._load, self._log)
                except OSError as error:  # no memory or no descriptors; this may pass
                    self._reason = f"no process can be started for the engine: {error}"
                    log.warning("%s", self._reason)
                    self._failed_loads += 1
                    if self._failed_loads == MOST_FAILED:
                        self._give_up(EngineStopped(self._reason))
                        return None
                    delay = delay_s(self._failures)
                else:
                    return self._life
        self._give_up(EngineStopped("the engine was closed"))
        return None

    def _give_up(self, error: Exception) -> None:
        self.failed = error
        if self._ready.done():
            self._ready = Future()
        self._ready.set_exception(error)


def delay_s(failures: int) -> float:
    """How long to wait after this many failures in a row."""
    return min(2.0 ** min(failures - 1, 10), MOST_DELAY_S) if failures else 0.0


def _looked_at(answer: asyncio.Future[Life]) -> None:
    """Retrieve the error of an abandoned call, so that asyncio doesn't complain about it."""
    if not answer.cancelled():
        answer.exception()
