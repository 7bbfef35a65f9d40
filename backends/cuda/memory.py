"""The memory of one GPU, and the streams that fill and read it.

Everything of ours lies in one arena, which is taken at once or grows as memory is needed. Keys and values
that lie there are copies of rows of the host's; where room is short they go first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.cuda.arena import GrowingArena
from hetrun.backends.cuda.driver import Address, Driver, Launch, MemoryCopy, Stream
from hetrun.errors import BudgetError

Bytes = NDArray[np.uint8]
Move = Callable[[Address, int, int], None]  # to, from, how many
Fetch = Callable[[Address, int, int], Launch]  # the same as a kernel
FEW_BYTES, WORD = 256 << 10, 4
OUTBOX = 8 << 20  # bytes on their way to the device at once
PACKED = 8 << 20  # bytes of keys and values that cross in one piece


class CudaMemory:
    """An arena, a stream that computes and one that brings weights, and a way for what passes need."""

    def __init__(self, driver: Driver, nbytes: int, step: int | None = None) -> None:
        """`step`: how much is taken at once; all of it if nothing is said."""
        self.driver = driver
        self.arena = GrowingArena(driver.allocate, nbytes, nbytes if step is None else step)
        self.computing = driver.stream()
        self.bringing = driver.stream()
        self._done = driver.event()
        # How few bytes get from page-locked memory to the device, where copies of weights would hold them up.
        self.fetch: Fetch | None = None
        # Called where there is no room: gives some memory up, or says that there is nothing left to give.
        self.give_up: Callable[[], bool] = lambda: False
        self._outbox = Outbox(driver, self.computing, self._move)
        self._packing: Address | None = None
        self._uses = 0
        driver.work_in(self.take(driver.workspace, "products"), self.computing)

    def next_use(self) -> int:
        """A number for each use of something that may be dropped: the larger, the later."""
        self._uses += 1
        return self._uses

    def take(self, nbytes: int, what: str) -> Address:
        """Memory for something; what can be brought again makes room for it."""
        while True:
            try:
                return self.arena.take(nbytes, what)
            except BudgetError:
                if not self.give_up():
                    raise

    def give(self, address: Address) -> None:
        """Take it back. Work that was given to `computing` before may still use it: what takes it next is
        filled on that stream, or behind it."""
        self.arena.give(address)

    def send(self, target: Address, source: Bytes) -> None:
        """Bytes for the work that `computing` gets next; the source may change at once."""
        self._outbox.send(target, source)

    def collect(self, target: int, source: Address, nbytes: int) -> None:
        """Bytes for the host, behind what `computing` has."""
        self._give(self.outward(target, source, nbytes))

    def outward(self, target: int, source: Address, nbytes: int) -> MemoryCopy | Launch:
        """What brings bytes to the host's page-locked memory. With one engine a copy would wait behind those
        of weights that cross: a kernel writes them instead."""
        if self.fetch and self.driver.device.engines < 2 and nbytes % WORD == 0:
            return self.fetch(target, source, nbytes)
        return MemoryCopy(target, source, nbytes)

    def inward(self, target: Address, source: int, nbytes: int) -> MemoryCopy | Launch:
        """What brings bytes of the host's page-locked memory to the device."""
        if self.fetch and nbytes <= FEW_BYTES and nbytes % WORD == 0:
            return self.fetch(target, source, nbytes)
        return MemoryCopy(target, source, nbytes)

    def _move(self, target: Address, source: int, nbytes: int) -> None:
        self._give(self.inward(target, source, nbytes))

    def _give(self, work: MemoryCopy | Launch) -> None:
        if isinstance(work, Launch):
            self.run(work)
        else:
            self.driver.copy(work.target, work.source, work.nbytes, self.computing)

    def packing(self) -> Address:
        """Where rows of keys and values lie together that cross: PACKED bytes, for `computing` only, one set
        of rows behind the other."""
        if self._packing is None:
            self._packing = self.take(PACKED, "rows that cross")
        return self._packing

    def wait_for_work(self) -> None:
        """What `bringing` gets from now on begins behind all that `computing` has."""
        self.driver.record(self._done, self.computing)
        self.driver.wait(self.bringing, self._done)

    def run(self, launch: Launch) -> None:
        """A kernel, behind all that was sent."""
        self.driver.launch(launch, self.computing)

    def close(self) -> None:
        """Give everything back."""
        for address in self.arena.addresses:
            self.driver.free(address)


class Workplaces:
    """Where passes lay values that are not needed after them: all on one stream, one after the other, so they
    share. A place never moves, as recorded work knows it by its address."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._places: list[tuple[int, Address]] = []

    def of(self, nbytes: int) -> Address:
        """The smallest place of at least `nbytes` bytes, or a new one, made larger to serve others too."""
        found = min((place for place in self._places if place[0] >= nbytes), default=None)
        if found is None:
            found = self._new(1 << (nbytes - 1).bit_length(), nbytes)
            self._places.append(found)
        return found[1]

    @property
    def largest(self) -> tuple[int, Address]:
        """Bytes of the largest there is, and where it is; none: 0 bytes."""
        return max(self._places, default=(0, 0))

    def _new(self, wished: int, nbytes: int) -> tuple[int, Address]:
        try:
            return wished, self._memory.take(wished, "values of passes")
        except BudgetError:
            return nbytes, self._memory.take(nbytes, "values of a pass")


class Outbox:
    """Page-locked memory that is filled again and again: in two halves, of which one may be on its way."""

    def __init__(self, driver: Driver, stream: Stream, move: Move, nbytes: int = OUTBOX) -> None:
        """`move` does it, in order with all else that the stream does."""
        self._driver, self._stream, self._move = driver, stream, move
        self._halves = [driver.pinned(nbytes // 2) for _ in range(2)]
        self._left = [driver.event() for _ in range(2)]
        self._half = self._at = 0

    def send(self, target: Address, source: Bytes) -> None:
        """Copy some bytes to the device, behind what the stream has."""
        done = 0
        while done < len(source):
            if self._at == len(self._halves[self._half]):
                self._turn()
            memory = self._halves[self._half][self._at :][: len(source) - done]
            memory[:] = source[done : done + len(memory)]
            self._move(target + done, int(memory.ctypes.data), len(memory))
            self._at += len(memory)
            done += len(memory)

    def _turn(self) -> None:
        """Go on in the other half, once what was sent from there has left."""
        self._driver.record(self._left[self._half], self._stream)
        self._half, self._at = 1 - self._half, 0
        self._driver.synchronize(self._left[self._half])
