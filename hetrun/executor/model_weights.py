"""The weights of a model that runs: those in memory, and what passes read the others through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from hetrun.backend import Backend
from hetrun.backend.weight_streaming import Piece
from hetrun.client.events import Streaming
from hetrun.executor.executor import Executor
from hetrun.executor.loading.backend_selection import vet
from hetrun.executor.loading.load_plan import LoadPlan
from hetrun.executor.loading.memory_estimates import kv_of_all
from hetrun.executor.loading.prompt_device import PromptDevice
from hetrun.executor.loading.resident_budget import InMemory
from hetrun.executor.long_prompts import FEWEST, LongPrompts
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph
from hetrun.memory import breakdown
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.ledger import Books
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.cached_experts import FromExperts
from hetrun.prefetch.mapped_weights import FromMaps
from hetrun.prefetch.streamed_weights import FromDisk
from hetrun.system.progress import Progress, stretch

CACHED_SHARE = 1 / 16  # of a budget that does not hold all weights, for prompts that may come again


class ModelWeights:
    """Loads them as a `LoadPlan` says, and once more where a device with a part of them is lost."""

    def __init__(self, graph: Graph, backends: Mapping[str, Backend], kv: KvCache, books: Books) -> None:
        self.store = WeightStore(backends)
        self._graph, self._backends, self._kv, self._books = graph, backends, kv, books

    def begin(self, prepared: LoadPlan) -> ExitStack:
        """Follow this plan from now on. What passes read weights through is there afterwards; what closes
        it."""
        self.disk: FromDisk | None = None
        self.experts: FromExperts | None = None
        self.maps = FromMaps(prepared.mapped) if prepared.mapped else None
        self.long_prompts: LongPrompts | None = None
        self.wanted = prepared.wanted
        self.prompt_device = prepared.prompts
        part = prepared.streamed or prepared.experts
        self.within = part.within if part else None  # the plans in another budget
        with ExitStack() as undo:
            if streamed := prepared.streamed:
                self.disk = FromDisk(streamed, self._backends[streamed.backend], self._kv, self._books)
                undo.callback(self.disk.close)
                if prepared.prompts:
                    self.long_prompts = self._with_device(prepared.prompts, prepared.plans, self.disk)
                    undo.callback(self.long_prompts.close)
            if experts := prepared.experts:
                self.experts = FromExperts(experts, self._backends[experts.backend], self._kv, self._books)
                undo.callback(self.experts.close)
            self.budget = self.disk or self.experts or self._in_memory(prepared)
            return undo.pop_all()

    def _with_device(self, device: PromptDevice, plans: PlanSet, disk: FromDisk) -> LongPrompts:
        """What decides where prompts run, and what the device reads them through."""
        found = LongPrompts(device, plans, self._graph, disk.seconds, lambda: disk.rate)
        self._backends[device.backend].stream_from_files(found.read)
        return found

    def _in_memory(self, prepared: LoadPlan) -> InMemory:
        mapped, store = prepared.mapped, self.store
        return InMemory(
            books=self._books,
            kv=self._kv,
            weights=lambda: mapped.left if mapped else store.resident_bytes,
            copies=(lambda: {}) if mapped else (lambda: store.copied_bytes),
            kv_of_all=partial(kv_of_all, prepared.kv_one),
            mapped=mapped,
        )

    def load(self, prepared: LoadPlan, progress: Progress | None) -> None:
        """Read those that are there as a whole: they are booked before. Backends that would have some are
        tried first; others are tried when they start."""
        for name in prepared.plans.backends:
            vet(name, self._backends[name], self._graph)
        load = partial(self.store.load, prepared.wanted, progress)
        self._books.take(breakdown.WEIGHTS, "anonymous", prepared.weights, load)
        self.store.settle()

    def open(self, executor: Executor, progress: Progress | None) -> None:
        """Have the weights that stay in memory read, where others come from disk for every pass."""
        if self.disk or self.experts:
            executor.stream(self.long_prompts.look_up if self.long_prompts else None)
        if self.disk:
            self.disk.open(stretch(progress, 0.1, 1))
        if self.experts:
            self.experts.open()

    @property
    def reading(self) -> FromDisk | FromExperts | FromMaps | None:
        """What passes read weights through, if they do."""
        return self.disk or self.experts or self.maps

    @property
    def are_read_by_passes(self) -> bool:
        """Whether passes read some of them."""
        return self.reading is not None

    @property
    def streamed(self) -> Sequence[Piece]:
        """The pieces that come from disk for every pass."""
        return self.disk.kept.streamed if self.disk else ()

    def streaming(self) -> Streaming | None:
        """What passes are like that read weights from disk."""
        reading = self.reading
        return reading.report() if reading else None

    @property
    def most_cached(self) -> int | None:
        """Tokens of prompts that are worth keeping for later, beside the last one; None: all there is room
        for. While weights come from disk each byte of them is one that every pass reads."""
        if (reading := self.disk or self.experts) is None:
            return None
        each = self._kv.token_bytes
        return int(CACHED_SHARE * reading.granted.nbytes) // each if each else None

    def predict(self, tokens: int, plans: PlanSet) -> float | None:
        """Seconds of a step by these plans, where most of them is reading; None: unknown."""
        prompts = self.long_prompts
        if prompts and tokens >= FEWEST and plans is prompts.with_device:
            return prompts.on_device(tokens)
        disk = self.disk or self.experts
        return disk.predict(tokens) if disk else None

    def close(self) -> None:
        """Read nothing for passes any more."""
        if self.disk:
            self.disk.close()
        if self.experts:
            self.experts.close()

    def close_files(self) -> None:
        """Close what devices read prompts' weights through; their backends are closed already."""
        if self.long_prompts:
            self.long_prompts.close()
