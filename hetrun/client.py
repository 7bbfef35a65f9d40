"""The one contract between fronts and engines, and two ways to fulfil it.

`LocalClient` has the engine in this process; `WorkerClient` in a process of its own, so that a native crash
costs a restart instead of the front, and the front's event loop does not share the interpreter lock with it.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import BinaryIO, Protocol

from hetrun import child
from hetrun.config import Settings
from hetrun.errors import EngineStopped, UserError
from hetrun.events import Event, GenerateRequest, ModelInfo
from hetrun.worker import (
    ENGINE,
    Answer,
    Answerer,
    Cancel,
    Channel,
    Close,
    Failed,
    Load,
    Progress,
    Ready,
    Submit,
)

GRACE_S = 3.0  # how long a worker may take to close by itself
LAST_WORDS = 300  # characters of the worker's own output quoted when it died


class ChatClient(Protocol):
    """What the terminal chat and the server know of an engine."""

    @property
    def progress(self) -> float:
        """How far loading has come, from 0 to 1."""

    async def info(self) -> ModelInfo:
        """The model that runs; waits until it is loaded, and raises why there is none (any more)."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The request's events; the last is `done` or `error`. Closing the generator cancels the request."""

    async def close(self) -> None:
        """Cancel what runs and let go of the engine."""


class Submitter(Protocol):
    """Takes requests and calls back, from whatever thread it likes."""

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...


async def _events(engine: Submitter, request: GenerateRequest) -> AsyncGenerator[Event, None]:
    """From callbacks on another thread to an asynchronous generator."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Event] = asyncio.Queue()

    def on_event(event: Event) -> None:
        # A loop that is closed raises: then nobody waits any more, and our caller must live on.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(arrived.put_nowait, event)

    try:
        request_id = engine.submit(request, on_event)
    except UserError as error:
        # One way for fronts to learn of it, whether the engine refuses at once or later.
        yield Event("error", error=error)
        return
    ended = False
    try:
        while not ended:
            event = await arrived.get()
            ended = event.last
            yield event
    finally:
        if not ended:
            engine.cancel(request_id)


class LocalClient:
    """An engine in this process."""

    def __init__(self, engine: Answerer) -> None:
        self._engine = engine

    @property
    def progress(self) -> float:
        return 1.0

    async def info(self) -> ModelInfo:
        return self._engine.info

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return _events(self._engine, request)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


class WorkerClient:
    """An engine in a worker process, which starts to load at once.

    The worker's standard output and error go to `log`, or else to our standard error; a front that owns the
    screen gives a file, and the end of what was written there is quoted when the worker dies.
    """

    def __init__(self, settings: Settings, *, log: BinaryIO | None = None, engine: str = ENGINE) -> None:
        # Only what was chosen somewhere: the child finds the same defaults.
        options = {name: getattr(settings, name) for name in settings.origins}
        self._worker = Worker(Load(engine, options), log)

    @property
    def progress(self) -> float:
        return self._worker.progress

    @property
    def pid(self) -> int:
        return self._worker.pid

    async def info(self) -> ModelInfo:
        if self._worker.death is not None:
            raise self._worker.death
        # Shielded: one caller who gives up must not take the answer from the others.
        answer = asyncio.wrap_future(self._worker.ready)
        answer.add_done_callback(_looked_at)
        return await asyncio.shield(answer)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return _events(self._worker, request)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.stop)


def _looked_at(answer: asyncio.Future[ModelInfo]) -> None:
    """asyncio complains about an error that nobody looked at; the caller who gave up does not need it."""
    if not answer.cancelled():
        answer.exception()


class Worker:
    """One life of the engine's process. A restart is a new `Worker`."""

    def __init__(self, load: Load, log: BinaryIO | None = None) -> None:
        self.progress = 0.0
        self.ready: Future[ModelInfo] = Future()
        self._log = log
        self._lock = threading.Lock()
        self._running: dict[int, Callable[[Event], None]] = {}
        self.death: Exception | None = None  # why nothing is answered any more
        self._closing = False
        self._keys = itertools.count()
        self._process, ours = _begin(2 if log is None else log.fileno())
        self._channel = Channel(Connection(ours.detach()))
        self._channel.send(load)
        self._reader = threading.Thread(target=self._read, name="hetrun-worker-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        key = next(self._keys)
        with self._lock:
            death = self.death
            if death is None:
                self._running[key] = on_event
        if death is None:
            self._channel.send(Submit(key, request))
        else:
            on_event(Event("error", error=death))
        return key

    def cancel(self, request_id: int) -> None:
        self._channel.send(Cancel(request_id))

    def stop(self) -> None:
        """End the process: kindly, then not."""
        self._closing = True
        self._channel.send(Close())
        if not self.ready.done():
            self._process.terminate()  # it is loading, and listens only afterwards
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(GRACE_S)
                break
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self._take(message)
        except (EOFError, OSError):
            self._ended()

    def _take(self, message: object) -> None:
        match message:
            case Answer(key, event):
                with self._lock:
                    on_event = self._running.pop(key) if event.last else self._running[key]
                on_event(event)
            case Progress(fraction):
                self.progress = fraction
            case Ready(info):
                self.progress = 1.0
                self.ready.set_result(info)
            case Failed(error):
                self.death = error
                self.ready.set_exception(error)

    def _ended(self) -> None:
        code = self._process.wait()
        why = "the engine was closed" if self._closing else _obituary(code, self._last_words())
        with self._lock:
            death = self.death = self.death or EngineStopped(why)
            orphans = list(self._running.values())
            self._running.clear()
        if not self.ready.done():
            self.ready.set_exception(death)
        for on_event in orphans:
            on_event(Event("error", error=death))

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read()[-LAST_WORDS:].decode(errors="replace").strip()


def _begin(out: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    # The child inherits the mask: a Ctrl-C before it can ignore them would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return child.begin("from hetrun.worker import main; main({pipe})", out)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obituary(code: int, last_words: str) -> str:
    how = child.ending(code)
    if code == -signal.SIGKILL:
        how += ": a smaller --ctx or --ram helps"
    elif code < 0:
        how += "; please report what you asked it"
    said = f". Its last words: {last_words}" if last_words else ""
    return f"the engine's process {how}. Start hetrun again to go on{said}"
