"""The backend: one GPU, its memory, and the segments that run there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from hetrun.backend import (
    FLOAT_BYTES,
    Backend,
    Buffer,
    Buffers,
    OwnMemory,
    PassShape,
    ReadInto,
    Runner,
    Segment,
    WeightUse,
    looks_up,
)
from hetrun.backend.expert_slots import ExpertSlots
from hetrun.backends.cuda import fusion, weights
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.attention_launch import WIDEST
from hetrun.backends.cuda.gpu import Gpu
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.kv_mirror import Part, Parts
from hetrun.backends.cuda.lowering import KINDS, CudaPlace
from hetrun.backends.cuda.matmul_launch import takes_int8
from hetrun.backends.cuda.pass_args import FEW
from hetrun.backends.cuda.runner import CudaRunner
from hetrun.backends.cuda.stages import laid_out
from hetrun.backends.cuda.states.launch import MOST_COLUMNS, MOST_TAPS
from hetrun.backends.cuda.streamed.file_feed import FileFeed, feed_bytes
from hetrun.backends.cuda.weights import Crossing, DeviceWeight, InFile
from hetrun.errors import Cancelled
from hetrun.graph import Op, Weight
from hetrun.graph.ops import Attention, CausalConv, DeltaNet, Moe, PerHead, Rope, Stateful
from hetrun.graph.sharding import in_groups, of_router
from hetrun.memory.kv.cache import KvCache

# The error of a product in parts of its size: of a rounded input, and of weights that are rounded as well.
ROUNDED_INPUT, ROUNDED_BOTH = 1.7e-3, 2.4e-3
EIGHT_BITS = 6e-3  # of an input that was rounded to bytes
# The window through which weights cross: this many times what a layer needs at once, so that one part of it
# is filled while another is read; and at most so much of what weights could have.
WINDOWS, WINDOW_SHARE = 2, 0.5
# Tokens of a long prompt that are computed at once. Where weights cross for every pass more are worth it, and
# so much of the device's memory.
PASSES, LONG_PASSES, LONG_PASSES_SHARE = (2048, 1024, 512), (4096, 2048, 1024, 512), 1 / 16
SMALL = 64 << 10  # bytes: what is smaller stays on the device in any case


class CudaBackend(Backend):
    """A GPU, with weights in its own memory."""

    asynchronous = True
    keeps_states = True
    arithmetic = "bf16"
    exact = True  # until it is said that inputs may be rounded to bytes

    def __init__(self, name: str, gpu: Gpu) -> None:
        self.name, self.gpu = name, gpu
        self.started = False
        self._cancelled = threading.Event()
        self._fusions = fusion.Fusions()
        self._leave: Callable[[], None] | None = gpu.leave
        gpu.enter()

    def start(self) -> None:
        """Take the memory."""
        self.gpu.start()
        self.started = True

    def grant(self, nbytes: int | None) -> OwnMemory | None:
        return self.gpu.grant(nbytes)

    @property
    def granted(self) -> OwnMemory | None:
        return self.gpu.granted

    def streaming(self, largest: int) -> tuple[Backend, OwnMemory] | None:
        window, own = WINDOWS * largest, self.gpu.granted
        if own is None or window > WINDOW_SHARE * own.room:
            return None
        streamed = StreamedBackend(f"{self.name}-streamed", self.gpu)
        streamed.exact = self.exact
        return streamed, self.gpu.keep_window(window, int(LONG_PASSES_SHARE * (own.room - window)))

    def most_needed_at_once(self, ops: Sequence[Op]) -> int:
        return max(self._needed_by(fusion.members(item)) for item in fusion.fuse(ops, ()))

    def _needed_by(self, ops: Sequence[Op]) -> int:
        """The weights of one call. A mixture is several ones where it has to be, each with some experts."""
        whole, own = self.device_bytes(self.wants(ops)), self.gpu.granted
        if own and len(ops) == 1 and isinstance(ops[0].attrs, Moe):
            most = int(WINDOW_SHARE * own.room) // WINDOWS
            return min(whole, max(most, weights.expert_bytes(ops[0])))
        return whole

    # --- what it can do

    def supports(self, op: Op) -> bool:
        a = op.attrs
        if op.kind not in KINDS or any(not weights.fits(use) for use in fusion.uses(op)):
            return False
        if isinstance(a, Attention):
            return a.head_dim % 16 == 0 and a.head_dim <= WIDEST and not self.whole
        if isinstance(a, PerHead):
            width, cols = op.inputs[0].width // a.heads, op.weights[0].shape[1]
            return not (width % 4 or a.first % 4 or cols % 8)
        if isinstance(a, CausalConv):
            return a.kernel <= MOST_TAPS
        if isinstance(a, DeltaNet):
            return a.k_dim <= MOST_COLUMNS
        if isinstance(a, Rope):
            return a.head_dim % 2 == 0
        if isinstance(a, Moe):
            return op.weights[1].quant is op.weights[2].quant and not a.without and not a.rest
        return True

    def rounding(self, op: Op) -> float:
        if op.kind not in ("linear", "head", "moe"):
            return 0.0
        if not self.exact and self._in_bytes(op):
            return EIGHT_BITS
        if op.kind == "moe":
            return ROUNDED_BOTH
        return ROUNDED_INPUT if op.weights[0].quant.name == "BF16" else ROUNDED_BOTH

    def _in_bytes(self, op: Op) -> bool:
        """Whether a pass of some length rounds the input of a product to bytes."""
        which = 1 if op.kind == "moe" else 0  # behind the router
        quant, cols = weights.held_as(fusion.uses(op)[which]).name, op.weights[which].shape[1]
        return takes_int8(quant, cols) or int8.takes(quant, 1, cols)

    def alike(self, ops: Sequence[Op]) -> int:
        return FEW

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return tuple(dict.fromkeys(use for op in ops for use in fusion.uses(op)))

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(in_arena(weights.device_bytes(use)) for use in wanted)

    def most_at_once(self, ops: Sequence[Op]) -> int:
        own = self.gpu.granted
        if own is None:
            return 0
        widest = max(op.out.width for op in ops if op.kind != "head")
        usual = next(op.out.width for op in ops if op.kind == "embed")
        # Two wide values, as floats and rounded, and some of the usual width; a place is twice that at most.
        token = 2 * FLOAT_BYTES * (3 * widest + 6 * usual)
        sizes = LONG_PASSES if self.gpu.long_passes else PASSES
        return next((n for n in sizes if n * token <= own.rows + self.gpu.long_passes), 0)

    # --- weights

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        self.start()
        return self.gpu.loading.bring(wanted, read)

    def expert_slots(self) -> ExpertSlots | None:
        return self.gpu.slots

    def release(self, buffer: Buffer) -> None:
        assert isinstance(buffer, DeviceWeight)
        self.gpu.slots.leave(buffer.address)
        self.gpu.memory.give(buffer.address)

    # --- segments

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        self.start()
        gpu = self.gpu
        own, others = parts_of(segment, kv)
        slabs = {group: gpu.slabs_of(kv, group, some) for group, some in own.items()}
        borrowed = {group: gpu.slabs_of(kv, group, some) for group, some in others.items()}
        fused = self._fusions.of(segment)
        weights, blocks = laid_out(gpu.ring, fused, buffers)
        for op in segment.ops:
            if isinstance(op.attrs, Moe) and op.attrs.slots:
                gpu.slots.join(op, buffers)
        kept = [(op.attrs.layer, op.kind) for op in segment.ops if isinstance(op.attrs, Stateful)]
        states = gpu.states_of(kv, tuple(sorted(kept)))
        scratch, device = (gpu.scratch, gpu.scratch_bytes), gpu.memory.driver.device
        chip = device.processors, 0 if self.exact else int8.most_rows(device)
        place = CudaPlace(
            gpu.library,
            fused,
            weights,
            blocks,
            kv,
            slabs,
            borrowed,
            states,
            gpu.slots,
            self.exact,
            gpu.rotations,
            gpu.tellers,
            *scratch,
            *chip,
            gpu.few_rows,
        )
        return CudaRunner(self, segment, shape, place)

    # --- ends

    def cancel(self) -> None:
        self._cancelled.set()

    def rearm(self) -> None:
        self._cancelled.clear()

    def check(self) -> None:
        """Raise after a cancel; asked before each segment, none of which takes long."""
        if self._cancelled.is_set():
            raise Cancelled("the computation was stopped")

    def close(self) -> None:
        if self._leave:
            self._leave()
            self._leave = None


def parts_of(segment: Segment, kv: KvCache) -> tuple[Parts, Parts]:
    """What a segment keeps of tokens, and what it looks at that others keep, by group."""
    ops = [op.attrs for op in segment.ops if isinstance(op.attrs, Attention)]
    mine = {(a.layer, a.first, a.n_kv_heads) for a in ops if a.sharing != "borrows"}
    theirs = {(a.layer, a.first, a.n_kv_heads) for a in ops} - mine

    def by_group(parts: set[Part]) -> Parts:
        groups = sorted({kv.group(layer) for layer, _, _ in parts})
        return {g: tuple(sorted(p for p in parts if kv.group(p[0]) == g)) for g in groups}

    return by_group(mine), by_group(theirs)


class StreamedBackend(CudaBackend):
    """The same GPU, with weights on the host that cross the link when they are needed."""

    def __init__(self, name: str, gpu: Gpu) -> None:
        super().__init__(name, gpu)
        self._routers: set[Weight] = set()  # of mixtures that cross in parts: every part reads its router
        self._groups: dict[int, tuple[Op, tuple[Op, ...]]] = {}  # by identity: what mixtures become
        self._read: ReadInto | None = None  # what reads weights for every pass; None: they are kept

    @property
    def crossed(self) -> int:  # type: ignore[override]  # the ring counts
        return self.gpu.ring.crossed if self.started else 0

    def grant(self, nbytes: int | None) -> OwnMemory | None:
        return None  # what crosses lies in what the GPU was granted

    @property
    def granted(self) -> OwnMemory | None:
        return None

    def streaming(self, largest: int) -> tuple[Backend, OwnMemory] | None:
        return None

    def supports(self, op: Op) -> bool:
        # Of a table a pass reads a few rows; an output matrix may be larger than the window.
        if looks_up(op) or (isinstance(op.attrs, Moe) and op.attrs.slots) or not super().supports(op):
            return False
        return all(
            self.gpu.has_window([u for u in super(StreamedBackend, self).wants([o]) if self.streams(u)])
            for o in self._in_groups([op])
        )

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return super().wants(self._in_groups(ops))

    def _in_groups(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The same ops; mixtures that are too large for a part of the window as several, one after the
        other, each with some of the experts."""
        return tuple(part for op in ops for part in (self._parts(op) if isinstance(op.attrs, Moe) else (op,)))

    def _parts(self, op: Op) -> tuple[Op, ...]:
        found = self._groups.get(id(op))
        if found is None:
            part = self.gpu.window // WINDOWS
            made: tuple[Op, ...] = (op,)
            if sum(in_arena(weights.device_bytes(use)) for use in fusion.uses(op)) > part:
                made = in_groups(op, max(1, part // weights.expert_bytes(op)))
            if len(made) > 1:
                self._routers.update(of_router(op))
            found = self._groups[id(op)] = op, made
        return found[1]

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return super().compile(replace(segment, ops=self._in_groups(segment.ops)), shape, buffers, kv)

    @property
    def bytes_from_files(self) -> int:
        return feed_bytes()

    def stream_from_files(self, read: ReadInto) -> None:
        self._read = read

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0 if self._read else sum(weights.device_bytes(use) for use in wanted if self.streams(use))

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def expert_slots(self) -> ExpertSlots | None:
        return None

    def streams(self, wanted: WeightUse) -> bool:
        return weights.device_bytes(wanted) > SMALL and wanted.weight not in self._routers

    def evict_streamed(self) -> None:
        if self.started:
            self.gpu.ring.evict()

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        if not self.streams(wanted):
            return super().upload(wanted, read)
        self.start()
        if self._read:
            if self.gpu.ring.feed is None:
                self.gpu.ring.feed = FileFeed(self.gpu.memory, self._read, self.check)
            return InFile(wanted)
        return self.gpu.loading.keep(wanted, read)

    def release(self, buffer: Buffer) -> None:
        if not isinstance(buffer, Crossing):
            super().release(buffer)
