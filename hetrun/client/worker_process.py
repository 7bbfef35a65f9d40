"""One life of the engine's process, as its parent sees it. A restart is a new `Life`."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any, BinaryIO, TypeVar, cast

from hetrun.client.events import Event, GenerateRequest, ModelInfo, Streaming
from hetrun.client.queries import Question, SetRam
from hetrun.client.wire_protocol import (
    ASK_FOR_STACKS,
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
    ReplyMessage,
    StepResumed,
    StepStalled,
    Submit,
)
from hetrun.errors import EngineStopped, Overloaded
from hetrun.system import subprocesses
from hetrun.system.run_queue import RunQueue, Standstill

log = logging.getLogger(__name__)
remarks = logging.getLogger("hetrun.engine")  # the worker's messages appear under this name

GRACE_S = 3.0  # how long a worker may take to close by itself
WRITING_S = 60.0  # and if it has to write prompts first
STACKS_S = 0.5  # how long it may take to write its stacks before it is killed
STACKS = "Fatal Python error: "  # the first line of the stacks after a crash
LAST_WORDS = 300  # characters of the worker's own output quoted when it died
MOST_ASKED = 256  # queries at a time, including abandoned ones
RETRY_S = 1.0  # the time of queries is not predicted

A = TypeVar("A")
OnEvents = Callable[[tuple[Event, ...]], None]


class WorkerDied(EngineStopped):
    """The worker died while it had the request, which may be repeated if none of its answer was passed on."""


class Life:
    """The process, its requests, and its reported state."""

    def __init__(self, load: LoadMessage, log: BinaryIO | None = None) -> None:
        """Starts at once; its output goes to `log`, or else to our standard error."""
        self.progress = 0.0
        self.info: ModelInfo | None = None  # once it is ready
        self.error: Exception | None = None  # why it failed
        self.answered = False  # whether any request got an event
        self.streaming: Streaming | None = None  # as last reported
        self.load = load  # orders that bring a new process into this one's state
        self._log = log
        self._log_began = 0 if log is None else os.fstat(log.fileno()).st_size
        self._patience = load.patience
        self._grace_s = WRITING_S if load.options.get("prompt_cache") else GRACE_S
        self._lock = threading.Lock()
        self._born = monotonic()
        self._running: dict[int, OnEvents] = {}
        self._asked: dict[int, tuple[Question[Any], Future[object]]] = {}
        self._over = False
        self._closing = False
        self._end: str | None = None  # why we ended it
        self._heard = False  # whether it sent anything since the last look
        self._silent: StepStalled | None = None  # it sends no pulse, and doesn't merely wait for a core
        self._step: StepStalled | None = None  # reported by its own watchdog
        self._keys = itertools.count()
        self._process, ours = _begin(2 if log is None else log.fileno())
        self._silence = Standstill(RunQueue(self._process.pid), self._patience.busy)
        self._channel = Channel(Connection(ours.detach()))
        self._channel.send(replace(load, remarks=log is None))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age_s(self) -> float:
        return monotonic() - self._born

    @property
    def idle(self) -> bool:
        """Whether it is idle."""
        return not self._running and not self._asked

    @property
    def stuck(self) -> StepStalled | None:
        """Whether it makes no progress: no pulse, or a stuck step."""
        return self._silent or self._step

    def submit(self, request: GenerateRequest, asked: float, on_events: OnEvents) -> int | None:
        """Submit a request and return its key; None if the process has ended.

        `on_events` is called on another thread; if it dies, with one error event that holds a `WorkerDied`.
        """
        key = next(self._keys)
        with self._lock:
            if self._over:
                return None
            self._running[key] = on_events
        self._channel.send(Submit(key, request, asked))
        return key

    def ask(self, question: Question[A]) -> Future[A] | None:
        """Send a query; the answer, or an error: `WorkerDied` if it dies. None if the process has ended."""
        key, answer = next(self._keys), Future[object]()
        answer.set_running_or_notify_cancel()  # an abandoned query is not cancelled
        with self._lock:
            if self._over:
                return None
            if len(self._asked) >= MOST_ASKED:
                waiting = f"the engine already has {MOST_ASKED} queries"
                raise Overloaded(f"{waiting}; try again in {RETRY_S:g} s", RETRY_S)
            self._asked[key] = question, answer
        self._channel.send(QueryMessage(key, question))
        return cast("Future[A]", answer)

    def cancel(self, key: int) -> None:
        self._channel.send(CancelMessage(key))

    def run(self, when_ready: Callable[[], None]) -> None:
        """Read its messages until it has ended, and reap it; on the caller's thread."""
        try:
            while True:
                messages = self._channel.receive()
                self._heard = True  # before anybody learns of the messages
                for message in messages:
                    self._take(message)
                    if isinstance(message, ReadyMessage):
                        when_ready()
        except (EOFError, OSError):
            pass  # it hung up
        except Exception:
            log.exception("a message from the engine's process cannot be read")
        self._reap()
        self._channel.close()

    def bury(self) -> None:
        """Tell all waiting requests that the process has ended, and accept no more."""
        died = WorkerDied(self.obituary)
        death = (Event("error", error=died),)
        self.progress = 0.0
        with self._lock:
            self._over = True
            orphans = list(self._running.values())
            self._running.clear()
            unanswered = [answer for _, answer in self._asked.values()]
            self._asked.clear()
        for answer in unanswered:
            answer.set_exception(died)
        for on_events in orphans:
            on_events(death)

    @property
    def obituary(self) -> str:
        """How it ended, as a sentence without its full stop."""
        if self._closing:
            return "the engine was closed"
        if self._end is not None:
            return self._end
        if self.error is not None:
            return f"the engine stopped unexpectedly ({self.error})"
        return _obituary(self._process.returncode, self._last_words())

    def stop(self) -> None:
        """End the process: with a request, then by force. `run` returns then."""
        self._closing = True
        self._channel.send(CloseMessage())
        if self.stuck or self.info is None:
            self._process.kill()  # it cannot be reached, or only after loading
        self._wait(self._grace_s, self._process.kill)

    def look(self, elapsed: float) -> None:
        """`elapsed` seconds after the last look: end the process if it is stuck or silent for too long."""
        if self.info is None or self._over:
            return  # loading may take long, and loading a library holds the interpreter lock
        self._listen(elapsed)
        stuck = self.stuck
        if stuck and stuck.seconds > self._patience.end(stuck.limit_s):
            self._kill(stuck)

    def _listen(self, elapsed: float) -> None:
        if self._heard:
            self._heard, self._silent = False, None
            self._silence.begin()
            return
        before, limit = self._silence.seconds, self._patience.silent
        self._silence.add(elapsed)
        seconds, stretched = self._silence.seconds, limit * self._silence.stretch
        if seconds > stretched:
            if not self._silent:
                log.warning("the engine's process has given no sign of life for %.0f s", seconds)
            self._silent = StepStalled("", seconds, None, stretched)
        elif before <= limit < seconds:
            log.debug(
                "the machine is busy: the engine's process has waited for cores, silent, for %.0f s", seconds
            )

    def _kill(self, stuck: StepStalled) -> None:
        where = f"was stuck in {stuck.what}" if stuck.what else "gave no sign of life"
        self._end = f"the engine's process {where} for {stuck.seconds:.0f} s and was ended"
        # Only now: the handler inspects running threads, and its crash does no harm any more.
        self._process.send_signal(ASK_FOR_STACKS)
        sleep(STACKS_S)  # there is no signal when they are written; a stopped process never writes them
        self._process.kill()

    def _take(self, message: Message) -> None:
        match message:
            case EventsMessage(key, events):
                self.answered = True
                with self._lock:
                    on_events = self._running.pop(key) if events[-1].last else self._running[key]
                on_events(events)
            case ReplyMessage():
                self._replied(message)
            case Pulse(streaming):
                self.streaming = streaming
            case StepStalled():
                self._step = message
            case StepResumed():
                self._step = None
            case Progress(fraction):
                self.progress = fraction
            case ReadyMessage(info):
                self.progress = 1.0
                self.info = info
            case FailureMessage(error):
                self.error = error
            case Remark(level, text):
                remarks.log(level, "%s", text)

    def _replied(self, said: ReplyMessage) -> None:
        with self._lock:
            question, answer = self._asked.pop(said.key)
        if said.error is not None:
            answer.set_exception(said.error)
            return
        if isinstance(question, SetRam):
            # First: the caller may rely on the answer, even if the process dies now.
            self.load = replace(self.load, options={**self.load.options, "ram": question.nbytes})
        answer.set_result(said.answer)

    def _reap(self) -> None:
        """The process hung up: it ends now, or is ended, since it cannot be reached any more."""
        self._wait(GRACE_S, self._process.kill)

    def _wait(self, grace_s: float, *ends: Callable[[], None]) -> None:
        for end in ends:
            try:
                subprocesses.wait(self._process, grace_s)
                return
            except TimeoutError:
                end()
                grace_s = GRACE_S
        self._process.wait()

    def _last_words(self) -> str:
        """The end of its output, without the stacks of a crash."""
        if self._log is None:
            return ""
        with suppress(OSError, ValueError):  # a front end may have closed it
            # Not `read`, which would move the place where the next life writes.
            length = os.fstat(self._log.fileno()).st_size - self._log_began
            said = os.pread(self._log.fileno(), length, self._log_began).decode(errors="replace")
            return said.partition(STACKS)[0].strip()[-LAST_WORDS:]
        return ""


def _begin(out: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    # The child inherits the mask: a Ctrl-C before it can ignore them would print a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocesses.begin("from hetrun.client.worker_main import main; main({pipe})", out)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obituary(code: int, last_words: str) -> str:
    how = subprocesses.ending(code)
    if code == -signal.SIGKILL:
        how += ": a smaller --ctx or --ram helps"
    elif code < 0:
        how += "; please report what you asked it"
    said = f". Its last output: {last_words}" if last_words else ""
    return f"the engine's process {how}{said}"
