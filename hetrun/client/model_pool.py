"""Several models, some of them loaded, within one budget; or a single model that is unloaded when idle.

A model is loaded by its first request. Its share of the memory is an equal part of the budget, or what it
needs if that is more. If there is no room, the least recently used models are unloaded: at once if they are
idle, otherwise after their running answers. Requests for room are served in order of arrival, and no request
starts on a model that is about to be unloaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient, Health
from hetrun.client.model_catalog import CatalogModel, ModelCatalog, identity, spellings
from hetrun.client.queries import Question, SetRam, StateQuery, TokenizerFacts, TokenizerInfo
from hetrun.errors import BudgetError, EngineStopped, HetrunError, OptionError

A = TypeVar("A")

log = logging.getLogger(__name__)

Start = Callable[
    [CatalogModel, int | None], ChatClient
]  # starts to load a model, with a memory limit in bytes

MOST_LOADED = 4
REMEMBER_S = 2.0  # for what is asked of a model before it is unloaded
SCAN_AGAIN_S = 1.0  # between two looks at which models there are
STOPPED = "the server was stopped before this answer was complete"
REMOVED = "the model was removed from this server"
# Estimated memory of a model that was never loaded: its weights, keys and values, and the process.
BESIDE_WEIGHTS, PROCESS = 0.25, 256 << 20


@dataclass(frozen=True)
class UnloadedModel:
    """What can be told of a model that is not loaded any more."""

    facts: TokenizerFacts | None = None
    places: int = 0


class OnDemand:
    """One model of a pool: its first request loads it, and it may be unloaded between two requests."""

    def __init__(self, found: CatalogModel, shelf: ModelPool) -> None:
        self.found = found
        self.client: ChatClient | None = None  # while it is loaded, or being loaded
        self.identity = ""  # the files' state when they were last loaded
        self.budget = 0  # of the client
        self.used_at = 0.0  # when a request last started or ended
        self.leaving = False  # no further request may start on it
        self.users = 0
        self.unused = asyncio.Event()
        self.unused.set()
        self.known: ModelInfo | None = None  # what was seen when it was loaded last
        self.idle_s = shelf.idle_s  # it is unloaded after so long without a request; None: never
        self.memory = UnloadedModel()
        self._shelf = shelf

    @property
    def need(self) -> int:
        """The memory that it needs to run well, in bytes."""
        return int(self.found.nbytes * (1 + BESIDE_WEIGHTS)) + PROCESS

    @property
    def failed(self) -> bool:
        """Whether its engine failed to start, or has ended for good."""
        return self.client is not None and self.client.health.status == "failed"

    @property
    def ready(self) -> bool:
        """Whether requests may start; they may have to wait until it is loaded."""
        return self.client is not None and not self.leaving and not self.failed

    @property
    def progress(self) -> float:
        return self.client.progress if self.client else 0.0

    @property
    def health(self) -> Health:
        return self.client.health if self.client else Health("ok")

    @property
    def leaves_in_s(self) -> float | None:
        """When it will be unloaded if there are no further requests; None: never."""
        if self.idle_s is None:
            return None
        return self.idle_s if self.users else max(self.used_at + self.idle_s - monotonic(), 0.0)

    def keep(self, idle_s: float | None) -> None:
        """Set how long it stays loaded after the next request; this is forgotten when it is unloaded."""
        self.idle_s = idle_s

    async def wake(self) -> None:
        """Load it if it is not loaded, as a request would."""
        await self._shelf.lend(self)
        self._shelf.give_back(self)

    async def rest(self) -> None:
        """Unload it: now, or after its running requests."""
        self.keep(0)
        if self.client and not self.users:
            await self._shelf.forget(self)

    def begin(self) -> None:
        """Load it now, before the first request; for a single model."""
        self._shelf.load(self)

    async def info(self) -> ModelInfo:
        """What the last load showed is read without waking the model."""
        if self.known is None:
            await self.wake()
        assert self.known is not None  # seen by `lend`
        return self.known

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        try:
            client = await self._shelf.lend(self)
        except Exception as error:  # front ends get an error event, as with a loaded model
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
        """Status queries neither load a model nor keep it loaded."""
        if question.lane == "now":
            if self.client is None:
                raise EngineStopped(f"{self.found.name} is asleep until the next request for it")
            return await self.client.ask(question)
        client = await self._shelf.lend(self)
        try:
            answer = await client.ask(question)
        finally:
            self._shelf.give_back(self)
        if isinstance(question, SetRam):
            self.budget = question.nbytes  # also of the next engine
        return answer

    async def remember(self) -> UnloadedModel:
        """What is told of it without waking it, and without keeping it awake."""
        return await self._shelf.remember(self)

    async def close(self) -> None:
        """Release the engine, even if it is in use."""
        client, self.client = self.client, None
        self.idle_s = self._shelf.idle_s
        if client:
            await client.close()


class ModelPool:
    """All models that requests may use; as a ChatClient, the one that was used last."""

    def __init__(
        self,
        models: Iterable[CatalogModel],
        start: Start,
        *,
        ram: int | None = None,
        most_loaded: int = MOST_LOADED,
        idle_s: float | None = None,
        catalog: ModelCatalog | None = None,
    ) -> None:
        """At most `most_loaded` are loaded at a time; each is unloaded after `idle_s` without a request.
        `catalog`: further models are found there while the server runs."""
        self.idle_s = idle_s
        self.models = {found.name: OnDemand(found, self) for found in models}
        self._start = start
        self._ram = ram
        self._most_loaded = most_loaded
        self._turn = asyncio.Lock()  # held while room is needed or changed
        self._going: set[asyncio.Task[None]] = set()
        self._catalog = catalog
        self._scan: asyncio.Task[None] | None = None  # while it runs
        self._scanned_at = monotonic()
        self.closed = False

    @property
    def shares(self) -> bool:
        """Whether there are several models, or may be."""
        return len(self.models) > 1 or self._catalog is not None

    def allow(self, nbytes: int) -> None:
        """Set the memory limit of all models together; those that are loaded keep what they have."""
        self._ram = nbytes

    @property
    def only(self) -> OnDemand | None:
        """The only model; None if there are several."""
        return next(iter(self.models.values())) if len(self.models) == 1 else None

    @property
    def progress(self) -> float:
        return self.only.progress if self.only else 1.0

    @property
    def health(self) -> Health:
        """Of several models it is ok even while some load, since others answer; not if one is stuck, because
        that occupies cores."""
        if self.only:
            return self.only.health
        stuck = (m.health for m in self.loaded if m.health.status == "stuck")
        return next(stuck, Health("ok"))

    async def info(self) -> ModelInfo:
        return await self._usual().info()

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return self._usual().stream(request)

    def find(self, name: str) -> OnDemand | None:
        """The model that a request names."""
        if model := next((self.models[n] for n in spellings(name) if n in self.models), None):
            return model
        other = self._catalog.named(name) if self._catalog else None
        return None if other is None else self.models.get(other)

    def add(self, found: CatalogModel) -> None:
        """Offer another model."""
        self.models.setdefault(found.name, OnDemand(found, self))

    async def drop(self, model: OnDemand) -> None:
        """No longer offer this model; returns when its running answers have ended and it is unloaded."""
        self.models.pop(model.found.name, None)
        async with self._turn:
            if model.client:
                await self._unload(model)

    async def look_for(self, name: str) -> OnDemand | None:
        """The same, among models that have just come, too."""
        if (model := self.find(name)) is None and self._catalog:
            await self.look_again()
            model = self.find(name)
        return model

    async def look_again(self) -> None:
        """Offer the models that have come, and no longer those whose files are gone."""
        if self._catalog is None:
            return
        if self._scan is None:
            if monotonic() - self._scanned_at < SCAN_AGAIN_S:
                return
            self._scan = asyncio.ensure_future(self._scan_catalog(self._catalog))
        await asyncio.shield(self._scan)

    async def _scan_catalog(self, catalog: ModelCatalog) -> None:
        try:
            found = await asyncio.to_thread(catalog.scan)
            gone = await asyncio.to_thread(self._gone, found)
        finally:
            self._scan, self._scanned_at = None, monotonic()
        for name, model in found.items():
            if name in self.models:
                self.models[name].found = model
            else:
                self.models[name] = OnDemand(model, self)
        for name in gone:
            if name in self.models and self.models[name].client is None:
                del self.models[name]

    def _gone(self, found: Mapping[str, CatalogModel]) -> list[str]:
        others = [model.found for name, model in list(self.models.items()) if name not in found]
        return [one.name for one in others if not os.path.exists(one.path)]

    @property
    def usual(self) -> OnDemand | None:
        """The model of a request that names none: the only one, or the one that was used last."""
        if self.loaded:
            return max(self.loaded, key=_used_at)
        return self.only

    def _usual(self) -> OnDemand:
        if (model := self.usual) is None:
            raise OptionError(f"name a model: there are {', '.join(self.models)}")
        return model

    async def lend(self, model: OnDemand) -> ChatClient:
        """The model's engine, which stays loaded until it is released; waits until it is loaded."""
        if self.closed:
            raise EngineStopped(STOPPED)
        if not model.ready:
            async with self._turn:
                if self.models.get(model.found.name) is not model:
                    raise EngineStopped(REMOVED)
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
            # Another one than before, perhaps: its share of memory may be.
            model.known = replace(await client.info(), listed_as=model.found.name)
        except BaseException as error:
            self.give_back(model)
            if self.has_ended(error):
                raise EngineStopped(STOPPED) from error
            raise
        return client

    def has_ended(self, error: BaseException) -> bool:
        """Whether this error means that all engines are being released."""
        return self.closed and isinstance(error, EngineStopped)

    def load(self, model: OnDemand) -> None:
        """Start to load it; there is room."""
        log.info("%s is loaded", model.found.name)
        model.memory = UnloadedModel()
        model.identity = identity(model.found.path)
        model.client = self._start(model.found, model.budget or None)

    def give_back(self, model: OnDemand) -> None:
        """A request has ended."""
        model.users -= 1
        model.used_at = monotonic()
        if model.users:
            return
        model.unused.set()
        if model.idle_s is not None:
            asyncio.get_running_loop().call_later(model.idle_s, self._sleep, model, model.used_at)

    async def ask(self, question: Question[A]) -> A:
        return await self._usual().ask(question)

    async def set_ram(self, nbytes: int) -> Mapping[str, int]:
        """Set the memory limit of all models together; returns each loaded model's memory.

        Idle models are unloaded if necessary. Raises BudgetError if busy models need more.
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
                    f"{', '.join(kept)} are answering and use more than that; try again when they have "
                    "finished"
                )
            for model in sorted(self.loaded, key=_who_goes, reverse=True):  # first those that may refuse
                await self._restrict(model, kept)
            self._ram = nbytes
        return kept

    async def close(self) -> None:
        """Release all engines."""
        self.closed = True
        await asyncio.gather(*(m.close() for m in self.models.values()), *self._going)

    @property
    def loaded(self) -> list[OnDemand]:
        """The models that have an engine, or will have one soon."""
        return [m for m in self.models.values() if m.client]

    async def _restrict(self, model: OnDemand, shares: dict[str, int]) -> None:
        """Limit it to its share. An idle model that cannot shrink is unloaded until its next request."""
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

    @property
    def _most(self) -> int:
        """The most models that can be loaded at a time."""
        return min(self._most_loaded, len(self.models))

    def _share(self, model: OnDemand, ram: int) -> int:
        return min(ram, max(ram // self._most, model.need))

    async def _make_room(self, model: OnDemand) -> None:
        """Unload others until it fits, and return its memory limit. Without a budget it takes what is free,
        so it is loaded alone."""
        if self._ram is not None and self.only is None:  # the only model needs no share: it may have all
            model.budget = self._share(model, self._ram)
        share = model.budget
        while others := self.loaded:
            fits = self._ram is not None and sum(m.budget or self._ram for m in others) + share <= self._ram
            if fits and len(others) < self._most:
                return
            await self._unload(min(others, key=_who_goes))

    async def _unload(self, model: OnDemand) -> None:
        """Unload it after its running requests."""
        model.leaving = True
        try:
            await model.unused.wait()
            await self.remember(model)
            await asyncio.shield(self._in_background(model.close()))
        finally:
            model.leaving = False

    async def remember(self, model: OnDemand) -> UnloadedModel:
        """What is told of a model, also while it sleeps. A loaded one is asked once, which does not keep it
        loaded; of one that does not answer at once nothing is known."""
        client = model.client
        loaded = client is not None and model.known is not None and client.health.status == "ok"
        if model.memory.places or client is None or not loaded:
            return model.memory
        facts = None
        try:
            async with asyncio.timeout(REMEMBER_S):
                places = (await client.ask(StateQuery())).places
                with suppress(OptionError):  # it has no tokenizer
                    facts = await client.ask(TokenizerInfo())
                model.memory = UnloadedModel(facts, places)
        except (TimeoutError, HetrunError) as error:
            log.debug("%s did not say what it is: %s", model.found.name, error)
        return model.memory

    def _sleep(self, model: OnDemand, since: float) -> None:
        if model.client and not model.users and model.used_at == since:
            log.info("%s was unloaded: no request for %.0f s", model.found.name, model.idle_s or 0)
            self._in_background(self.forget(model))

    async def forget(self, model: OnDemand) -> None:
        """Unload it, unless a request has started meanwhile."""
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
    """A sort key: idle models first, and among them those that cannot be used."""
    return model.users > 0, not model.failed, model.used_at
