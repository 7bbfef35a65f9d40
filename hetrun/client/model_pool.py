"""Several models of which some are loaded, within one budget; and one that sleeps while nobody asks.

A model is loaded when it is first asked for. Its share of the memory is an equal part of all, or what it
needs where that is more. Where there is no room those go that were not used for longest: at once when nobody
uses them, else behind the answers that they are giving. Whoever needs room waits in the order of coming, and
nobody begins with a model that is about to go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from pathlib import PurePath
from time import monotonic
from typing import TypeVar

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient, Health
from hetrun.client.model_catalog import Found, identity, name_of
from hetrun.client.queries import Question, SetRam
from hetrun.errors import BudgetError, EngineStopped, OptionError

A = TypeVar("A")

log = logging.getLogger(__name__)

Start = Callable[[Found, int | None], ChatClient]  # begins to load a model, which may take so many bytes

MOST_LOADED = 4
STOPPED = "the server was stopped before this answer was complete"
# What a model takes about, before it was ever loaded: its weights, keys and values, and the process.
BESIDE_WEIGHTS, PROCESS = 0.25, 256 << 20


class OnDemand:
    """One model of a shelf: it is loaded by the first request, and may be gone between two."""

    def __init__(self, found: Found, shelf: Shelf) -> None:
        self.found = found
        self.client: ChatClient | None = None  # while it is loaded, or being loaded
        self.identity = ""  # of the files, when they were loaded last
        self.budget = 0  # of the client
        self.used_at = 0.0  # when somebody began or ended to use it
        self.leaving = False  # nobody begins to use it any more
        self.users = 0
        self.unused = asyncio.Event()
        self.unused.set()
        self.known: ModelInfo | None = None  # what was seen when it was loaded last
        self._shelf = shelf

    @property
    def need(self) -> int:
        """Bytes that it wants to run well."""
        return int(self.found.nbytes * (1 + BESIDE_WEIGHTS)) + PROCESS

    @property
    def failed(self) -> bool:
        """Whether its engine could not be had, or cannot any more."""
        return self.client is not None and self.client.health.status == "failed"

    @property
    def ready(self) -> bool:
        """Whether requests may begin, though they may have to wait until it is loaded."""
        return self.client is not None and not self.leaving and not self.failed

    @property
    def progress(self) -> float:
        return self.client.progress if self.client else 0.0

    @property
    def health(self) -> Health:
        return self.client.health if self.client else Health("ok")

    def begin(self) -> None:
        """Load it now, before anybody asks for it; for one that is alone."""
        self._shelf.load(self)

    async def info(self) -> ModelInfo:
        """Who only looks at what it was like before wakes nobody."""
        if self.known is None:
            await self._shelf.lend(self)
            self._shelf.give_back(self)
        assert self.known is not None  # seen by `lend`
        return self.known

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        try:
            client = await self._shelf.lend(self)
        except Exception as error:  # one way for fronts to learn of it, as with a model that is loaded
            yield Event("error", error=error)
            return
        try:
            async with aclosing(client.stream(request)) as events:
                async for event in events:
                    stopped = event.error is not None and self._shelf.has_ended(event.error)
                    yield Event("error", error=EngineStopped(STOPPED)) if stopped else event
        finally:
            self._shelf.give_back(self)

    async def ask(self, question: Question[A]) -> A:
        """Who only looks wakes nobody, and keeps nobody awake."""
        if question.lane == "now":
            if self.client is None:
                raise EngineStopped(f"{self.found.name} sleeps until it is asked for")
            return await self.client.ask(question)
        client = await self._shelf.lend(self)
        try:
            answer = await client.ask(question)
        finally:
            self._shelf.give_back(self)
        if isinstance(question, SetRam):
            self.budget = question.nbytes  # also of the next engine
        return answer

    async def close(self) -> None:
        """Let go of the engine, whoever uses it."""
        client, self.client = self.client, None
        if client:
            await client.close()


class Shelf:
    """All models that may be asked for; as a ChatClient, the one that was used last."""

    def __init__(
        self,
        models: Iterable[Found],
        start: Start,
        *,
        ram: int | None = None,
        most_loaded: int = MOST_LOADED,
        idle_s: float | None = None,
    ) -> None:
        """At most `most_loaded` are loaded at a time, and let go when nobody asked for `idle_s`."""
        self.models = {found.name: OnDemand(found, self) for found in models}
        self._start = start
        self._ram = ram
        self._most = min(most_loaded, len(self.models))
        self._idle_s = idle_s
        self._turn = asyncio.Lock()  # of those who need room, and whoever changes it
        self._going: set[asyncio.Task[None]] = set()
        self.closed = False

    @property
    def only(self) -> OnDemand | None:
        """The one model; None where there are several."""
        return next(iter(self.models.values())) if len(self.models) == 1 else None

    @property
    def progress(self) -> float:
        return 1.0

    @property
    def health(self) -> Health:
        """Ok while models load, too: others answer. Not if one is stuck, which keeps cores from them."""
        stuck = (m.health for m in self.loaded if m.health.status == "stuck")
        return next(stuck, Health("ok"))

    async def info(self) -> ModelInfo:
        return await self._usual().info()

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return self._usual().stream(request)

    def find(self, name: str) -> OnDemand | None:
        """The model of several that a request means by a name."""
        return self.models.get(name) or self.models.get(name_of(PurePath(name)))

    @property
    def usual(self) -> OnDemand | None:
        """The one that is meant where none is named: the only one, or the one that was used last."""
        if self.loaded:
            return max(self.loaded, key=_used_at)
        return self.only

    def _usual(self) -> OnDemand:
        if (model := self.usual) is None:
            raise OptionError(f"name a model: there are {', '.join(self.models)}")
        return model

    async def lend(self, model: OnDemand) -> ChatClient:
        """The model's engine, which stays until it is given back; waits until it is loaded."""
        if self.closed:
            raise EngineStopped(STOPPED)
        if not model.ready:
            async with self._turn:
                if model.failed:  # tried again: files change
                    await self._unload(model)
                if model.client is None:
                    await self._make_room(model)
                    self.load(model)
        client = model.client
        assert client is not None
        model.users += 1
        model.unused.clear()
        model.used_at = monotonic()
        try:
            model.known = await client.info()  # another one than before, perhaps: its share of memory may be
        except BaseException as error:
            self.give_back(model)
            if self.has_ended(error):
                raise EngineStopped(STOPPED) from error
            raise
        return client

    def has_ended(self, error: BaseException) -> bool:
        """Whether this is what becomes of requests when all engines are let go."""
        return self.closed and isinstance(error, EngineStopped)

    def load(self, model: OnDemand) -> None:
        """Begin to load it; there is room."""
        log.info("%s is loaded", model.found.name)
        model.identity = identity(model.found.path)
        model.client = self._start(model.found, model.budget or None)

    def give_back(self, model: OnDemand) -> None:
        """Somebody does not use it any more."""
        model.users -= 1
        model.used_at = monotonic()
        if model.users:
            return
        model.unused.set()
        if self._idle_s is not None:
            asyncio.get_running_loop().call_later(self._idle_s, self._sleep, model, model.used_at)

    async def ask(self, question: Question[A]) -> A:
        return await self._usual().ask(question)

    async def set_ram(self, nbytes: int) -> Mapping[str, int]:
        """Everything together takes at most so many bytes from now on; what each loaded model has then.

        What nobody uses goes where it is too much. BudgetError: what answers now has more.
        """
        async with self._turn:
            loaded = self.loaded
            kept = {m.found.name: self._share(m, nbytes) for m in loaded}
            for model in sorted((m for m in loaded if not m.users), key=_used_at):
                if sum(kept.values()) <= nbytes:
                    break
                del kept[model.found.name]
                await self._unload(model)
            if sum(kept.values()) > nbytes:
                raise BudgetError(
                    f"{', '.join(kept)} answer now and have more; ask again when they have ended"
                )
            for model in sorted(self.loaded, key=_who_goes, reverse=True):  # who may refuse is asked first
                await self._restrict(model, kept)
            self._ram = nbytes
        return kept

    async def close(self) -> None:
        """Let go of all engines."""
        self.closed = True
        await asyncio.gather(*(m.close() for m in self.models.values()), *self._going)

    @property
    def loaded(self) -> list[OnDemand]:
        """Those that have an engine, or will have one in a moment."""
        return [m for m in self.models.values() if m.client]

    async def _restrict(self, model: OnDemand, shares: dict[str, int]) -> None:
        """To its share. Who cannot do with it now, and is not used, begins anew when it is asked for."""
        assert model.client is not None
        share = shares[model.found.name]
        try:
            await model.client.ask(SetRam(share))
            model.budget = share
        except BudgetError:
            if model.users:
                raise
            del shares[model.found.name]
            await self._unload(model)

    def _share(self, model: OnDemand, ram: int) -> int:
        return min(ram, max(ram // self._most, model.need))

    async def _make_room(self, model: OnDemand) -> None:
        """Unload others until it fits, and say what it may take. Without a bound it takes what is free, so it
        is loaded alone."""
        if self._ram is not None:
            model.budget = self._share(model, self._ram)
        share = model.budget
        while others := self.loaded:
            fits = self._ram is not None and sum(m.budget for m in others) + share <= self._ram
            if fits and len(others) < self._most:
                return
            await self._unload(min(others, key=_who_goes))

    async def _unload(self, model: OnDemand) -> None:
        """Behind what it is asked now."""
        model.leaving = True
        try:
            await model.unused.wait()
            await asyncio.shield(self._in_background(model.close()))
        finally:
            model.leaving = False

    def _sleep(self, model: OnDemand, since: float) -> None:
        if model.client and not model.users and model.used_at == since:
            log.info("%s sleeps: nobody asked for %.0f s", model.found.name, self._idle_s)
            self._in_background(self._forget(model))

    async def _forget(self, model: OnDemand) -> None:
        async with self._turn:
            if not model.users:
                await self._unload(model)

    def _in_background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._going.add(task)
        task.add_done_callback(self._going.discard)
        return task


def _used_at(model: OnDemand) -> float:
    return model.used_at


def _who_goes(model: OnDemand) -> tuple[bool, bool, float]:
    """First those that nobody uses, of which those first that nobody could."""
    return model.users > 0, not model.failed, model.used_at
