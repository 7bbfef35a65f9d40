"""Rows of keys and values in a GPU's memory: whatever a pass sees there is what the host's cache has."""

from __future__ import annotations

import ctypes
import sys
import weakref
from random import Random
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hetrun.backend import Pass, SequencePart
from hetrun.backends.cuda.arena import ALIGNMENT
from hetrun.backends.cuda.kernel_cache import KernelLibrary
from hetrun.backends.cuda.kv_mirror import ROWS, Slabs
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.errors import BudgetError
from hetrun.memory.kv.cache import KvCache
from tests.cuda.emulated.driver import EmulatedDriver, EmulatedPrograms
from tests.cuda.emulated.kernels import needs_compiler
from tests.unit.test_kv import cache

if TYPE_CHECKING:
    from _typeshed import TraceFunction

pytestmark = needs_compiler
CONTEXT, SEQUENCES, MOST, WIDTH = 300, 4, 48, 8


class Device:
    """Rows of a cache in memory that holds some blocks of each group."""

    def __init__(self, kv: KvCache, blocks: int) -> None:
        self.kv, self.driver = kv, EmulatedDriver()
        self.memory = CudaMemory(self.driver, 40 << 20)
        library = KernelLibrary(self.driver, EmulatedPrograms())
        parts = [
            [(layer, 0, 1) for layer in kv.tables if kv.group(layer) == i] for i in range(len(kv.groups))
        ]
        self.slabs = [Slabs(self.memory, library, kv, i, some) for i, some in enumerate(parts)]
        self.memory.give_up = lambda: any(slabs.drop_oldest() for slabs in self.slabs)
        left = sum(max(ROWS * slabs.row_bytes, ALIGNMENT) for slabs in self.slabs)
        self.memory.take(self.memory.arena.left - blocks * left - ALIGNMENT, "others")

    def sees(self, seq: int, n: int) -> None:
        """A pass of the last n tokens of a sequence, which another backend writes."""
        length = self.kv.length(seq)
        part = SequencePart(0, n, 0, 0, self.kv.views(seq, length - n, length))
        tokens = np.zeros(n, np.int64)
        work = Pass(tokens, tokens, (), np.empty(0, np.int64), (part,))
        for slabs, view in zip(self.slabs, part.kv, strict=True):
            slabs.prepare(work)
            self._wait()
            for row in view.rows[: view.length - n].tolist():
                for plane in slabs.planes.values():
                    at = slabs._slabs[row // ROWS] + plane.at + row % ROWS * plane.size
                    assert ctypes.string_at(at, plane.size) == plane.table.raw[row].tobytes(), row

    def _wait(self) -> None:
        done = self.driver.event()
        self.driver.record(done, self.memory.computing)
        self.driver.synchronize(done)


def written(kv: KvCache, seq: int, n: int, rng: np.random.Generator) -> None:
    """More tokens of a sequence, with keys and values that were never there."""
    for (layer, tables), rows in ((item, rows) for rows in [kv.extend(seq, n)] for item in kv.tables.items()):
        for table in tables:
            table.raw[rows[kv.group(layer)]] = rng.integers(1, 255, (n, table.row_bytes), np.uint8)


def test_a_window_that_was_cut_reaches_further_back() -> None:
    kv = cache(300, 2, (40,), MOST, width=WIDTH)
    device, rng, seq = Device(kv, 20), np.random.default_rng(0), kv.alloc()
    for _ in range(4):
        written(kv, seq, MOST, rng)
    device.sees(seq, 1)
    kv.truncate(seq, kv.length(seq) - 10)
    device.sees(seq, 1)


@pytest.mark.parametrize("looks_elsewhere", [True, False])
def test_what_was_dropped_is_brought_again(looks_elsewhere: bool) -> None:
    kv = cache(300, 2, (0,), MOST, width=WIDTH)
    device, rng, seq, other = Device(kv, 20), np.random.default_rng(0), kv.alloc(), kv.alloc()
    for _ in range(4):
        written(kv, seq, MOST, rng)
    written(kv, other, 10, rng)
    device.sees(seq, 1)
    if looks_elsewhere:
        device.sees(other, 1)
    device.slabs[0].leave_off()
    block, address = next(iter(device.slabs[0]._slabs.items()))
    assert device.slabs[0].drop_oldest()
    assert block not in device.slabs[0]._slabs
    ctypes.memset(address, 0xFF, ROWS * device.slabs[0].row_bytes)
    device.sees(seq, 1)


@pytest.mark.parametrize("windows", [(0, 0), (40, 40), (0, 100, 40)], ids=str)
def test_what_a_pass_sees_is_what_the_host_has(windows: tuple[int, ...]) -> None:
    kv = cache(CONTEXT, SEQUENCES, windows, MOST, width=WIDTH)
    device, rng, random = Device(kv, 30), np.random.default_rng(1), Random(1)
    seqs: list[int] = []
    looks = 0
    for _ in range(400):
        seq = random.choice(seqs) if seqs else None
        match random.choice(("more", "more", "look", "look", "fork", "cut", "free", "drop")):
            case "more" if seq is not None:
                n = random.choice((1, 1, 5, MOST))
                if kv.length(seq) + n <= CONTEXT:
                    written(kv, seq, n, rng)
            case "look" if seq is not None and kv.length(seq):
                device.sees(seq, 1)
                looks += 1
            case "fork" if seq is not None and len(seqs) < SEQUENCES:
                seqs.append(kv.fork(seq))
            case "cut" if seq is not None:
                n = random.randrange(max(0, kv.length(seq) - 60), kv.length(seq) + 1)
                if kv.keepable(seq, n):
                    kv.truncate(seq, n)
            case "free" if seq is not None and random.random() < 0.3:
                seqs.remove(seq)
                kv.free(seq)
            case "drop":
                device.slabs[0].drop_oldest()
            case _ if len(seqs) < SEQUENCES:
                seqs.append(kv.alloc())
    assert looks > 50


def test_a_pass_that_sees_more_than_there_is_room_for_is_refused() -> None:
    kv = cache(300, 1, (0,), MOST, width=WIDTH)
    device, rng, seq = Device(kv, 3), np.random.default_rng(0), kv.alloc()
    for _ in range(4):
        written(kv, seq, MOST, rng)
    for _ in range(2):
        with pytest.raises(BudgetError, match="no room in GPU memory for keys and values"):
            device.sees(seq, 1)
    kv.truncate(seq, 80)
    device.sees(seq, 1)


def test_a_cache_that_is_gone_leaves_nothing() -> None:
    kv = cache(300, 2, (0,), MOST, width=WIDTH)
    device, seq = Device(kv, 20), kv.alloc()
    (rows,) = kv.extend(seq, 5)
    device.sees(seq, 5)
    coming = device.slabs[0].send_home(rows)
    coming.finish()
    assert kv.arrivals
    gone = weakref.ref(kv)
    device.kv = cache(300, 2, (0,), MOST, width=WIDTH)
    del kv
    assert gone() is None


def test_a_pass_of_a_long_text_takes_no_more_steps_than_one_of_a_short_text() -> None:
    """The device waits meanwhile: 180 microseconds of sets at 32,768 tokens were a twentieth of a pass."""
    steps = []
    for length in (100, 8100):
        kv = cache(8192, 1, (0,), 8192, width=WIDTH)
        device, rng, seq = Device(kv, 256), np.random.default_rng(0), kv.alloc()
        written(kv, seq, length, rng)
        device.sees(seq, 1)
        written(kv, seq, 1, rng)
        part = SequencePart(0, 1, 0, 0, kv.views(seq, length, length + 1))
        one = np.zeros(1, np.int64)
        work = Pass(one, one, (), np.empty(0, np.int64), (part,))
        (slabs,), counted = device.slabs, 0

        def count(frame: FrameType, event: str, _: object) -> TraceFunction:
            nonlocal counted
            counted += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            slabs.prepare(work)
        finally:
            sys.settrace(before)
        steps.append(counted)
    assert 0 < steps[1] <= steps[0]


def test_the_slab_that_was_used_longest_ago_goes_first() -> None:
    kv = cache(300, 4, (0,), MOST, width=WIDTH)
    device, rng = Device(kv, 2), np.random.default_rng(0)
    a, b, c = (kv.alloc() for _ in range(3))
    for seq in (a, b):
        written(kv, seq, 20, rng)
        device.sees(seq, 1)
    device.sees(a, 1)
    (slabs,) = device.slabs
    of = {seq: int(kv.views(seq, 19, 20)[0].rows[0]) // ROWS for seq in (a, b)}
    written(kv, c, 20, rng)
    device.sees(c, 1)
    assert of[a] in slabs._slabs
    assert of[b] not in slabs._slabs
