"""A compiled segment on a GPU: what it tells the device, runs there and brings back.

Passes over both sides run many segments, one after the other, and the device waits meanwhile. So all that
depends on the shape only is made once: what few tokens need crosses by copies that are recorded with the
work, from and to memory that stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from hetrun.backend import FLOAT_BYTES, Done, Floats, Ints, Pass, PassShape, Segment
from hetrun.backends.cuda import top_k
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.crossing.recorded import crossing
from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.kv_mirror import RowsReturn, Slabs
from hetrun.backends.cuda.lowering import CudaEmitter, CudaPlace, rows_of
from hetrun.backends.cuda.memory import FEW_BYTES, Bytes
from hetrun.backends.cuda.pass_args import tell_places
from hetrun.backends.cuda.result import DeviceResult
from hetrun.backends.cuda.states.mirror import WrittenStates
from hetrun.backends.cuda.top_k import TopKResult
from hetrun.errors import BackendError, BudgetError
from hetrun.graph import Value

if TYPE_CHECKING:
    from hetrun.backends.cuda.backend import CudaBackend

LONG_S = 0.002  # of a wait for which a core had better not be kept busy


@dataclass(slots=True)
class ReturnedRows:
    """Rows of keys and values that come home with the results: here."""

    slabs: Slabs
    packed: Bytes
    slots: Ints
    stamps: Ints

    def finish(self) -> None:
        """The pass is over."""
        self.slabs.keep(self.slots, self.stamps, self.packed)


Coming = ReturnedRows | RowsReturn | WrittenStates  # rows on their way home, and states that stay


class CudaRunner:
    """A segment for passes of one shape."""

    def __init__(self, backend: CudaBackend, segment: Segment, shape: PassShape, place: CudaPlace) -> None:
        self._backend, self._memory = backend, backend.gpu.memory
        self._slabs, self._states, self._kv = list(place.slabs.values()), place.states, place.kv
        self._borrowed = list(place.borrowed.values())
        size = _result_bytes(segment, shape)
        self._begin = self._memory.take(size, "results of a pass")
        try:
            emitted = self._emitted(place, segment, shape)
            assert emitted.result_bytes <= size
            self._given, self._portions = emitted.given, emitted.portions
            self._inputs(emitted, segment)
            self._outputs(emitted, segment)
            self._rows_home(emitted, shape)
        except BaseException:
            self._memory.give(self._begin)
            raise
        self._empty = {
            v.name: np.empty((0, v.width), np.float32) for v in segment.writes if not emitted.rows(v)
        }
        self._choosing: dict[int, TopKResult | None] = {}  # by how many; None: there was no memory for that
        self._done, self._is_long = self._memory.driver.event(), False

    def _inputs(self, emitted: CudaEmitter, segment: Segment) -> None:
        """What a pass tells and its few inputs cross with the work; large ones before it, unless they are
        there."""
        there = [v for v in segment.reads if emitted.rows(v)]
        few = [v for v in there if _nbytes(emitted, v) <= FEW_BYTES]
        self._large = [(v, emitted.inputs[v]) for v in there if v not in few]
        told = emitted.given_at, emitted.given.nbytes
        parts = [told, *((emitted.inputs[v], _nbytes(emitted, v)) for v in few)]
        made = crossing(self._memory.driver, parts, self._memory.inward)
        self._told, *memories = made.parts
        self._told_parts = emitted.given.parts_of(self._told)
        self._few = [(v.name, _floats(m, v)) for v, m in zip(few, memories, strict=True)]
        self._portions[0].work[:0] = made.work

    def _outputs(self, emitted: CudaEmitter, segment: Segment) -> None:
        """Few results come with the work; large ones behind it, and logits, of which a few numbers may do."""
        there = [v for v in segment.writes if emitted.rows(v)]
        logits = {op.out for op in segment.ops if op.kind == "head"}
        few = [v for v in there if v not in logits and _nbytes(emitted, v) <= FEW_BYTES]
        few.sort(key=lambda v: emitted.at[v])
        parts = [(emitted.at[v], _nbytes(emitted, v)) for v in few]
        made = crossing(self._memory.driver, parts, lambda at, host, n: self._memory.outward(host, at, n))
        self._made = {v.name: _floats(m, v) for v, m in zip(few, made.parts, strict=True)}
        self._portions[-1].work += made.work
        self._results = [
            DeviceResult(v, emitted.at[v], self._landing(emitted.rows(v), v.width))
            for v in there
            if v not in few
        ]

    def _rows_home(self, emitted: CudaEmitter, shape: PassShape) -> None:
        """Keys and values of a few tokens come with the work, too."""
        n, given = shape.tokens, emitted.given
        self._few_rows: list[tuple[Slabs, Bytes]] = []
        for slabs in [slabs for slabs in self._slabs if n <= slabs.few]:
            packed = self._memory.driver.pinned(n * slabs.row_bytes)
            slots = emitted.given_at + given.offset(f"slots {slabs.group}")
            self._portions[-1].work += slabs.packs(n, slots, int(packed.ctypes.data))
            self._few_rows.append((slabs, packed.reshape(n, slabs.row_bytes)))
        self._many_rows = [slabs for slabs in self._slabs if n > slabs.few]

    def _emitted(self, place: CudaPlace, segment: Segment, shape: PassShape) -> CudaEmitter:
        """The work of a segment, in a place that others use, too. What it takes is known only then, so the
        largest place is tried first: writing all of it down takes milliseconds, and the device waits."""
        room, base = self._backend.gpu.workplaces.largest
        emitted = CudaEmitter(place, segment, shape, base, self._begin)
        if emitted.nbytes > room:
            base = self._backend.gpu.workplaces.of(emitted.nbytes)
            emitted = CudaEmitter(place, segment, shape, base, self._begin)
        return emitted

    def _landing(self, rows: int, width: int) -> Floats:
        memory = self._memory.driver.pinned(FLOAT_BYTES * rows * width)
        return memory.view(np.float32).reshape(rows, width)

    def submit(self, work: Pass) -> Done:
        """Give the device everything at once; who waits gets the results."""
        self._backend.check()
        try:
            for slabs in self._slabs:
                slabs.prepare(work)
            for slabs in self._borrowed:
                slabs.prepare(work, written_here=False)
            return self._begun(work)
        except BaseException:
            self._leave_off()
            self._let_run_out()
            raise

    def _begun(self, work: Pass) -> Done:
        """What was prepared, given to the device."""
        self._kv.arrivals.send()
        places = self._states.prepare(work) if self._states else None
        self._told[:] = self._given.told(work)
        if places:
            tell_places(self._told_parts, places)
        for name, memory in self._few:
            memory[:] = work.values[name]
        for value, address in self._large:
            self._read(value, address, work)
        self._compute()
        chosen = self._choose(work)
        for r in self._results:
            if chosen is None or r.value.name != chosen.name:
                self._memory.collect(int(r.array.ctypes.data), r.address, r.array.nbytes)
        coming = self._coming(work)
        if places:
            coming.append(places.written)
        self._memory.driver.record(self._done, self._memory.computing)
        return DeviceRun(self, work, coming, chosen)

    def _let_run_out(self) -> None:
        """What the device has of a pass that failed reads memory which the next one fills."""
        with suppress(BackendError):
            self._memory.driver.record(self._done, self._memory.computing)
            self._memory.driver.synchronize(self._done)

    def _coming(self, work: Pass) -> list[Coming]:
        """Rows that are on their way home."""
        coming: list[Coming] = []
        for slabs, packed in self._few_rows:
            slots = work.slots[slabs.group]
            coming.append(ReturnedRows(slabs, packed, slots, slabs.stamps(slots)))
        for slabs in self._many_rows:
            coming.append(slabs.send_home(work.slots[slabs.group]))
        return coming

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

    def _choose(self, work: Pass) -> TopKResult | None:
        """A caller that needs only a few numbers of each row gets only these."""
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

    def _chooser(self, made: DeviceResult, k: int) -> TopKResult | None:
        """What chooses the k greatest; where memory is full, rows come home as a whole."""
        with suppress(BudgetError):
            return TopKResult(self._memory, self._backend.gpu.library, made, k)
        return None

    def finish(self, work: Pass, coming: Sequence[Coming], chosen: TopKResult | None) -> None:
        """Wait, and put results where others find them."""
        driver, start = self._memory.driver, perf_counter()
        while not (happened := driver.happened(self._done)) and self._kv.advance(wait=False):
            pass
        if not happened:
            driver.synchronize(self._done)
        if not self._is_long and perf_counter() - start > LONG_S:
            self._is_long = True
            driver.drop(self._done)
            self._done = driver.event(sleeps=True)
        for each in coming:
            each.finish()
        self._leave_off()
        work.values.update(self._made)
        for r in self._results:
            if chosen is None or r.value.name != chosen.name:
                work.values[r.value.name] = r.array
                self._backend.gpu.made[r.value.name] = r
        work.greatest = chosen.greatest if chosen else work.greatest
        work.values.update(self._empty)

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


def _nbytes(emitted: CudaEmitter, value: Value) -> int:
    return FLOAT_BYTES * emitted.rows(value) * value.width


def _floats(memory: Bytes, value: Value) -> Floats:
    return memory.view(np.float32).reshape(-1, value.width)


@dataclass(slots=True)
class DeviceRun:
    """Work that the device has."""

    runner: CudaRunner
    work: Pass
    coming: Sequence[Coming]
    chosen: TopKResult | None

    def wait(self) -> None:
        """Until it is done."""
        self.runner.finish(self.work, self.coming, self.chosen)
