"""Models that are small and come from disk all the same: with budgets, pieces and a window as small as they
are; and the disk that they come from, which fails when a test says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hetrun.api.local_model import LocalModel
from hetrun.client.events import Streaming
from hetrun.errors import BudgetError
from hetrun.memory import breakdown
from hetrun.memory.ledger import Books, Figures, MemoryGrant
from hetrun.prefetch import streamed_weights
from hetrun.prefetch.disk_probe import ReadMethod
from hetrun.prefetch.ring_buffer import READING
from hetrun.prefetch.streamed_weights import FromDisk
from hetrun.prefetch.streamer import Streamer

KIB, MIB = 1 << 10, 1 << 20
PIECE, READERS = 256 * KIB, 4
BESIDES = 100 * MIB

Verdict = int | None  # None: as it should be; -errno; or how many bytes come at most
Judge = Callable[[int, int], Verdict]


def from_read(first: int, verdict: Verdict) -> Judge:
    """From one read on."""
    return lambda number, size: verdict if number >= first else None


def only_read(which: int, verdict: Verdict) -> Judge:
    """One read."""
    return lambda number, size: verdict if number == which else None


def reads_from(first: int, verdict: Verdict) -> Judge:
    """One read and all after it: one alone may be of what is only guessed to be wanted."""
    return lambda number, size: verdict if number >= first else None


def every_read(nth: int, verdict: Verdict) -> Judge:
    """Some reads, time and again."""
    return lambda number, size: verdict if number % nth == nth - 1 else None


@dataclass
class Disk:
    """Stands for pread: the real one, but for reads that a test makes fail, come short, or wait.

    `judge` is asked before each read since `arm`, on the thread that reads, with its number and its size.
    """

    judge: Judge | None = None
    reads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.function = READING(self._read)

    def arm(self, judge: Judge | None) -> None:
        """From the next read on, which has the number 0."""
        with self.lock:
            self.judge, self.reads = judge, 0

    @contextmanager
    def failing(self, judge: Judge) -> Iterator[None]:
        self.arm(judge)
        try:
            yield
        finally:
            self.arm(None)

    def _read(self, fd: int, to: int, nbytes: int, offset: int) -> int:
        with self.lock:
            number, judge = self.reads, self.judge
            self.reads += 1
        verdict = judge(number, nbytes) if judge else None
        if verdict is not None and verdict < 0:
            ctypes.set_errno(-verdict)
            return -1
        try:
            found = os.preadv(fd, [(ctypes.c_char * nbytes).from_address(to)], offset)
        except OSError as e:
            ctypes.set_errno(e.errno or errno.EIO)
            return -1
        return found if verdict is None else min(found, verdict)


@dataclass
class Memory:
    """What the process is said to hold: weights, what the backend works in, and `others`, which tests set."""

    ram: int
    room: int  # for weights when the model is opened
    others: int = 0
    made: FromDisk | None = None

    def figures(self) -> Figures:
        if not (made := self.made):
            return Figures(anonymous=self.others)
        weights = made._books.booked(breakdown.WEIGHTS) + made._books.booked(breakdown.WINDOW)
        work = made._backend.overhead_bytes
        return Figures(anonymous=self.others + weights + work, shared=made._kv.held_bytes)

    def forget(self) -> None:
        """Or each keeps the other, and what the model had."""
        self.made = None

    def leave(self, nbytes: int) -> None:
        """From now on there is so much that nothing needs."""
        assert self.made is not None
        self.others += self.made._slack() - nbytes

    def books(self, granted: MemoryGrant, helpers: Callable[[], int]) -> Books:
        return Books(granted, figures=self.figures, helpers=lambda: 0)

    def from_disk(self, *arguments: Any, **options: Any) -> FromDisk:  # noqa: ANN401
        made = self.made = FromDisk(*arguments, **options)
        made._planned = lambda kv_bytes: self.ram  # type: ignore[method-assign] # what is free decides
        self.others += made._room() - self.room
        return made


def besides() -> Figures:
    """What the process is said to hold besides the model."""
    return Figures(anonymous=BESIDES)


@contextmanager
def made_small() -> Iterator[None]:
    """Pieces and window as small as the models, and nothing measured that differs from run to run."""
    patches = {
        "hetrun.executor.loading.disk_estimates.USUAL": ReadMethod(
            direct=True, readers=READERS, request=PIECE
        ),
        "hetrun.executor.loading.memory_estimates.WORK": PIECE,
        "hetrun.executor.loading.memory_estimates.kernel_figures": besides,
        "hetrun.executor.planned_model.Books": partial(Books, figures=besides, helpers=lambda: 0),
        "hetrun.memory.kv.cache.STEP": PIECE,
        "hetrun.prefetch.streamed_weights.GROWTH": PIECE,
        "hetrun.prefetch.streamed_weights.WORTH": MIB,
        "hetrun.prefetch.streamed_weights.LOOK_S": 0.0,
    }
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield


def least(path: Path, **options: Any) -> int:  # noqa: ANN401
    """The least memory that a model can run in, as hetrun says."""
    try:
        LocalModel(path, ram=1 * MIB, **options).close()
    except BudgetError as e:
        if found := re.search(r"at least (\d+) MiB", str(e)):
            return int(found[1]) * MIB
        raise
    raise AssertionError("it runs in 1 MiB")


@contextmanager
def opened(
    path: Path,
    room: int = 0,
    disk: Disk | None = None,
    *,
    system: bool = False,
    **options: Any,  # noqa: ANN401
) -> Iterator[tuple[LocalModel, Disk, Memory]]:
    """A model for whose weights there is so much room. `system`: they are read by the system's own pread."""
    disk = disk or Disk()
    # When drafts are tried depends on time, and each length of them makes a graph that takes memory.
    options = {"backends": ["llamacpp"], "ctx": 256, "deterministic": True, "spec": "off", **options}
    with made_small(), ExitStack() as stack:
        memory = Memory(least(path, **options) + MIB, room)
        stack.callback(memory.forget)
        stack.enter_context(mock.patch("hetrun.executor.planned_model.Books", memory.books))
        stack.enter_context(mock.patch("hetrun.executor.model_weights.FromDisk", memory.from_disk))
        if not system:
            read = partial(Streamer, read=disk.function)
            stack.enter_context(mock.patch.object(streamed_weights, "Streamer", read))
        llm = stack.enter_context(LocalModel(path, ram=memory.ram, **options))
        seen(llm)
        try:
            yield llm, disk, memory
        finally:
            disk.arm(None)


def seen(llm: LocalModel) -> Streaming:
    """What passes are like, which must come from disk."""
    found: Streaming | None = llm.call(lambda loaded: loaded.model.streaming())
    assert found is not None, "all weights are in memory"
    return found


_always = ExitStack()


def engine(**options: Any) -> LocalModel:  # noqa: ANN401
    """What a worker is told to build: everything stays small until it ends."""
    from hetrun.api.local_model import for_conversations

    _always.enter_context(made_small())
    return for_conversations(**options)
