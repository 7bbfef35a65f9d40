"""One GPU and what lies in its memory, for the backends that work on it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from hetrun.backend import OwnMemory, WeightUse
from hetrun.backends.cuda.arena import ALIGNMENT, in_arena
from hetrun.backends.cuda.driver import Address, Driver, Launch
from hetrun.backends.cuda.experts.slots import GpuSlots
from hetrun.backends.cuda.kernel_cache import HasPrograms, KernelLibrary, at, long
from hetrun.backends.cuda.kv_mirror import Part, Slabs
from hetrun.backends.cuda.lowering import SMALL, THREADS
from hetrun.backends.cuda.measured.few_rows import FewRowsLimits
from hetrun.backends.cuda.memory import PACKED, WORD, CudaMemory, Workplaces
from hetrun.backends.cuda.pass_args import Tellers
from hetrun.backends.cuda.result import DeviceResult
from hetrun.backends.cuda.rope import Rotations
from hetrun.backends.cuda.states.mirror import Kept, StateMirror
from hetrun.backends.cuda.streamed.weight_ring import WeightRing
from hetrun.backends.cuda.weights import WeightUpload, device_bytes
from hetrun.errors import BackendError, BudgetError
from hetrun.memory.kv.cache import KvCache
from hetrun.system.units import format_bytes, format_minimum

log = logging.getLogger(__name__)

MARGIN = 0.05  # of the memory that is free, where no limit was given
# Without a limit, memory is taken as it is needed: in steps, each a part of what may be taken. Of that the
# last part may lie in gaps between weights.
STEP_SHARE, LEAST_STEP, MOST_STEP, GAPS_SHARE = 16, 32 << 20, 1 << 30, 32
# What is kept from weights: for values, and for keys and values.
PASSES_SHARE, LEAST_FOR_PASSES = 1 / 16, 2 * PACKED
FETCHING = 64  # blocks that read the host's memory at once
SCRATCH_SHARE, LEAST_SCRATCH, MOST_SCRATCH = 32, 1 << 20, 64 << 20  # for weights that are unpacked

Key = tuple[int, int, tuple[Part, ...]]  # a cache, a group of its layers, and what of them
StatesKey = tuple[int, tuple[Kept, ...]]
Open = Callable[[], tuple[Driver, HasPrograms]]


class Gpu:
    """Opened when its amount of memory is first asked for; the memory is taken when it is needed."""

    memory: CudaMemory
    library: KernelLibrary
    loading: WeightUpload
    rotations: Rotations
    few_rows: FewRowsLimits
    ring: WeightRing
    workplaces: Workplaces
    scratch: Address  # for weights that are unpacked
    scratch_bytes: int

    def __init__(self, open_: Open) -> None:
        self.started = False
        self.slots = GpuSlots(self)
        self.made: dict[str, DeviceResult] = {}  # values that the last runs made, by name
        self._open = open_
        self._opened: tuple[Driver, HasPrograms] | None = None
        self._limit: int | None = None  # of the device's memory, in all
        self._grows = False  # as memory is needed: no limit was given
        self._left = 0  # of these what is ours
        self._window = 0  # bytes through which weights cross
        self.long_passes = 0  # bytes for values of long passes, where weights cross
        self.tellers = Tellers()
        self._slabs: dict[Key, Slabs] = {}
        self._states: dict[StatesKey, StateMirror] = {}
        self._users = 0

    # --- its memory

    def grant(self, nbytes: int | None) -> OwnMemory:
        """What may be taken of its memory. CUDA itself has taken its part by then."""
        self._opened = self._opened or self._open()
        driver = self._opened[0]
        free, held, total = driver.free_memory(), driver.held_memory(), driver.device.memory
        limit = held + int(free * (1 - MARGIN)) if nbytes is None else nbytes
        if limit < (least := self.least):
            size = format_bytes(limit)
            words = f"{size} of GPU memory that are free are" if nbytes is None else f"--vram {size} is"
            raise BudgetError(
                f"{words} too little: CUDA itself and what kernels work in take {format_minimum(least)} of "
                f"{driver.device.name}"
            )
        if limit > free + held:
            raise BudgetError(
                f"--vram {format_bytes(limit)} is more than is free of {driver.device.name}: "
                f"{format_bytes(free + held)} of {format_bytes(total)}"
            )
        self._limit, self._left, self._grows = limit, limit - held, nbytes is None
        return self._granted(driver)

    @property
    def least(self) -> int:
        """The least that it can be granted. CUDA itself is there from then on, with what that takes."""
        self._opened = self._opened or self._open()
        driver = self._opened[0]
        return driver.held_memory() + driver.workspace + LEAST_SCRATCH + LEAST_FOR_PASSES + self._window

    @property
    def granted(self) -> OwnMemory | None:
        """What was granted, less what others have taken since, and what of it is not for weights."""
        if self.started and self._limit and (lost := self._left - self.memory.arena.nbytes) > ALIGNMENT:
            self._limit, self._left = self._limit - lost, self._left - lost
        return self._granted(self._opened[0]) if self._opened and self._limit else None

    def _granted(self, driver: Driver) -> OwnMemory:
        assert self._limit
        left = self._left
        passes = max(int(left * PASSES_SHARE), LEAST_FOR_PASSES)
        besides = driver.workspace + _scratch_of(left) + passes + self._window + self.long_passes
        besides += left // GAPS_SHARE if self._grows else 0
        return OwnMemory(self._limit, self._limit - left + besides, passes // 2)

    def keep_window(self, nbytes: int, long_passes: int) -> OwnMemory:
        """Weights will cross, through `nbytes` bytes, and `long_passes` bytes are for values of long passes;
        called before it starts, and after a grant."""
        self._window = max(self._window, nbytes)
        self.long_passes = max(self.long_passes, long_passes)
        assert self._opened
        return self._granted(self._opened[0])

    @property
    def window(self) -> int:
        """Bytes through which weights cross."""
        return self._window

    def has_window(self, uses: Sequence[WeightUse]) -> bool:
        """Whether these may cross at once."""
        return sum(in_arena(device_bytes(use)) for use in uses) <= self._window

    def start(self) -> None:
        """Take the memory."""
        if self.started:
            return
        if self._limit is None:
            self.grant(None)
        assert self._opened
        driver, programs = self._opened
        self.memory = self._taken(driver)
        self.memory.give_up = self._drop_copies
        self.library = KernelLibrary(driver, programs)
        self.loading = WeightUpload(self.memory)
        self.rotations = Rotations(self.memory)
        self.few_rows = FewRowsLimits(self.memory, self.library)
        self.scratch_bytes = _scratch_of(self.memory.arena.nbytes)
        self.scratch = self.memory.take(self.scratch_bytes, "weights that are unpacked")
        self.ring = WeightRing(self.memory, self._window)
        self.workplaces = Workplaces(self.memory)
        if self._window:
            self.memory.fetch = self._fetch
        self.started = True

    def _taken(self, driver: Driver) -> CudaMemory:
        """All that was granted, or the first of it; where others have taken some of it since, what they
        left."""
        try:
            if self._left > driver.free_memory():
                raise MemoryError
            return CudaMemory(driver, self._left, self._step)
        except MemoryError:
            before = self._left
            self.grant(None)
            log.warning(
                "other programs have taken memory of %s: %s of %s are left",
                driver.device.name,
                format_bytes(self._left),
                format_bytes(before),
            )
        try:
            return CudaMemory(driver, self._left, self._step)
        except MemoryError as e:
            raise BackendError(f"other programs keep taking memory of {driver.device.name}: {e}") from e

    @property
    def _step(self) -> int:
        """Bytes that are taken at once."""
        step = min(max(self._left // STEP_SHARE, LEAST_STEP), MOST_STEP)
        return min(step, self._left) if self._grows else self._left

    def _fetch(self, target: Address, source: int, nbytes: int) -> Launch:
        n = nbytes // WORD
        grid = (min(FETCHING, -(-n // THREADS)),)
        return self.library.launch(SMALL, "fetch_words", grid, THREADS, at(source), at(target), long(n))

    # --- keys and values, and states

    def slabs_of(self, kv: KvCache, group: int, parts: tuple[Part, ...]) -> Slabs:
        """The rows of some heads of some layers."""
        key = id(kv), group, parts
        if key not in self._slabs:
            self._slabs[key] = Slabs(self.memory, self.library, kv, group, parts)
            weakref.finalize(kv, self._forget_rows, key)
        return self._slabs[key]

    def _forget_rows(self, key: Key) -> None:
        if slabs := self._slabs.pop(key, None):
            slabs.close()

    def states_of(self, kv: KvCache, kept: tuple[Kept, ...]) -> StateMirror | None:
        """What some layers keep in states; None where there are no such layers."""
        if not kept:
            return None
        key = id(kv), kept
        if key not in self._states:
            self._states[key] = StateMirror(self.memory, kv, kept)
            weakref.finalize(kv, self._forget_states, key)
        return self._states[key]

    def _forget_states(self, key: StatesKey) -> None:
        if states := self._states.pop(key, None):
            states.close()

    def _drop_copies(self) -> bool:
        """Memory of states, or of keys and values, that no pass needs now."""
        states = any(states.drop_oldest() for states in self._states.values())
        by_use = sorted(self._slabs.values(), key=lambda slabs: slabs.last_used)
        return states or any(slabs.drop_oldest() for slabs in by_use)

    # --- ends

    def enter(self) -> None:
        """One backend more works on it."""
        self._users += 1

    def leave(self) -> None:
        """One backend less; with the last one everything is given back."""
        self._users -= 1
        if self._users:
            return
        if self.started:
            for slabs in self._slabs.values():
                slabs.leave()
            for states in self._states.values():
                states.leave()
            self._slabs.clear()
            self._states.clear()
            self.made.clear()
            self.slots.clear()
            self.ring.close()
            self.memory.close()
            self.started = False
        if self._opened:
            self._opened[0].close()
            self._opened = None


def _scratch_of(nbytes: int) -> int:
    """For weights that are unpacked, of so much memory."""
    return min(max(nbytes // SCRATCH_SHARE, LEAST_SCRATCH), MOST_SCRATCH)
