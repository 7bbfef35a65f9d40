"""Two implementations of the contract between front ends and engines.

`LocalClient` has the engine in this process; `WorkerClient` in a process of its own, so that a native crash
costs a restart instead of the front, and the front's event loop does not share the interpreter lock with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from time import monotonic
from typing import BinaryIO, TypeVar

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.hook_dispatcher import heard, overheard
from hetrun.client.interface import Health
from hetrun.client.mailbox import Mailbox, MailCarriers
from hetrun.client.queries import Question
from hetrun.client.wire_protocol import LoadMessage, Patience
from hetrun.client.worker_main import CHAT, ENGINE, RESTRICT, WorkerModel
from hetrun.client.worker_process import Life, WorkerDied
from hetrun.client.worker_supervisor import Supervisor
from hetrun.config import Settings
from hetrun.errors import BackendError, EngineStopped, HetrunError
from hetrun.system.memory_info import front_bytes

A = TypeVar("A")

MOST_DEATHS = 3  # a request that was running when this many workers died is not tried again


def _overheard(
    request: GenerateRequest, events: AsyncGenerator[Event, None], info: Callable[[], ModelInfo | None]
) -> AsyncGenerator[Event, None]:
    """The events, also reported to plugins, if there are any."""
    hearing = heard(request, info)
    return overheard(events, hearing) if hearing else events


class LocalClient:
    """An engine in this process."""

    def __init__(self, engine: WorkerModel) -> None:
        self._engine = engine
        self._posts = MailCarriers()

    @property
    def progress(self) -> float:
        return 1.0

    @property
    def health(self) -> Health:
        return Health("ok", streaming=self._engine.streaming)

    async def info(self) -> ModelInfo:
        return self._engine.info

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return _overheard(request, self._stream(request), lambda: self._engine.info)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        box = Mailbox(self._posts.here())
        try:
            request_id = self._engine.submit(request, lambda event: box.put((event,)))
        except HetrunError as error:
            # Front ends get an error event, whether the engine refuses at once or later.
            yield Event("error", error=error)
            return
        ended = False
        try:
            while not ended:
                event = await box.get()
                ended = event.last
                yield event
        finally:
            if not ended:
                self._engine.cancel(request_id)

    async def ask(self, question: Question[A]) -> A:
        return await asyncio.to_thread(self._engine.ask, question)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


class WorkerClient:
    """An engine in a worker process, which starts to load at once, and again whenever it dies.

    The worker's standard output and error go to `log`, or else to our standard error. A front end that owns
    the screen passes a file; when the worker dies, the end of that file is quoted.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: BinaryIO | None = None,
        engine: str = ENGINE,
        patience: Patience | None = None,
        restrict: str | None = None,
        front: int | None = None,
    ) -> None:
        """`restrict`: what takes rights from the process; by default, from that of a real engine. `front`:
        bytes that this process takes of the engine's memory limit; by default, what it has and will have."""
        # Only settings that differ from the defaults: the child has the same defaults.
        options = {name: getattr(settings, name) for name in settings.origins}
        verbose = logging.getLogger("hetrun").isEnabledFor(logging.INFO)
        is_real = engine in (ENGINE, CHAT)
        if restrict is None:
            restrict = RESTRICT if is_real else ""
        if front is None:
            front = front_bytes() if is_real else 0
        load = LoadMessage(engine, options, patience or Patience(), verbose, restrict=restrict, front=front)
        self._supervisor = Supervisor(load, log)
        self._posts = MailCarriers()

    @property
    def progress(self) -> float:
        return self._supervisor.progress

    @property
    def health(self) -> Health:
        return self._supervisor.health

    @property
    def pid(self) -> int:
        """The worker's process; a new one after each crash."""
        return self._supervisor.pid

    async def info(self) -> ModelInfo:
        return await self._supervisor.info()

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return _overheard(request, self._stream(request), lambda: self._supervisor.known)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Sends the request to the next worker if one dies before any part of the answer was passed on.

        Every request that was running when a worker died is a suspect. Before its last try, a suspect waits
        until no other suspect runs, so a further crash can be attributed to it.
        """
        post, asked, deaths, sent = self._posts.here(), monotonic(), 0, False
        while True:
            with ExitStack() as turn:
                if deaths == MOST_DEATHS - 1:
                    await post.suspects.acquire()
                    turn.callback(post.suspects.release)
                box = Mailbox(post, turn.close)  # a slow reader does not delay the next suspect
                try:
                    life, key = await self._submit(request, asked, box)
                except Exception as error:
                    yield Event("error", error=error)
                    return
                over = False
                try:
                    while not over:
                        event = await box.get()
                        if not sent and box.newest and isinstance(box.newest.error, WorkerDied):
                            event = box.newest  # the events before it will be repeated
                        if isinstance(event.error, WorkerDied):
                            over, death = True, event.error
                        else:
                            over, sent = event.last, True
                            yield event
                            if over:
                                return
                finally:
                    if not over:
                        life.cancel(key)
            deaths += 1
            if sent or deaths == MOST_DEATHS:
                yield Event("error", error=self._farewell(death, sent))
                return

    async def ask(self, question: Question[A]) -> A:
        """Asks the next worker if one dies, unless the query must not be repeated."""
        deaths = 0
        while True:
            try:
                return await self._supervisor.ask(question)
            except WorkerDied as death:
                deaths += 1
                if self._supervisor.failed is not None:
                    raise self._supervisor.failed from death
                if not question.repeatable:
                    raise EngineStopped(f"{death}. It is being restarted") from death
                if deaths == MOST_DEATHS:
                    raise self._farewell(death, sent=False) from death

    async def close(self) -> None:
        await asyncio.to_thread(self._supervisor.close)

    def _farewell(self, death: WorkerDied, sent: bool) -> Exception:
        """The error for a request that is not tried again."""
        if self._supervisor.failed is not None:
            return self._supervisor.failed
        if sent:
            return EngineStopped(
                f"{death}. It is being restarted, but the rest of this answer is lost: send the request again"
            )
        return BackendError(
            f"{death}. {MOST_DEATHS} processes ended while running this request, so it is not retried"
        )

    async def _submit(self, request: GenerateRequest, asked: float, box: Mailbox) -> tuple[Life, int]:
        while True:
            life = await self._supervisor.ready()
            if (key := life.submit(request, asked, box.put)) is not None:
                return life, key
