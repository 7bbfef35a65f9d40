"""The base class that interprets a segment op by op: all that a new backend needs to begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np

from hetrun.backend.interface import (
    FINISHED,
    FLOAT_BYTES,
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
from hetrun.backend.op_profile import activity
from hetrun.errors import Cancelled
from hetrun.graph import Op, Value
from hetrun.memory.kv.cache import KvCache


class ArrayBuffer:
    """A weight as a float32 matrix in host memory."""

    def __init__(self, array: Floats) -> None:
        self.array = array

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self.array.nbytes)


OpFunction = Callable[[Op, list[Floats], list[Floats], Pass, KvCache], Floats]


class InterpretingBackend(Backend):
    """Runs a segment op by op from a table of functions: all that a new backend needs to begin with."""

    def __init__(self, name: str, table: Mapping[str, OpFunction]) -> None:
        self.name = name
        self._table = table
        self.cancelled = threading.Event()

    def supports(self, op: Op) -> bool:
        return op.kind in self._table

    def cancel(self) -> None:
        self.cancelled.set()

    def rearm(self) -> None:
        self.cancelled.clear()

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(FLOAT_BYTES * use.weight.shape[0] * use.weight.shape[1] for use in wanted)

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        weight = wanted.weight
        rows, cols = weight.shape
        array = np.empty((rows, cols), np.float32)
        step = max(1, (16 << 20) // weight.quant.row_bytes(cols))
        for a in range(0, rows, step):
            b = min(a + step, rows)
            raw = np.empty((b - a, weight.quant.row_bytes(cols)), np.uint8)
            read(weight.rows(a, b), raw.reshape(-1))
            array[a:b] = weight.quant.dequantise(raw, cols)
        return ArrayBuffer(array)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        steps = []
        for op in segment.ops:
            weights = [_array(buffers, op, i) for i in range(len(op.weights))]
            steps.append((op, self._table[op.kind], weights))
        return InterpretedRunner(segment, steps, kv, self)


def _array(buffers: Buffers, op: Op, index: int) -> Floats:
    buffer = buffers[use_of(op, index)]
    assert isinstance(buffer, ArrayBuffer)
    return buffer.array


class InterpretedRunner:
    """Calls one function for each op, until the pass is cancelled."""

    def __init__(
        self,
        segment: Segment,
        steps: Sequence[tuple[Op, OpFunction, list[Floats]]],
        kv: KvCache,
        backend: InterpretingBackend,
    ) -> None:
        self._segment = segment
        self._steps = steps
        self._kv = kv
        self._backend = backend

    def submit(self, work: Pass) -> Done:
        local = {v.name: self._read(v, work) for v in self._segment.reads}
        spent = self._backend.spent
        for op, function, weights in self._steps:
            if self._backend.cancelled.is_set():
                raise Cancelled("the computation was stopped")
            if work.between:
                work.between()
            start = perf_counter()
            local[op.out.name] = function(op, [local[v.name] for v in op.inputs], weights, work, self._kv)
            if spent:
                spent.add(activity(op.kind), perf_counter() - start)
        for value in self._segment.writes:
            work.values[value.name] = local[value.name]
        return FINISHED

    def _read(self, value: Value, work: Pass) -> Floats:
        if value.rows == "wanted" and not len(work.wanted):
            return np.empty((0, value.width), np.float32)  # the op that makes it may leave it out then
        return work.values[value.name]

    def close(self) -> None:
        """Nothing to give back."""
