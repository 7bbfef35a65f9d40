"""The backend: what it supports, how it holds weights, and which function runs which op."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from time import perf_counter

from hetrun.backend import (
    FLOAT_BYTES,
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
from hetrun.backend.interpreter import ArrayBuffer, InterpretedRunner, InterpretingBackend, OpFunction
from hetrun.graph import Op
from hetrun.graph.ops import Attention, Rope
from hetrun.memory.kv.cache import KvCache
from hetrun_numba.formats import PRODUCTS
from hetrun_numba.packing import FloatPanels, Panels, pack, packed_bytes

log = logging.getLogger(__name__)

SLOW_S = 3.0  # to start: more than loading takes what was compiled before
LINEAR = ("linear", "head")
OTHERS = ("rms_norm", "swiglu", "add", "rope", "attention", "select")


class NumbaBackend(InterpretingBackend):
    """Compiled by numba for this CPU."""

    started = False

    def __init__(self, name: str = "numba") -> None:
        super().__init__(name, {})
        self.threads = os.cpu_count() or 1
        self._library_bytes = 0

    def start(self) -> None:
        """Import numba, and compile the kernels or load what was compiled before."""
        if self.started:
            return
        before, begun = _private_bytes(), perf_counter()
        from hetrun_numba.compiling import are_kept
        from hetrun_numba.kernels import TABLE

        self._table = TABLE
        self._library_bytes = max(0, _private_bytes() - before)
        if (seconds := perf_counter() - begun) > SLOW_S:
            hint = "kept for the next start" if are_kept() else "set NUMBA_CACHE_DIR to keep them"
            log.info("the kernels were compiled in %.0f s: %s", seconds, hint)
        self.started = True

    @property
    def overhead_bytes(self) -> int:
        return self._library_bytes

    def supports(self, op: Op) -> bool:
        """Products of a few types, and what stands between them in the layers of llama and its like."""
        if op.kind in LINEAR:
            return op.weights[0].quant.name in PRODUCTS
        if isinstance(op.attrs, Attention):
            return not (op.attrs.softcap or op.attrs.sharing or op.weights or self.whole)
        if isinstance(op.attrs, Rope):
            return not op.attrs.ext_factor
        return op.kind in OTHERS

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(
            packed_bytes(use.weight)
            if use.use == "product"
            else FLOAT_BYTES * use.weight.shape[0] * use.weight.shape[1]
            for use in wanted
        )

    # The base promises its own kind of buffer; only `compile` here looks into them.
    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        if wanted.use != "product":
            return super().upload(wanted, read)
        self.start()
        from hetrun_numba.kernels import set_threads

        set_threads(self.threads)
        return pack(wanted.weight, read)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        self.start()
        return NumbaRunner(segment, [self._step(op, buffers) for op in segment.ops], kv, self)

    def _step(self, op: Op, buffers: Buffers) -> tuple[Op, OpFunction, list[Floats]]:
        """An op, the function that runs it, and its vectors; a function has its matrix already."""
        found = [buffers[use_of(op, i)] for i in range(len(op.weights))]
        vectors = [b.array for b in found if isinstance(b, ArrayBuffer)]
        if op.kind not in LINEAR:
            return op, self._table[op.kind], vectors
        matrix = found[0]
        assert isinstance(matrix, Panels | FloatPanels)
        return op, _times(matrix), vectors

    def set_threads(self, threads: int) -> None:
        self.threads = threads


def _private_bytes() -> int:
    """Memory that this process has to itself; 0 where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0


def _times(matrix: Panels | FloatPanels) -> OpFunction:
    """The product by one matrix, plus a bias if there is one."""
    from hetrun_numba.kernels import product

    def linear(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        return product(x[0], matrix, w[0] if w else None)

    return linear


class NumbaRunner(InterpretedRunner):
    """The same on as many threads as the backend was told."""

    _backend: NumbaBackend

    def submit(self, work: Pass) -> Done:
        from hetrun_numba.kernels import set_threads

        set_threads(self._backend.threads)
        return super().submit(work)
