"""What the disk gives at most: the ceiling of a program that streams a model's file.

It is read past the page cache (O_DIRECT), in the ways that streaming could choose: by several numbers of
threads, in requests of several sizes. The best way counts. Disks of virtual machines change their speed from
one minute to the next, so each measurement is short, and is made right beside what it is held against. All of
them together walk through the file once and begin again, as streaming does: a part of it is as likely in some
cache of the disk's own for us as for the program that is measured.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from time import perf_counter

from hetrun.errors import ModelFileError
from hetrun.prefetch.open_files import go_direct
from hetrun.system.units import counted

THREADS = 1, 2, 4
REQUESTS = 1 << 20, 2 << 20
TRIED_S, READ_S = 0.15, 0.8  # with each way, and then with the fastest one
SECTOR = 4096  # offsets and lengths past the page cache are multiples of it


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best of some ways to read."""

    rate: float  # bytes per second
    threads: int
    request: int  # bytes
    direct: bool = True  # False: the file system reads through the page cache only

    @property
    def text(self) -> str:
        """For people."""
        who = counted(self.threads, "thread")
        way = "" if self.direct else ", through the page cache: its file system refuses O_DIRECT"
        return f"{self.rate / 1e9:.2f} GB/s ({who}, requests of {self.request >> 20} MiB{way})"


class ModelDisk:
    """The files of a model on their disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """The largest of them is read: they lie beside each other."""
        self._paths = tuple(paths)
        self._path = max(paths, key=lambda path: path.stat().st_size)
        self._size = self._path.stat().st_size // SECTOR * SECTOR
        self._at = 0  # how far the last measurement came

    def ceiling(self, tried_s: float = TRIED_S, read_s: float = READ_S) -> Ceiling | None:
        """Measured now; None: the file is too short to say anything. The best of several short times is too
        good to be true, so the fastest way is measured once more, for longer."""
        if self._size < max(REQUESTS):
            return None
        with ExitStack() as stack:
            descriptor, direct = self._open()
            stack.callback(os.close, descriptor)
            ways = [
                Ceiling(self._rate(descriptor, n, request, tried_s), n, request, direct)
                for n, request in product(THREADS, REQUESTS)
            ]
            best = max(ways, key=lambda way: way.rate)
            return replace(best, rate=self._rate(descriptor, best.threads, best.request, read_s))

    def forget(self) -> None:
        """Drop what the page cache has of the files: no side shall find there what another has read."""
        for path in self._paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def _open(self) -> tuple[int, bool]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        direct = not go_direct(descriptor)
        if not direct:
            self.forget()
        return descriptor, direct

    def _rate(self, descriptor: int, threads: int, request: int, seconds: float) -> float:
        """Bytes per second that `threads` threads get. Python's lock is free while they wait for the disk."""
        first, blocks = self._at // request, self._size // request
        order = count()  # of requests; `next` of it is atomic
        begin = threading.Barrier(threads + 1)
        done, failures = [0] * threads, []

        def read(i: int) -> None:
            # On a page of its own, as O_DIRECT wants it, and on few large ones, which are less work.
            with mmap.mmap(-1, request, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
                buffer.madvise(mmap.MADV_HUGEPAGE)
                begin.wait()
                end = perf_counter() + seconds
                try:
                    while perf_counter() < end:
                        offset = (first + next(order)) % blocks * request
                        done[i] += os.preadv(descriptor, [buffer], offset)
                except OSError as error:
                    failures.append(error)

        workers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(threads)]
        for worker in workers:
            worker.start()
        begin.wait()
        start = perf_counter()
        for worker in workers:
            worker.join()
        took = perf_counter() - start
        if failures:
            raise ModelFileError(str(self._path), f"it cannot be read ({failures[0].strerror})")
        self._at = (first + next(order)) % blocks * request
        return sum(done) / took
