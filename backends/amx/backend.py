"""The backend: four ways to hold weights, one way to run segments.

torch is imported by `start`, not before: it takes a second and some 200 MiB.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetrun.backend import Backend, Buffer, Buffers, PassShape, ReadInto, Runner, Segment, WeightUse
from hetrun.backends.amx import fusion
from hetrun.backends.amx.sizes import Way, bytes_of
from hetrun.errors import Cancelled
from hetrun.graph import Op
from hetrun.graph.ops import OPS, Attention, Moe
from hetrun.memory.kv.cache import KvCache
from hetrun.system.memory_info import process_memory

if TYPE_CHECKING:
    from hetrun.backends.amx.attention import AttentionScratch as AttentionScratch
    from hetrun.backends.amx.bf16_matmul import UnpackScratch
    from hetrun.backends.amx.runner import AmxRunner

PRODUCTS = ("linear", "head", "moe", "per_head")
ROUNDING = {"bf16": 2.8e-3, "int8": 1.2e-2}  # the error of a product, in parts of its size


class AmxBackend(Backend):
    """torch on the CPU."""

    started = False
    scratch: UnpackScratch
    attention_scratch: AttentionScratch

    def __init__(self, name: str, way: Way) -> None:
        self.name = name
        self._way = way
        self.arithmetic = "int8" if way == "int8" else "bf16"
        self._threads = os.cpu_count() or 1
        self._cancelled = threading.Event()
        self._booked: dict[int, int] = {}
        self._library_bytes = 0

    def start(self) -> None:
        """Import torch; its threads are the engine's from now on."""
        if self.started:
            return
        before = process_memory()
        import torch

        if self._way == "ipex":
            import hetrun.backends.amx.ipex_matmul  # noqa: F401 - loads IPEX
        from hetrun.backends.amx.attention import AttentionScratch as AttentionScratch
        from hetrun.backends.amx.bf16_matmul import UnpackScratch, packs
        from hetrun.backends.amx.buffers import keep_freed_memory

        keep_freed_memory()
        torch.set_num_threads(self._threads)
        packs()
        self.scratch, self.attention_scratch = UnpackScratch(self.check), AttentionScratch()
        self._library_bytes = max(0, process_memory() - before)
        self.started = True

    @property
    def inside(self) -> bool:
        """Whether activations run inside of products: all can that do not unpack their weights each time."""
        return self._way != "lean"

    def supports(self, op: Op) -> bool:
        if self.whole and isinstance(op.attrs, Attention):
            return False
        return op.kind in OPS and not (isinstance(op.attrs, Moe) and op.attrs.slots)

    def rounding(self, op: Op) -> float:
        return ROUNDING[self.arithmetic] * (op.kind in PRODUCTS)

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return fusion.wants(ops, self.inside)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(bytes_of(use, self._way) for use in wanted)

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        self.start()
        from hetrun.backends.amx import upload

        return upload.upload(wanted, self._way, read, self.scratch)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        self.start()
        from hetrun.backends.amx.runner import AmxRunner

        return AmxRunner(self, segment, shape, buffers, kv)

    def set_threads(self, threads: int) -> None:
        if self.started and threads != self._threads:
            import torch

            torch.set_num_threads(threads)
        self._threads = threads

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self._threads

    def peaks(self) -> Mapping[str, float]:
        self.start()
        from hetrun.backends.amx.peak import peaks

        return peaks()

    def cancel(self) -> None:
        self._cancelled.set()

    def rearm(self) -> None:
        self._cancelled.clear()

    def check(self) -> None:
        """Raise after a cancel; asked between calls, none of which takes long."""
        if self._cancelled.is_set():
            raise Cancelled("the computation was stopped")

    @property
    def overhead_bytes(self) -> int:
        if not self.started:
            return 0
        held = self._library_bytes + self.scratch.nbytes + self.attention_scratch.nbytes
        return held + max(self._booked.values(), default=0)  # segments run one after the other

    def book(self, runner: AmxRunner, nbytes: int) -> None:
        """Count what one trip through a segment takes."""
        self._booked[id(runner)] = nbytes

    def unbook(self, runner: AmxRunner) -> None:
        """The segment is gone."""
        self._booked.pop(id(runner), None)
