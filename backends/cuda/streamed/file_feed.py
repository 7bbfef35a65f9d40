"""Weights that cross from their files: read piece by piece, ahead of their use, by threads of their own.

The pieces wait in page-locked memory and are sent from there in the order in which passes need them. Only the
thread that computes talks to the device; the others do nothing but read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetrun.backend import ReadInto
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.weights import Slice, fill
from hetrun.errors import DeviceLost

if TYPE_CHECKING:
    from hetrun.backends.cuda.streamed.weight_ring import RingBlock

PIECE = 8 << 20  # bytes that are read at once
PIECES = 6  # that are read, or wait to be sent, at once
READERS = 3  # a disk gives most when it is asked for several pieces at once
LOOK_S = 0.05  # between two looks at whether the pass was cancelled


def feed_bytes() -> int:
    """Memory of the host that it takes."""
    return PIECE * PIECES


@dataclass(slots=True)
class _Job:
    """A piece of a block that is read, or was."""

    block: RingBlock
    number: int
    slice: Slice
    size: Future[int]


class FileFeed:
    """Brings blocks from their files."""

    def __init__(self, memory: CudaMemory, read: ReadInto, check: Callable[[], None]) -> None:
        """`read` may be called from several threads; `check` raises if the pass was cancelled."""
        self._read, self._check = read, check
        self._free = deque(Slice(memory.driver, memory.bringing, PIECE) for _ in range(PIECES))
        self._jobs: deque[_Job] = deque()
        self._next: tuple[RingBlock, int] | None = None  # what is to be read next
        self._readers = ThreadPoolExecutor(READERS, "hetrun-read-weights")

    def bring(self, block: RingBlock) -> int:
        """Send all of a block, as soon as it is read; how many bytes."""
        if not self._jobs or (self._jobs[0].block, self._jobs[0].number) != (block, 0):
            self._begin_at(block)
        sent = 0
        try:
            for target, _, _ in block.reads:
                if not self._jobs:  # what comes next was not known
                    self._read_ahead()
                sent += self._send(target)
        except BaseException:
            self._drop()
            raise
        return sent

    def _send(self, target: int) -> int:
        job = self._jobs[0]
        size = self._read_by(job)
        self._jobs.popleft()
        self._free.append(job.slice)
        job.slice.send(target, size)
        self._read_ahead()
        return size

    def _read_by(self, job: _Job) -> int:
        while True:
            self._check()
            with suppress(TimeoutError):
                return job.size.result(LOOK_S)

    def _begin_at(self, block: RingBlock) -> None:
        self._drop()
        self._next = block, 0
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Read what comes next into what is free. The slice that was sent last is left out, as long as others
        are read: to wait until it is free would take the thread that computes as long as it crosses."""
        while len(self._free) > (1 if self._jobs else 0) and (found := self._advance()):
            block, number = found
            _, use, part = block.reads[number]
            own = self._free.popleft()
            own.wait()
            size = self._readers.submit(fill, use, part, own.memory, self._read)
            self._jobs.append(_Job(block, number, own, size))

    def _advance(self) -> tuple[RingBlock, int] | None:
        found = self._next
        if found is None or found[0].is_forgotten:
            return None
        block, number = found
        if number + 1 < len(block.reads):
            self._next = block, number + 1
        else:
            after = block.next
            self._next = (after, 0) if after and after.reads else None
        return found

    def _drop(self) -> None:
        """Forget what is read: something else is needed."""
        for job in self._jobs:
            job.size.cancel()
        while self._jobs:
            job = self._jobs.popleft()
            if not job.size.cancelled():
                job.size.exception()  # waits: it still writes into its slice
            self._free.append(job.slice)
        self._next = None

    def close(self) -> None:
        """Read nothing more."""
        self._drop()
        self._readers.shutdown()
        for own in self._free:
            with suppress(DeviceLost):
                own.wait()
