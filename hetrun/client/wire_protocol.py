"""The messages between a front end and the engine's process, and how they cross the pipe.

The parent sends one `LoadMessage`, then any number of `Submit`, `CancelMessage` and `QueryMessage`,
then `CloseMessage`. The child answers with `Progress` while it loads and one `ReadyMessage` or
`FailureMessage`; then come `EventsMessage`s, a `ReplyMessage` to each `QueryMessage`, and a `Pulse` from
time to time.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from hetrun.client.events import Event, GenerateRequest, ModelInfo, Streaming
from hetrun.client.queries import Question
from hetrun.errors import DeadlineExceeded, HetrunError, Overloaded, UserError

log = logging.getLogger(__name__)

# A step produces its tokens over about a millisecond; one message carries all of them.
LINGER_S = 0.002
SMALL = 16 << 10  # bytes; a pipe that is writable has room for this many
ASK_FOR_STACKS = signal.SIGUSR1  # the one message that needs no pipe
_PLAIN = Event("token")


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a worker, in seconds. Tests use shorter ones."""

    look: float = 1.0  # between two looks
    times: float = 20.0  # a step is stuck if it takes this many times its predicted time
    least: float = 5.0  # but not before
    unknown: float = 60.0  # without a prediction
    silent: float = 10.0  # a process without a pulse for this long is stuck
    kill_times: float = 3.0  # a worker that stays stuck this many times longer is ended
    kill_least: float = 30.0
    busy: float = 8.0  # at most this many times as long, if its threads wait for busy cores

    def limit(self, expected_s: float | None) -> float:
        """When a step without progress counts as stuck, on an otherwise idle machine."""
        return self.unknown if expected_s is None else max(self.times * expected_s, self.least)

    def end(self, limit: float) -> float:
        """When a worker that is stuck since `limit` is ended."""
        return max(self.kill_times * limit, self.kill_least)


@dataclass(frozen=True, slots=True)
class LoadMessage:
    """Build the engine: `engine` is "module:callable", called with `options` and `progress`."""

    engine: str
    options: Mapping[str, object]
    patience: Patience = Patience()
    verbose: bool = False  # also report the engine's decisions
    remarks: bool = False  # messages go through the pipe instead of standard error
    restrict: str = ""  # "module:callable", called with `options` before other threads begin
    front: int = 0  # bytes that the sender takes itself, if the engine's memory limit is for both


@dataclass(frozen=True, slots=True)
class Submit:
    key: int
    request: GenerateRequest
    asked: float  # its arrival by time.monotonic, which is the same clock in all processes


@dataclass(frozen=True, slots=True)
class CancelMessage:
    key: int


@dataclass(frozen=True, slots=True)
class CloseMessage:
    """Cancel running requests and exit."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The loading progress, from 0 to 1."""

    fraction: float


@dataclass(frozen=True, slots=True)
class ReadyMessage:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class FailureMessage:
    """Loading failed, or the engine ended by itself later; the process ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class QueryMessage:
    """A query that is not a generation."""

    key: int
    question: Question[Any]


@dataclass(frozen=True, slots=True)
class ReplyMessage:
    """The answer to a query, of the query's type, or an error."""

    key: int
    answer: object
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """The process is alive."""

    streaming: Streaming | None = None  # statistics of recent passes that read weights from disk


@dataclass(frozen=True, slots=True)
class StepStalled:
    """A step makes no progress; sent repeatedly until it does."""

    what: str  # the segment
    seconds: float  # since it began
    expected_s: float | None
    limit_s: float  # it counts as stuck since then


@dataclass(frozen=True, slots=True)
class StepResumed:
    """The step makes progress again, or has ended."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A message to the user from the engine's process; the front end decides where to show it."""

    level: int  # of `logging`
    text: str


@dataclass(frozen=True, slots=True)
class EventsMessage:
    """The next events of a request; they arrive together or not at all."""

    key: int
    events: tuple[Event, ...]


ToWorker = LoadMessage | Submit | CancelMessage | QueryMessage | CloseMessage
FromWorker = (
    Progress
    | ReadyMessage
    | FailureMessage
    | EventsMessage
    | ReplyMessage
    | Pulse
    | StepStalled
    | StepResumed
    | Remark
)
Message = ToWorker | FromWorker


def messages(connection: Connection) -> Sequence[Message]:
    """Wait for the next messages; EOFError or OSError when the other side is gone."""
    return [unpacked(message) for message in pickle.loads(connection.recv_bytes())]


class Channel:
    """Messages over a pipe, both ways.

    Sending never blocks, because its callers are a front end's event loop and the engine's thread. A small
    message is written at once if the pipe is empty: the caller computes next, and a thread that has to wake
    up first would wait for a core. Other messages are queued, and a thread writes all pending ones together.
    """

    def __init__(self, connection: Connection) -> None:
        self.linger_s = 0.0  # how long a message may wait for others
        self._connection = connection
        self._pending: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._unsent = 0  # messages that are pending or being written by the thread
        self._lock = threading.Lock()  # held by senders, to keep the order
        self._room = select.poll()
        self._room.register(connection.fileno(), select.POLLOUT)
        self._writer = threading.Thread(target=self._write, name="hetrun-pipe-writer", daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        with self._lock:
            if self.linger_s or self._unsent or not self._sent_at_once(message):
                self._unsent += 1
                self._pending.put(message)

    def _sent_at_once(self, message: Message) -> bool:
        """Whether a message could be written without waiting for the other side."""
        data = pickle.dumps([packed(message)], pickle.HIGHEST_PROTOCOL)
        if len(data) > SMALL or not self._room.poll(0):
            return False
        try:
            self._connection.send_bytes(data)
        except OSError:
            self._hang_up()
        return True

    def receive(self) -> Sequence[Message]:
        """Wait for the next messages; EOFError or OSError when the other side is gone."""
        return messages(self._connection)

    def close(self) -> None:
        """Write what is pending, then hang up."""
        self._pending.put(None)
        # A peer that no longer reads must not block the exit; the thread is a daemon.
        self._writer.join(timeout=2)
        self._connection.close()

    def _hang_up(self) -> None:
        """A message is lost. Mostly because the other side is gone; if not, it must not wait for it for ever.
        Either way the readers of both sides now see the end of the pipe, and report it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        last = False
        while not last and (first := self._pending.get()) is not None:
            if self.linger_s:
                time.sleep(self.linger_s)
            batch = [packed(first)]
            while not self._pending.empty() and not last:
                if (message := self._pending.get()) is None:
                    last = True
                else:
                    batch.append(packed(message))
            try:
                # Not `Connection.send`, whose pickler looks everything up twice.
                self._connection.send_bytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
            except OSError:
                self._hang_up()
                return
            with self._lock:
                self._unsent -= len(batch)


def packed(message: Message) -> object:
    """An answer without the names and defaults of its events, which would be most of its bytes."""
    if isinstance(message, EventsMessage):
        return (message.key, *map(_packed_event, message.events))
    return message


def unpacked(message: object) -> Message:
    if isinstance(message, tuple):
        return EventsMessage(message[0], tuple(map(_unpacked_event, message[1:])))
    return cast("Message", message)


def _packed_event(event: Event) -> Event | tuple[int | None, str]:
    plain = (
        event.kind == "token"
        and event.logprob is None
        and event.usage is _PLAIN.usage
        and event.timings is _PLAIN.timings
        and event.finish_reason is None
        and event.error is None
        and not event.prompt_logprobs
        and not event.echo
        and not event.opened
        and event.progress is None
    )
    return (event.token, event.text) if plain else event


def _unpacked_event(packed: Event | tuple[int | None, str]) -> Event:
    return Event("token", packed[1], packed[0]) if isinstance(packed, tuple) else packed


def portable(error: Exception) -> Exception:
    """The error in a form that can cross the pipe; an internal error carries its traceback as a note."""
    ours = not isinstance(error, (UserError, Overloaded, DeadlineExceeded))
    if ours and not getattr(error, "__notes__", None):
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
