"""The engine's process: what runs in it, and the messages that cross its pipe.

The parent sends one `Load`, then any number of `Submit` and `Cancel`, then `Close`. The child answers with
`Progress` while it loads, one `Ready` or `Failed`, then one `Answer` per event. Both sides write through a
`Channel`, which never makes its caller wait: a front's event loop and the engine's thread are the callers.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Protocol, cast

from hetrun.errors import HetrunError, UserError
from hetrun.events import Event, GenerateRequest, ModelInfo

log = logging.getLogger(__name__)

ENGINE = "hetrun.llm:for_conversations"


class Answerer(Protocol):
    """The part of `LLM` that fronts use. `on_event` is called on the engine's thread and must be quick."""

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def close(self) -> None: ...


# --- messages


@dataclass(frozen=True, slots=True)
class Load:
    """Build the engine: `engine` is "module:callable", called with `options` and `progress`."""

    engine: str
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Submit:
    key: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class Close:
    """Finish: cancel what runs and exit."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Loading has come this far, from 0 to 1."""

    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """Loading failed; the process ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Answer:
    key: int
    event: Event


Message = Load | Submit | Cancel | Close | Progress | Ready | Failed | Answer


class Channel:
    """Messages over a pipe; sending queues, and a thread writes all that is pending in one go."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="hetrun-pipe-writer", daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        self._pending.put(message)

    def receive(self) -> Sequence[Message]:
        """Wait for the next messages; EOFError or OSError when the other side is gone."""
        return cast("Sequence[Message]", self._connection.recv())

    def close(self) -> None:
        """Write what is pending, then hang up."""
        self._pending.put(None)
        # A peer that no longer reads must not keep us; the thread is a daemon.
        self._writer.join(timeout=2)
        self._connection.close()

    def _write(self) -> None:
        while (first := self._pending.get()) is not None:
            batch: list[Message] = [first]
            last = False
            while not self._pending.empty() and not last:
                if (message := self._pending.get()) is None:
                    last = True
                else:
                    batch.append(message)
            try:
                self._connection.send(batch)
            except OSError:
                # The reader of this side sees the end of the pipe and says so; nothing is lost that mattered.
                return
            if last:
                return


# --- the child


def main(descriptor: int) -> None:
    """The child's whole life; `descriptor` is its end of the pipe."""
    # Ctrl-C reaches the whole foreground group, and the parent decides. Until here the signal was blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    channel = Channel(Connection(descriptor))
    orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, orders), name="hetrun-pipe-reader", daemon=True).start()
    load = orders.get()
    if isinstance(load, Load):
        _work(channel, orders, load)
    channel.close()


def _read(channel: Channel, orders: queue.SimpleQueue[Message]) -> None:
    """Pass orders on; a thread of its own, so that the end of the parent is noticed while a model loads."""
    try:
        while True:
            for message in channel.receive():
                orders.put(message)
    except (EOFError, OSError):
        # The parent is gone: nobody waits for anything, and no other thread may hold the exit up.
        os._exit(0)


def _work(channel: Channel, orders: queue.SimpleQueue[Message], load: Load) -> None:
    try:
        engine = _build(load, channel)
        channel.send(Ready(engine.info))
    except Exception as error:
        channel.send(Failed(portable(error)))
        return
    try:
        _serve(engine, channel, orders)
    finally:
        engine.close()


def _build(load: Load, channel: Channel) -> Answerer:
    reported = -1.0

    def progress(fraction: float) -> None:
        nonlocal reported
        if fraction >= reported + 0.01 or fraction >= 1.0 > reported:
            reported = fraction
            channel.send(Progress(fraction))

    module, _, name = load.engine.partition(":")
    build: Callable[..., Answerer] = getattr(import_module(module), name)
    return build(**load.options, progress=progress)


def _serve(engine: Answerer, channel: Channel, orders: queue.SimpleQueue[Message]) -> None:
    running: dict[int, int] = {}

    def answer(key: int, event: Event) -> None:
        """Runs on the engine's thread."""
        if event.last:
            # Through the queue, because `submit` below may not have returned the engine's number yet.
            orders.put(Answer(key, event))
        if event.error is not None:
            event = replace(event, error=portable(event.error))
        channel.send(Answer(key, event))

    while True:
        match orders.get():
            case Submit(key, request):
                try:
                    running[key] = engine.submit(request, partial(answer, key))
                except Exception as error:
                    answer(key, Event("error", error=error))
            case Cancel(key) if key in running:
                engine.cancel(running[key])
            case Answer(key):
                running.pop(key, None)
            case Close():
                return
            case _:
                pass  # cancelling what has just ended


def portable(error: Exception) -> Exception:
    """The error as it can cross the pipe; one that is our fault carries its traceback as a note."""
    if not isinstance(error, UserError) and not getattr(error, "__notes__", None):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception as problem:
        log.debug("%s cannot be pickled: %s", type(error).__name__, problem)
        copy = None
    if isinstance(copy, Exception):
        return copy
    plain = HetrunError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        plain.add_note(note)
    return plain
