"""A compiled segment: a list of calls of torch, one for each op or for several that are one.

Values lie in slots and are let go behind their last reader. They cross to other segments as float32 arrays;
inside they are float32 where they are summed up (the residual stream, scores) and bf16 between products.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from hetrun.backend import FINISHED, Buffers, Done, Pass, PassShape, Segment
from hetrun.backends.amx import attention, causal_conv, delta_chunks
from hetrun.backends.amx.lowering import AmxEmitter, SegmentFrame
from hetrun.graph import Op, Value
from hetrun.graph.ops import Attention, CausalConv, DeltaNet
from hetrun.memory.kv.cache import KvCache

if TYPE_CHECKING:
    from hetrun.backends.amx.backend import AmxBackend


class AmxRunner:
    """A segment for passes of one shape."""

    def __init__(
        self, backend: AmxBackend, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache
    ) -> None:
        self._backend = backend
        self._shape = shape
        written = AmxEmitter(backend, segment, shape, buffers, kv)
        self._calls = written.calls
        self._slots = written.slots
        self._reads = [(v.name, written.slots[v]) for v in segment.reads if _is_there(v, shape)]
        self._writes = [(v.name, written.slots[v]) for v in segment.writes if _is_there(v, shape)]
        backend.book(self, _peak_bytes(segment, shape))

    @torch.inference_mode()  # a call of torch takes less time when no gradients can be asked for
    def submit(self, work: Pass) -> Done:
        """Compute; results are arrays of their own."""
        frame = SegmentFrame(work, [None] * len(self._slots))
        for name, slot in self._reads:
            frame.values[slot] = torch.from_numpy(work.values[name])
        check, book, between = self._backend.check, self._backend.spent, work.between
        start = perf_counter()
        try:
            for kind, call, dead in self._calls:
                check()
                begin = perf_counter()
                if between:
                    between()
                    away = perf_counter() - begin
                    start, begin = start + away, begin + away
                call(frame)
                if book:
                    book.add(kind, perf_counter() - begin)
                for slot in dead:
                    frame.values[slot] = None
            for name, slot in self._writes:
                work.values[name] = frame.get(slot).float().contiguous().numpy()
        finally:
            self._backend.native_seconds += perf_counter() - start
        return FINISHED

    def close(self) -> None:
        """Nothing lives between two trips."""
        self._backend.unbook(self)


def _is_there(value: Value, shape: PassShape) -> bool:
    """Values of wanted rows are left out where no row is wanted."""
    return value.rows == "tokens" or shape.wanted > 0


def _peak_bytes(segment: Segment, shape: PassShape) -> int:
    """What the values of a trip take at most, about: the widest few of them in float32 and in bf16."""
    rows = {"tokens": shape.tokens, "wanted": shape.wanted}
    sizes = sorted(6 * rows[v.rows] * v.width for op in segment.ops for v in (*op.inputs, op.out))
    return sum(sizes[-4:]) + max([_passing_bytes(op, shape.tokens) for op in segment.ops], default=0)


def _passing_bytes(op: Op, tokens: int) -> int:
    """What an op takes besides its values."""
    match op.attrs:
        case Attention():
            return attention.passing_bytes(op.attrs, tokens)
        case CausalConv():
            return causal_conv.passing_bytes(op.attrs, tokens)
        case DeltaNet():
            return delta_chunks.passing_bytes(op.attrs, tokens)
    return 0
