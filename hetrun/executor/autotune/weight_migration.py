"""The weights that plans need: brought in, given back, and what that took."""

from __future__ import annotations

from time import perf_counter

from hetrun.errors import BudgetError
from hetrun.executor.autotune.state import TuningState
from hetrun.executor.autotune.tuned_model import TunedModel
from hetrun.executor.autotune.yield_point import YieldPoint
from hetrun.executor.loading.backend_selection import vet
from hetrun.planner.online import HOLDS, RATE, START, Parts
from hetrun.planner.residency import Copy
from hetrun.system.memory_info import process_memory

UNKNOWN_HOLDS = 256 << 20  # bytes of a backend's libraries before they are measured: torch takes 190 MiB


class Weights:
    """Those of one model, on all backends."""

    def __init__(self, model: TunedModel, state: TuningState, aside: YieldPoint) -> None:
        self._room = model.setup.room  # bytes for weights, and for what backends hold besides
        self.own = model.setup.own  # what devices may take of the memory that they have to themselves
        self._graph, self._backends, self._store = model.graph, model.backends, model.store
        self._planner, self._forecast, self._state, self._aside = model.planner, model.forecast, state, aside

    def start(self, name: str) -> None:
        """Load a backend's libraries, and see what that takes."""
        backend = self._backends[name]
        if not backend.started:
            before, start = process_memory(), perf_counter()
            backend.start()
            self._forecast.learn_fact(START, name, perf_counter() - start)
            self._forecast.learn_fact(HOLDS, name, max(0, process_memory() - before))
            # Others may have taken some of a device's memory before it began.
            self.own = {n: self._backends[n].granted or own for n, own in self.own.items()}
        vet(name, backend, self._graph)
        self._state.started.add(name)

    def may_start(self, name: str) -> bool:
        """Whether its libraries have room in the budget, as far as is known what they take."""
        if self._backends[name].started or name in self._state.started:
            return True
        known = self._forecast.fact(HOLDS, name)
        return (UNKNOWN_HOLDS if known is None else known) <= self._room - self._store.resident_bytes

    def bring(self, copies: frozenset[Copy]) -> None:
        """Load libraries and read weights, and see how fast that is."""
        for name in sorted({b for _, b in copies}):
            self.start(name)
            mine = sorted(i for i, b in copies if b == name)
            backend = self._backends[name]
            wanted = [use for i in mine for use in backend.wants(self._planner.units[i].ops)]
            start, away = perf_counter(), self._aside.away
            self._store.load({name: wanted}, self._aside)
            seconds = perf_counter() - start - (self._aside.away - away)
            size = self._planner.sizes.moved((i, name) for i in mine)
            if size > 1 << 24:
                self._forecast.learn_fact(RATE, name, size / seconds)
        self._state.held |= copies

    def bring_parts(self, parts: Parts) -> None:
        """Read the weights that operations of their own, or parts of them, want in another form; all of them,
        or none."""
        try:
            self._load_parts(parts)
        except BudgetError:
            self.drop_parts(parts - self._state.parts)
            raise
        self._state.parts |= parts

    def _load_parts(self, parts: Parts) -> None:
        for name in sorted({b for b, _ in parts}):
            self.start(name)
            self._store.load({name: [use for b, use in parts if b == name]}, self._aside)

    def drop_parts(self, parts: Parts) -> None:
        """Give their memory back."""
        for name in {b for b, _ in parts}:
            self._store.drop(name, [use for b, use in parts if b == name])

    def drop(self, copies: frozenset[Copy]) -> None:
        """Give the memory of weights back that no plan uses."""
        if not copies:
            return
        keep = self._state.held - copies
        for name in sorted({b for _, b in copies}):
            backend = self._backends[name]
            stays = {u for i, b in keep if b == name for u in backend.wants(self._planner.units[i].ops)}
            stays |= {use for b, use in self._state.parts if b == name}
            mine = [i for i, b in copies if b == name]
            gone = {u for i in mine for u in backend.wants(self._planner.units[i].ops)} - stays
            self._store.drop(name, gone)
        self._state.held = set(keep)
