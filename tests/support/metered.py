"""The metered device: it computes for real, on a thread and in a memory of its own, behind a link of set
speed.

It stands for a GPU where there is none, so that planning for two devices can be tried in earnest. Nothing it
says about speed is a claim about any device: its arithmetic is numpy's, its link is a clock.

- Memory: weights that stay (`resident`, and all small ones), and a working set for the others, which are
  copied over the link before each use: for the next op of its queue while the current one computes, around
  the end of a pass to the beginning of the next.
- Link: one copy at a time, in the order in which they were asked for; it is over when the bytes are there and
  their time has passed. What is smaller than `SMALL` passes beside that queue, as reads of page-locked memory
  do.
- Keys and values of the layers that it attends for are kept in its memory as well. Rows that another backend
  wrote are brought over when they are first seen; rows that it writes go back to the host at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from hetrun.backend import (
    Backend,
    Buffer,
    Buffers,
    Done,
    Floats,
    Pass,
    PassShape,
    ReadInto,
    Runner,
    Segment,
    WeightUse,
    use_of,
)
from hetrun.backend.interpreter import ArrayBuffer, InterpretingBackend, OpFunction
from hetrun.backends.reference.ops import TABLE
from hetrun.errors import BackendError, Cancelled
from hetrun.graph import Op, Value, Weight
from hetrun.graph.ops import Attention
from hetrun.memory.kv.cache import KvCache, KvTable
from hetrun.planner.two_device.balance import HostLink
from tests.support.devicethread import DeviceThread, Task
from tests.support.timeline import DEVICE, Activity, Copy, Timeline, Wire, named

SMALL = 64 << 10  # bytes; less than that passes beside the link's queue


@dataclass(eq=False, slots=True)
class MeteredBuffer:
    """A weight on the host, and on the device if it stays there."""

    use: WeightUse
    host: Floats
    kept: Floats | None

    @property
    def nbytes(self) -> int:
        """On the host: what the device holds is counted there."""
        return int(self.host.nbytes)


@dataclass(eq=False, slots=True)
class Load:
    """A weight in the working set, or on its way there."""

    buffer: MeteredBuffer
    array: Floats
    copy: Copy


Streamed = tuple[MeteredBuffer, ...]
Tables = tuple[KvTable, KvTable]


class Metered(Backend):
    """See the module's words."""

    asynchronous = True

    def __init__(
        self,
        memory: int,
        link: HostLink,
        timeline: Timeline | None = None,
        resident: Callable[[Weight], bool] = lambda weight: False,
        name: str = "metered",
        table: Mapping[str, OpFunction] = TABLE,
    ) -> None:
        """`memory` is in bytes, of float32 weights; `resident` says which of them stay."""
        self.name = name
        self.timeline = timeline or Timeline()
        self.memory = memory
        self.kept_bytes = 0
        self.most_loaded = 0  # the working set at its largest
        self.cancelled = threading.Event()
        self._inner = InterpretingBackend(name, table)
        self._table = table
        self._resident = resident
        self._wire = Wire(link, lambda: self.timeline, f"link-{name}")
        self._programs: dict[PassShape, list[MeteredRunner]] = {}
        self._program: Streamed = ()  # what is used in a pass, in order
        self._next = 0  # of the program, the next to be loaded
        self._ahead: deque[Load] = deque()
        self._loaded = 0  # bytes in the working set
        self._mirrors: dict[int, tuple[Tables, Tables]] = {}  # by layer: the host's, and ours
        self._made: dict[str, Floats] = {}  # results of the last pass
        self._last: tuple[Activity, ...] = ()
        self._thread = DeviceThread(name)

    @property
    def window(self) -> int:
        """Bytes of the working set."""
        return self.memory - self.kept_bytes

    @property
    def last(self) -> tuple[Activity, ...]:
        """What the device did last; a caller that waited for it knows that it is over."""
        return self._last

    def supports(self, op: Op) -> bool:
        return self._inner.supports(op)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return self._inner.resident_bytes(wanted)

    def streams(self, wanted: WeightUse) -> bool:
        return self.resident_bytes([wanted]) >= SMALL and not self._resident(wanted.weight)

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        whole = self._inner.upload(wanted, read)
        assert isinstance(whole, ArrayBuffer)
        host = whole.array
        kept = None if self.streams(wanted) else host.copy()
        if kept is not None:
            self.kept_bytes += kept.nbytes
            if self.kept_bytes > self.memory:
                raise BackendError(
                    f"{self.name}: no memory left for {wanted.weight.name}; keep fewer weights"
                )
        return MeteredBuffer(wanted, host, kept)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        program = self._programs.setdefault(shape, [])
        runner = MeteredRunner(self, segment, shape, buffers, kv)
        for op, weights in runner.weights.items():
            if sum(b.nbytes for b in weights if b.kept is None) > self.window:
                raise BackendError(f"{self.name}: the weights of {op.scope} are larger than the working set")
        program.append(runner)
        return runner

    def closed(self, runner: MeteredRunner) -> None:
        """A runner is gone."""
        program = self._programs[runner.shape]
        program.remove(runner)
        if not program:
            del self._programs[runner.shape]

    def give(self, task: Task) -> None:
        """Work for the device's thread."""
        self._thread.give(task)

    def cancel(self) -> None:
        self.cancelled.set()

    def rearm(self) -> None:
        self.cancelled.clear()

    def close(self) -> None:
        self._thread.close()
        self._wire.close()
        self._ahead.clear()

    # What follows runs on the device's thread.

    def run(self, runner: MeteredRunner, work: Pass, given: tuple[Activity, ...]) -> None:
        """A segment: op by op, each as soon as its weights are there."""
        self._last = given
        self._follow(runner)
        values = {v.name: self._bring(v, work) for v in runner.segment.reads}
        for op in runner.segment.ops:
            if self.cancelled.is_set():
                raise Cancelled("the computation was stopped")
            weights, loads = self._weights(runner, op)
            inputs = [values[v.name] for v in op.inputs]
            if isinstance(op.attrs, Attention):
                values[op.out.name] = self._attend(op, inputs, work, runner.kv)
            else:
                values[op.out.name] = self._compute(op, inputs, weights, work, runner.kv)
            self._release(loads)
        for value in runner.segment.writes:
            self._cross(f"{value.name} back", values[value.name].nbytes)
            self._made[value.name] = work.values[value.name] = values[value.name]

    def _compute(self, op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache | Mirror) -> Floats:
        activity = self.timeline.begin(DEVICE, named(op, work), self._last)
        out = self._table[op.kind](op, x, w, work, cast(KvCache, kv))  # a mirror has what attention asks for
        self.timeline.end(activity)
        self._last = (activity,)
        return out

    def _bring(self, value: Value, work: Pass) -> Floats:
        """A value that the host has. Those that the device made itself are in both memories."""
        if value.rows == "wanted" and not len(work.wanted):
            return np.empty((0, value.width), np.float32)
        array = work.values[value.name]
        if array is self._made.get(value.name):
            return array
        self._cross(value.name, array.nbytes)
        return array.copy()

    def _cross(self, what: str, nbytes: int, move: Callable[[], object] = lambda: None) -> None:
        """Bytes over the link, waited for."""
        if nbytes < SMALL:
            move()
            self._last = (*self._last, self._wire.beside(what, nbytes, self._last))
            return
        copy = self._wire.ask(Copy(what, nbytes, move, self._last))
        self._last = (*self._last, self._arrival(copy))

    def _arrival(self, copy: Copy) -> Activity:
        copy.arrived.wait()
        assert copy.activity is not None
        return copy.activity

    # --- the working set

    def _follow(self, runner: MeteredRunner) -> None:
        """Whatever was loaded ahead is of use only if it is what this runner begins with."""
        runners = self._programs[runner.shape]
        program = tuple(b for r in runners for b in r.streamed)
        at = sum(len(r.streamed) for r in runners[: runners.index(runner)])
        if not runner.streamed:
            return
        if program != self._program or (self._ahead and self._ahead[0].buffer is not program[at]):
            self._program, self._next = program, at
            self._ahead.clear()
            self._loaded = 0
        elif not self._ahead:
            self._next = at
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Ask for what is used next, as far as the working set has room, and for nothing twice."""
        while len(self._ahead) < len(self._program):
            buffer = self._program[self._next]
            if self._loaded + buffer.nbytes > self.window:
                return
            array = np.empty_like(buffer.host)
            move = _into(array, buffer.host)
            copy = self._wire.ask(Copy(buffer.use.weight.name, buffer.nbytes, move, self._last))
            self._ahead.append(Load(buffer, array, copy))
            self._loaded += buffer.nbytes
            self.most_loaded = max(self.most_loaded, self._loaded)
            self._next = (self._next + 1) % len(self._program)

    def _weights(self, runner: MeteredRunner, op: Op) -> tuple[list[Floats], list[Load]]:
        """The weights of an op in the device's memory, once they are there."""
        arrays, loads = [], []
        for buffer in runner.weights[op]:
            if buffer.kept is not None:
                arrays.append(buffer.kept)
                continue
            load = self._ahead.popleft()
            assert load.buffer is buffer, "the working set is out of step"
            self._last = (*self._last, self._arrival(load.copy))
            arrays.append(load.array)
            loads.append(load)
        return arrays, loads

    def _release(self, loads: Sequence[Load]) -> None:
        if loads:
            self._loaded -= sum(load.buffer.nbytes for load in loads)
            self._load_ahead()

    # --- keys and values

    def _attend(self, op: Op, x: list[Floats], work: Pass, kv: KvCache) -> Floats:
        """In the device's own rows; those of others are brought over first, its new ones go back."""
        a = op.attrs
        assert isinstance(a, Attention)
        tables = kv.heads(a.layer, a.first, a.n_kv_heads)
        mirror = Mirror(kv, self._mirror(kv, a))
        group = kv.group(a.layer)
        slots = work.slots[group]
        seen = np.setdiff1d(np.concatenate([p.kv[group].rows for p in work.parts]), slots)
        for name, host, mine in zip("kv", tables, mirror.heads(a.layer, a.first, a.n_kv_heads), strict=True):
            old = seen[(host.raw[seen] != mine.raw[seen]).any(axis=1)]
            if len(old):
                move = _rows_into(mine, host, old)
                self._cross(f"{len(old)} rows of {name}", len(old) * host.raw.shape[1], move)
        out = self._compute(op, x, [], work, mirror)
        for name, host, mine in zip("kv", tables, mirror.heads(a.layer, a.first, a.n_kv_heads), strict=True):
            self._cross(f"new {name}", len(slots) * host.raw.shape[1], _rows_into(host, mine, slots))
        return out

    def _mirror(self, kv: KvCache, a: Attention) -> Tables:
        """A layer's rows in the device's memory; another cache gets other ones."""
        tables = kv.tables[a.layer]
        known, mine = self._mirrors.get(a.layer, (None, tables))
        if known is not tables:
            mine = _empty_like(tables[0]), _empty_like(tables[1])
            self._mirrors[a.layer] = tables, mine
        return mine


def _into(array: Floats, source: Floats) -> Callable[[], object]:
    return lambda: np.copyto(array, source)


def _rows_into(target: KvTable, source: KvTable, rows: np.ndarray) -> Callable[[], object]:
    def move() -> None:
        target.raw[rows] = source.raw[rows]

    return move


def _empty_like(table: KvTable) -> KvTable:
    return KvTable(np.zeros_like(table.raw), table.quant, table.n_heads, table.head_dim)


@dataclass(frozen=True, slots=True)
class Mirror:
    """What the reference's attention asks a cache for, with one layer's tables in another memory."""

    kv: KvCache
    tables: tuple[KvTable, KvTable]

    def group(self, layer: int) -> int:
        return self.kv.group(layer)

    def heads(self, layer: int, first: int, n: int) -> tuple[KvTable, KvTable]:
        keys, values = self.tables
        return keys.heads(first, n), values.heads(first, n)


class Given(Task):
    """A segment's work on the device's thread; who waits for it knows what the device did last."""

    def __init__(self, runner: MeteredRunner, work: Pass) -> None:
        super().__init__(self._compute)
        self._runner, self._pass = runner, work
        self._given = runner.device.timeline.seen
        self._last: tuple[Activity, ...] = ()

    def _compute(self) -> None:
        try:
            self._runner.device.run(self._runner, self._pass, self._given)
        finally:
            self._last = self._runner.device.last

    def wait(self) -> None:
        try:
            super().wait()
        finally:
            timeline = self._runner.device.timeline
            timeline.seen = (*timeline.seen, *self._last)


class MeteredRunner:
    """A segment on the device."""

    def __init__(
        self, device: Metered, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache
    ) -> None:
        self.device, self.segment, self.shape, self.kv = device, segment, shape, kv
        self.weights: dict[Op, list[MeteredBuffer]] = {}
        for op in segment.ops:
            found = [buffers[use_of(op, i)] for i in range(len(op.weights))]
            self.weights[op] = [b for b in found if isinstance(b, MeteredBuffer)]
        self.streamed = tuple(b for op in segment.ops for b in self.weights[op] if b.kept is None)

    def submit(self, work: Pass) -> Done:
        task = Given(self, replace(work, chosen=None))  # the engine's thread counts
        self.device.give(task)
        return task

    def close(self) -> None:
        self.device.closed(self)
