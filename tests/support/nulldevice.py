"""The null device: it runs any graph, computes nothing, and its logits still say which tokens it was given.

The logits of a row are highest for the token after the row's own, so a text counts upwards: whatever the
scheduler or the engine gets wrong about tokens shows in it. Weights are not read, and K and V are one number
in each row, the token's position, checked when attention reads them.
"""

from __future__ import annotations

import numpy as np

from hetrun.backend import (
    Buffers,
    Done,
    Floats,
    Pass,
    PassShape,
    ReadInto,
    Runner,
    Segment,
    WeightUse,
)
from hetrun.backend.interpreter import ArrayBuffer, InterpretedRunner, InterpretingBackend, OpFunction
from hetrun.graph import Op
from hetrun.graph.ops import OPS, Attention
from hetrun.memory.kv.cache import KvCache

NO_WEIGHTS = np.zeros((1, 1), np.float32)


def embed(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return np.broadcast_to(work.tokens[:, None].astype(np.float32), (len(work.tokens), op.out.width))


def pass_on(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    """The token of each row, as wide as the result is."""
    return np.broadcast_to(x[0][:, :1], (len(x[0]), op.out.width))


def select(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    return x[0][work.wanted]


def attention(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    assert isinstance(op.attrs, Attention)
    a, group = op.attrs, kv.group(op.attrs.layer)
    for table in kv.heads(a.layer, a.first, a.n_kv_heads):
        numbers = table.n_heads * table.head_dim
        table.write(work.slots[group], np.repeat(work.positions[:, None], numbers, 1).astype(np.float32))
        for part in work.parts:
            found = table.read(part.kv[group].rows)[:, 0, 0]
            first, last = work.positions[part.a], work.positions[part.b - 1]
            seen = np.arange(max(0, first + 1 - a.window) if a.window else 0, last + 1)
            if found.tolist() != seen.tolist():
                raise AssertionError(f"positions in the KV cache are {found}, not {seen}")
    return pass_on(op, x, w, work, kv)


def head(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
    following = (x[0][:, :1] + 1) % op.out.width
    logits: Floats = -np.abs(np.arange(op.out.width, dtype=np.float32) - following)
    return logits


TABLE: dict[str, OpFunction] = dict.fromkeys(OPS, pass_on) | {
    "embed": embed,
    "select": select,
    "attention": attention,
    "head": head,
}


class NullRunner(InterpretedRunner):
    """Complains when it is used for what it was not made for."""

    def __init__(self, device: NullDevice, segment: Segment, shape: PassShape, kv: KvCache) -> None:
        super().__init__(segment, [(op, TABLE[op.kind], []) for op in segment.ops], kv, device)
        self.segment, self.shape = segment, shape
        self.closed = False
        self._device = device

    def submit(self, work: Pass) -> Done:
        assert not self.closed, "run after it was closed"
        assert work.shape == self.shape, "run on a pass of another shape"
        self._device.passes.append(work)
        return super().submit(work)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class NullDevice(InterpretingBackend):
    """Everything it compiled is in `runners`, what it ran in `passes`, what it holds in `uploaded`."""

    def __init__(self, name: str = "null") -> None:
        super().__init__(name, TABLE)
        self.runners: list[NullRunner] = []
        self.passes: list[Pass] = []
        self.uploaded: list[WeightUse] = []
        self.threads: list[int] = []
        self.closed = False

    def upload(self, wanted: WeightUse, read: ReadInto) -> ArrayBuffer:
        self.uploaded.append(wanted)
        return ArrayBuffer(NO_WEIGHTS)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        for use in self.wants(segment.ops):
            assert use in buffers, f"{use.weight.name} was not brought in"
        self.runners.append(NullRunner(self, segment, shape, kv))
        return self.runners[-1]

    def set_threads(self, threads: int) -> None:
        self.threads.append(threads)

    @property
    def open(self) -> list[NullRunner]:
        """The runners that were not closed."""
        return [r for r in self.runners if not r.closed]

    def close(self) -> None:
        self.closed = True
