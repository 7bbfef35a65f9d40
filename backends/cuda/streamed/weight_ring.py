"""Weights that do not stay on the device: they cross the link for each pass, through a ring of its memory.

Each block of weights that work needs at once has a fixed place in the ring, so that work which is recorded
finds it there. Blocks are laid one behind the other as segments are compiled, around the end to the
beginning, and so two that follow each other in a pass seldom lie on top of each other. What was compiled for
passes of another shape may well lie there: it comes again when it is needed.

Copies run on a stream of their own. One begins when the work that read what lay there is done, and work
begins when its copy is done; no host thread waits. What came next the last time (the first time: what was
compiled next) is brought ahead, as far as the ring has room, around the end of a pass to the beginning of the
next: so the link is busy while others compute. Large weights cross in pieces, between which the device's
engine takes what others have to send: values of long passes would wait for all of a layer. Nothing is gained
by asking again when work is over: a copy waits on the device for what lies in its place, so the ring is full
of what comes next by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hetrun.backend import WeightUse
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address, Event
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.streamed import file_feed
from hetrun.backends.cuda.streamed.file_feed import FileFeed
from hetrun.backends.cuda.weights import Crossing, InFile, OnHost, held_as, parts_of
from hetrun.errors import BackendError, DeviceLost
from hetrun.graph import Weight
from hetrun.system.units import format_bytes

PIECE = 8 << 20  # bytes of a weight that cross at once: a third of a millisecond of a fast link


@dataclass(eq=False, slots=True)
class RingBlock:
    """Weights that come together, and where each of them lies."""

    begin: Address
    end: Address
    parts: Sequence[tuple[Address, Crossing]]
    arrived: Event
    left: Event  # the work that read it last is done
    there: bool = False  # or on its way
    # What was needed behind it the last time; before that, what was compiled behind it.
    next: RingBlock | None = field(default=None, repr=False)
    is_forgotten: bool = False
    copies: Sequence[tuple[Address, int, int]] = field(init=False, repr=False)  # to, from, how many
    # Where pieces of files are to lie.
    reads: Sequence[tuple[Address, WeightUse, Weight]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        here = [(at, w) for at, w in self.parts if isinstance(w, OnHost)]
        self.copies = [piece for at, weight in here for piece in _pieces(at, weight)]
        there = [(at, w.use) for at, w in self.parts if isinstance(w, InFile)]
        self.reads = [piece for at, use in there for piece in _pieces_of_file(at, use)]

    def meets(self, other: RingBlock) -> bool:
        """Whether the two lie on top of each other."""
        return self.begin < other.end and other.begin < self.end

    def met(self, others: Iterable[RingBlock]) -> list[RingBlock]:
        """Those that lie on top of it."""
        begin, end = self.begin, self.end
        return [other for other in others if begin < other.end and other.begin < end]


def _pieces(target: Address, weight: OnHost) -> Iterator[tuple[Address, int, int]]:
    """A weight's copies."""
    source = int(weight.memory.ctypes.data)
    for at in range(0, weight.nbytes, PIECE):
        yield target + at, source + at, min(PIECE, weight.nbytes - at)


def _pieces_of_file(target: Address, use: WeightUse) -> Iterator[tuple[Address, WeightUse, Weight]]:
    """The same of a weight in its file."""
    row = held_as(use).row_bytes(use.weight.shape[1])
    for part in parts_of(use, file_feed.PIECE):
        yield target, use, part
        target += part.shape[0] * row


class WeightRing:
    """The memory through which weights cross."""

    def __init__(self, memory: CudaMemory, nbytes: int) -> None:
        self._memory, self._driver = memory, memory.driver
        self.nbytes = nbytes
        self._begin = memory.take(nbytes, "weights that cross") if nbytes else 0
        self._at = 0  # where the next block is laid
        self._there: list[RingBlock] = []
        self._coming: deque[RingBlock] = deque()  # what was brought ahead, from the block behind the last on
        self._last: RingBlock | None = None
        self._newest: RingBlock | None = None
        self.crossed = 0  # bytes so far
        self.feed: FileFeed | None = None  # what brings weights from files

    # --- before work runs

    def block(self, weights: Sequence[Crossing]) -> RingBlock:
        """A place for weights that are needed at once."""
        size = sum(in_arena(w.device_bytes) for w in weights)
        if size > self.nbytes:
            raise BackendError(
                f"weights of {format_bytes(size)} are needed at once, and {format_bytes(self.nbytes)} of "
                "GPU memory are kept for those that cross: grant more with --vram"
            )
        if self._at + size > self.nbytes:
            self._at = 0
        begin = at = self._begin + self._at
        self._at += size
        parts = []
        for w in weights:
            parts.append((at, w))
            at += in_arena(w.device_bytes)
        made = RingBlock(begin, at, parts, self._driver.event(), self._driver.event())
        if self._newest and (self._newest.next is None or self._newest.next.is_forgotten):
            self._newest.next = made  # work is compiled in the order in which it runs
        self._newest = made
        return made

    # --- while it runs

    def need(self, block: RingBlock) -> None:
        """What `computing` is given from now on begins when the block is there."""
        if not block.there:
            self._bring(block)
        self._driver.wait(self._memory.computing, block.arrived)

    def done(self, block: RingBlock) -> None:
        """What `computing` was given so far is all that reads it."""
        self._driver.record(block.left, self._memory.computing)
        if self._coming and self._coming[0] is block:
            self._coming.popleft()
        else:
            self._coming.clear()
        if self._last:
            self._last.next = block
        self._last = block

    def ahead(self) -> None:
        """Bring what was needed next the last time, as far as there is room beside what comes before it."""
        coming = self._coming
        before = coming[-1] if coming else self._last
        block = before and before.next
        while block and not block.is_forgotten and not block.met(coming):
            if block.reads and not block.there:
                break  # it is read ahead, and this thread would wait for it
            if not block.there:
                self._bring(block)
            coming.append(block)
            block = block.next

    def _bring(self, block: RingBlock) -> None:
        driver, stream = self._driver, self._memory.bringing
        if block.met(self._coming):
            self._coming.clear()
        for other in block.met(self._there):
            driver.wait(stream, other.left)
            other.there = False
            self._there.remove(other)
        for target, source, nbytes in block.copies:
            driver.copy(target, source, nbytes, stream)
            self.crossed += nbytes
        if block.reads:
            assert self.feed
            self.crossed += self.feed.bring(block)
        driver.record(block.arrived, stream)
        block.there = True
        self._there.append(block)

    def evict(self) -> None:
        """Between two runs: nothing is there any more, and nothing that would be brought ahead."""
        self._memory.wait_for_work()  # what comes next may lie where they are read
        for block in self._there:
            block.there, block.next = False, None
        self._there.clear()
        self._coming.clear()
        self._last = None

    # --- ends

    def forget(self, block: RingBlock) -> None:
        """Nothing will need it any more; when this returns, nothing reads its weights on the host."""
        with suppress(DeviceLost):  # which reads nothing any more
            self._driver.synchronize(block.arrived)
            self._driver.synchronize(block.left)
        if block.there:
            self._there.remove(block)
        block.is_forgotten, block.next = True, None
        self._coming.clear()
        if self._newest is block:
            self._newest = None
        if self._last is block:
            self._last = None
        for event in (block.arrived, block.left):
            self._driver.drop(event)

    def close(self) -> None:
        """Read nothing more."""
        if self.feed:
            self.feed.close()
            self.feed = None
