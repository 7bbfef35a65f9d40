"""Results that are not due yet: those before them in the file of requests have not been answered.

They lie in memory and, where results go to a file, in another beside it: when the run ends in their midst,
the next one takes them from there. None is computed twice, and the file of results keeps its order.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

from hetrun.tools.batch.output_file import LineOutput, NoRoom
from hetrun.tools.batch.result_lines import request_of
from hetrun.tools.batch.resume import FinishedRequests

SUM = 9  # bytes before a line: a checksum of it
SUFFIX = ".waiting"
SPARE = 4 << 20  # bytes in the file of results that are written by now, before it is written anew


class LineHeap:
    """A heap of lines by their turns."""

    def __init__(self, file: LineOutput | None = None) -> None:
        self.nbytes = 0
        self._heap: list[tuple[int, bytes]] = []
        self._file = file
        self._in_file = 0  # bytes

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> int | None:
        """The turn of the first."""
        return self._heap[0][0] if self._heap else None

    def push(self, turn: int, line: bytes, keep: bool = True) -> None:
        """Hold a line; `keep` says that it may wait for long."""
        heapq.heappush(self._heap, (turn, line))
        self.nbytes += len(line)
        if keep:
            self._keep(line)

    def pop(self) -> bytes:
        """The first line; it is written when `wrote` is called."""
        return heapq.heappop(self._heap)[1]

    def wrote(self, line: bytes) -> None:
        """A line that was popped is where it belongs."""
        self.nbytes -= len(line)
        if self._file and self._in_file > (2 * self.nbytes + SPARE if self._heap else 0):
            self._file.clear()
            self._in_file = 0
            for _, waiting in self._heap:
                self._keep(waiting)

    def _keep(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(b"%08x " % crc32(line) + line)
            self._in_file += len(line)
        except NoRoom:  # then it is in memory only, and would be computed again
            pass

    def take(self, done: FinishedRequests) -> Iterator[tuple[int, bytes]]:
        """What an earlier run has left there and has not written, with the numbers of the requests."""
        if self._file is None:
            return
        is_wanted = False
        for kept in self._file.lines():
            self._in_file += len(kept)
            line = kept[SUM:]
            # The file is written anew in its own place: after a power cut a line may be half an older one.
            if kept[:SUM] == b"%08x " % crc32(line) and (found := request_of(line)) and done.wait(*found):
                is_wanted = True
                yield found[0], line
        self._file.cut(self._file.size if is_wanted else 0)


def waiting_path(results: str | Path) -> Path:
    """The file beside that of the results in which those lie that wait for their turn."""
    return Path(f"{results}{SUFFIX}")


@contextmanager
def waiting_beside(output: LineOutput, resume: bool) -> Iterator[LineOutput | None]:
    """The file for results that wait; it is gone when none does. None: there is no place for one."""
    path = waiting_path(output.name)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
    try:
        fd = os.open(path, flags, 0o666) if output.is_file else None
    except OSError:  # of results that wait nothing is kept then
        fd = None
    if fd is None:
        yield None
        return
    file = LineOutput(fd, str(path))
    try:
        yield file
    finally:
        if not file.size:
            with suppress(OSError):  # an empty file is nothing lost
                path.unlink()
        os.close(fd)
