"""A compiled segment on a GPU: what it tells the device, runs there and brings back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from hetrun.backend import FLOAT_BYTES, Done, Floats, Pass, PassShape, Segment
from hetrun.backends.cuda import top_k
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.kv_mirror import Homecoming
from hetrun.backends.cuda.lowering import Emitter, Place, rows_of
from hetrun.backends.cuda.result import Result
from hetrun.backends.cuda.states.mirror import Written
from hetrun.backends.cuda.top_k import Choosing
from hetrun.errors import BudgetError
from hetrun.graph import Value

if TYPE_CHECKING:
    from hetrun.backends.cuda.backend import CudaBackend

LONG_S = 0.002  # of a wait for which a core had better not be kept busy

Coming = Homecoming | Written  # rows on their way home, and states that stay


class CudaRunner:
    """A segment for passes of one shape."""

    def __init__(self, backend: CudaBackend, segment: Segment, shape: PassShape, place: Place) -> None:
        self._backend, self._memory = backend, backend.gpu.memory
        self._slabs, self._states, self._kv = list(place.slabs.values()), place.states, place.kv
        self._borrowed = list(place.borrowed.values())
        size = _result_bytes(segment, shape)
        self._begin = self._memory.take(size, "results of a pass")
        try:
            emitted = self._emitted(place, segment, shape)
        except BaseException:
            self._memory.give(self._begin)
            raise
        assert emitted.result_bytes <= size
        self._given, self._given_at, self._portions = emitted.given, emitted.given_at, emitted.portions
        there = [v for v in segment.reads if emitted.rows(v)]
        self._reads = [(v, emitted.inputs[v]) for v in there]
        self._results = [
            Result(v, emitted.at[v], self._landing(emitted.rows(v), v.width))
            for v in segment.writes
            if emitted.rows(v)
        ]
        self._empty = [v for v in segment.writes if not emitted.rows(v)]
        self._choosing: dict[int, Choosing | None] = {}  # by how many; None: there was no memory for that
        self._done, self._is_long = self._memory.driver.event(), False

    def _emitted(self, place: Place, segment: Segment, shape: PassShape) -> Emitter:
        """The work of a segment, in a place that others use, too. What it takes is known only then, so the
        largest place is tried first: writing all of it down takes milliseconds, and the device waits."""
        room, base = self._backend.gpu.workplaces.largest
        emitted = Emitter(place, segment, shape, base, self._begin)
        if emitted.nbytes > room:
            base = self._backend.gpu.workplaces.of(emitted.nbytes)
            emitted = Emitter(place, segment, shape, base, self._begin)
        return emitted

    def _landing(self, rows: int, width: int) -> Floats:
        memory = self._memory.driver.pinned(FLOAT_BYTES * rows * width)
        return memory.view(np.float32).reshape(rows, width)

    def submit(self, work: Pass) -> Done:
        """Give the device everything at once; who waits gets the results."""
        self._backend.check()
        driver, stream = self._memory.driver, self._memory.computing
        try:
            for slabs in self._slabs:
                slabs.prepare(work)
            for slabs in self._borrowed:
                slabs.prepare(work, written_here=False)
        except BaseException:
            self._leave_off()
            raise
        self._kv.arrivals.send()
        places = self._states.prepare(work) if self._states else None
        self._memory.send(self._given_at, self._given.pack(work, places))
        for value, address in self._reads:
            self._read(value, address, work)
        self._compute()
        chosen = self._choose(work)
        for r in self._results:
            if chosen is None or r.value.name != chosen.name:
                self._memory.collect(int(r.array.ctypes.data), r.address, r.array.nbytes)
        coming: list[Coming] = [slabs.send_home(work.slots[slabs.group]) for slabs in self._slabs]
        if places:
            coming.append(places.written)
        driver.record(self._done, stream)
        return Running(self, work, coming, chosen)

    def _leave_off(self) -> None:
        for slabs in (*self._slabs, *self._borrowed):
            slabs.leave_off()

    def _read(self, value: Value, address: Address, work: Pass) -> None:
        """A value that others made; what this device made itself is still there."""
        array = work.values[value.name]
        made = self._backend.gpu.made.get(value.name)
        if made is not None and made.array is array:
            self._memory.driver.copy(address, made.address, array.nbytes, self._memory.computing)
        else:
            self._memory.send(address, np.ascontiguousarray(array, np.float32).view(np.uint8).reshape(-1))

    def _compute(self) -> None:
        """Portion by portion, each behind the weights that it needs."""
        driver, stream, ring = self._memory.driver, self._memory.computing, self._backend.gpu.ring
        for portion in self._portions:
            for block in portion.blocks:
                ring.need(block)
            portion.run(driver, stream)
            for block in portion.blocks:
                ring.done(block)
        if self._portions[-1].blocks:
            ring.ahead()

    def _choose(self, work: Pass) -> Choosing | None:
        """Whoever looks at a few numbers of a row only gets these."""
        if work.enough is None:
            return None
        name, k = work.enough
        made = next((r for r in self._results if r.value.name == name), None)
        if made is None or k > top_k.MOST:
            return None
        if k not in self._choosing:
            self._choosing[k] = self._chooser(made, k)
        if chosen := self._choosing[k]:
            chosen.run()
        return chosen

    def _chooser(self, made: Result, k: int) -> Choosing | None:
        """What chooses the k greatest; where memory is full, rows come home as a whole."""
        with suppress(BudgetError):
            return Choosing(self._memory, self._backend.gpu.library, made, k)
        return None

    def finish(self, work: Pass, coming: Sequence[Coming], chosen: Choosing | None) -> None:
        """Wait, and put results where others find them."""
        driver, start = self._memory.driver, perf_counter()
        while not driver.happened(self._done) and self._kv.advance(wait=False):
            pass
        driver.synchronize(self._done)
        if not self._is_long and perf_counter() - start > LONG_S:
            self._is_long = True
            driver.drop(self._done)
            self._done = driver.event(sleeps=True)
        for each in coming:
            each.finish()
        self._leave_off()
        for r in self._results:
            if chosen is None or r.value.name != chosen.name:
                work.values[r.value.name] = r.array
                self._backend.gpu.made[r.value.name] = r
        work.greatest = chosen.greatest if chosen else work.greatest
        for value in self._empty:
            work.values[value.name] = np.empty((0, value.width), np.float32)

    def close(self) -> None:
        """Give its memory back."""
        ring = self._backend.gpu.ring
        for portion in self._portions:
            if portion.graph is not None:
                self._memory.driver.forget(portion.graph)
        for block in dict.fromkeys(b for portion in self._portions for b in portion.blocks):
            ring.forget(block)
        for r in self._results:
            if self._backend.gpu.made.get(r.value.name) is r:
                del self._backend.gpu.made[r.value.name]
        for each in filter(None, self._choosing.values()):
            each.close()
        self._memory.give(self._begin)
        self._memory.driver.drop(self._done)


def _result_bytes(segment: Segment, shape: PassShape) -> int:
    """Memory of all results, each with a place of its own."""
    sizes = [FLOAT_BYTES * rows_of(value, shape) * value.width for value in set(segment.writes)]
    return sum(in_arena(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Running:
    """Work that the device has."""

    runner: CudaRunner
    work: Pass
    coming: Sequence[Coming]
    chosen: Choosing | None

    def wait(self) -> None:
        """Until it is done."""
        self.runner.finish(self.work, self.coming, self.chosen)
