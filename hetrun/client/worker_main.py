"""The engine's process: what runs in it. `worker_process.py` is the other end of its pipe."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar, cast

from hetrun.client.events import CurrentStep, Event, GenerateRequest, ModelInfo, Streaming
from hetrun.client.queries import Question
from hetrun.client.query_queues import Lanes
from hetrun.client.watchdog import Watchdog, write_stacks
from hetrun.client.wire_protocol import (
    LINGER_S,
    CancelMessage,
    Channel,
    CloseMessage,
    EventsMessage,
    FailureMessage,
    LoadMessage,
    Message,
    Progress,
    Pulse,
    QueryMessage,
    ReadyMessage,
    Remark,
    Submit,
    messages,
    portable,
)
from hetrun.errors import EngineStopped
from hetrun.system.garbage_collection import all_of_this_lasts

log = logging.getLogger(__name__)

A = TypeVar("A")

ENGINE, CHAT = "hetrun.api.local_model:for_conversations", "hetrun.api.local_model:for_a_chat"
RESTRICT = "hetrun.api.engine_restrictions:restrict"
# The first token of an answer passes through the front end to the client. If the next step began at once, on
# all cores, these processes would wait for a core: 8 ms on two cores, 2 if ours stays free for a moment.
HEAD_START_S = 0.002


class WorkerModel(Protocol):
    """What front ends use of `LocalModel`. `on_event` runs on the engine thread and must be quick."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def doing(self) -> CurrentStep | None:
        """The step being computed; None while the engine waits, or between two steps."""

    @property
    def streaming(self) -> Streaming | None:
        """Statistics of recent passes that read weights from disk; returns at once, on any thread."""

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def ask(self, question: Question[A]) -> A:
        """The answer to a query; blocks until it is there, on any thread."""
        ...

    def close(self) -> None: ...


def main(descriptor: int) -> None:
    """The child's whole life; `descriptor` is its end of the pipe."""
    # Ctrl-C reaches the whole foreground group, and the parent decides. Until here the signal was blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a service by some
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    write_stacks()
    os.set_inheritable(descriptor, False)  # a child of ours must not keep the pipe open when we are gone
    connection = Connection(descriptor)
    try:
        load, *others = messages(connection)
    except (EOFError, OSError):
        return  # the parent is gone already
    # Before there are other threads, which would go unrestricted.
    refused = _restrict(load) if isinstance(load, LoadMessage) and load.restrict else None
    channel = Channel(connection)
    orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
    for order in others:
        orders.put(order)
    threading.Thread(target=_read, args=(channel, orders), name="hetrun-pipe-reader", daemon=True).start()
    if refused is not None:
        channel.send(FailureMessage(portable(refused)))
    elif isinstance(load, LoadMessage):
        if load.verbose:
            logging.basicConfig(format="%(message)s")  # warnings come there anyway
            logging.getLogger("hetrun").setLevel(logging.INFO)
        if load.remarks:
            logger = logging.getLogger("hetrun")
            logger.addHandler(MessageHandler(channel))
            logger.propagate = False
        _work(channel, orders, load)
    channel.close()


def _restrict(load: LoadMessage) -> Exception | None:
    """Give up rights that the engine does not need; what is wrong, if it cannot start for that."""
    try:
        _named(load.restrict)(load.options)
    except Exception as error:
        return error
    return None


def _named(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))


class MessageHandler(logging.Handler):
    """Sends messages to the front end: written here, they would break its progress bar."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(Remark(record.levelno, self.format(record)))


def _read(channel: Channel, orders: queue.SimpleQueue[Message]) -> None:
    """Pass on orders, on a thread of its own, so that the parent's end is noticed while a model loads."""
    try:
        while True:
            for message in channel.receive():
                orders.put(message)
    except (EOFError, OSError):
        # The parent is gone: nothing waits for answers, and no other thread may delay the exit.
        os._exit(0)


def _work(channel: Channel, orders: queue.SimpleQueue[Message], load: LoadMessage) -> None:
    try:
        engine = _build(load, channel)
        all_of_this_lasts()
        channel.send(ReadyMessage(engine.info))
    except Exception as error:
        channel.send(FailureMessage(portable(error)))
        return
    closed = threading.Event()
    watchdog = Watchdog(lambda: engine.doing, load.patience, channel.send, lambda: Pulse(engine.streaming))
    threading.Thread(target=watchdog.run, args=(closed,), name="hetrun-watchdog", daemon=True).start()
    try:
        _serve(engine, channel, orders, Lanes(engine, channel.send))
    finally:
        closed.set()
        engine.close()


def _build(load: LoadMessage, channel: Channel) -> WorkerModel:
    reported = -1.0

    def progress(fraction: float) -> None:
        nonlocal reported
        if fraction >= reported + 0.01 or fraction >= 1.0 > reported:
            reported = fraction
            channel.send(Progress(fraction))

    build: Callable[..., WorkerModel] = _named(load.engine)
    if load.front:
        build = partial(build, front=load.front)
    return build(**load.options, progress=progress)


def _serve(engine: WorkerModel, channel: Channel, orders: queue.SimpleQueue[Message], lanes: Lanes) -> None:
    running: dict[int, int] = {}
    begun: set[int] = set()  # those of which a part was sent
    patient: dict[int, float] = {}  # how long their events may wait for others

    def answer(key: int, *events: Event) -> None:
        """Runs on the engine's thread."""
        last = events[-1]
        if isinstance(last.error, EngineStopped):
            # The engine ended by itself: exit, and the parent handles it like a crash.
            orders.put(FailureMessage(last.error))
            return
        if last.last:
            # Through the queue, because `submit` below may not have returned the engine's number yet.
            orders.put(EventsMessage(key, ()))
        if last.error is not None:
            events = (*events[:-1], replace(last, error=portable(last.error)))
        channel.send(EventsMessage(key, events))
        if last.last:
            begun.discard(key)
        elif key not in begun:
            begun.add(key)
            channel.linger_s = _linger_s(running, begun, patient)
            if len(running) <= 1:
                sleep(HEAD_START_S)

    def collect(key: int, so_far: list[Event], event: Event) -> None:
        """The same for a request that needs nothing before its end: until then it can be repeated."""
        so_far.append(event)
        if event.last:
            answer(key, *so_far)

    while True:
        match orders.get():
            case Submit(key, request, asked):
                on_event = partial(collect, key, []) if request.whole else partial(answer, key)
                patient[key] = request.linger_s
                try:
                    running[key] = engine.submit(_arrived(request, asked), on_event)
                except Exception as error:
                    answer(key, Event("error", error=error))
            case CancelMessage(key) if key in running:
                engine.cancel(running[key])
            case QueryMessage() as order:
                lanes.put(order)
            case EventsMessage(key):
                running.pop(key, None)
                patient.pop(key, None)
            case FailureMessage(error):
                channel.send(FailureMessage(portable(error)))
                return
            case CloseMessage():
                return
            case _:
                pass  # cancelling what has just ended
        channel.linger_s = _linger_s(running, begun, patient)


def _linger_s(running: Collection[int], begun: Collection[int], patient: Mapping[int, float]) -> float:
    """How long events may be held back: with several requests, no reader notices single tokens."""
    if len(running) > 1:
        return LINGER_S
    return max([patient.get(key, 0.0) for key in tuple(begun)], default=0.0)


def _arrived(request: GenerateRequest, asked: float) -> GenerateRequest:
    """The request with the time that is left of its deadline, since it may have waited for the worker."""
    if request.deadline_s is None:
        return request
    return replace(request, deadline_s=max(request.deadline_s - (monotonic() - asked), 0.0))
