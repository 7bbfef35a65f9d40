"""What the disk under a model's file gives, measured when the model is opened: no rule knows it.

Reads go past the system's cache where they can ("direct"): what is streamed is used once a pass, and pages
in that cache count against the memory that a container may have. Only what comes from the disk is counted,
so parts of the file that lie in that cache are left out.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import perf_counter

import numpy as np

from hetrun.config import dirs
from hetrun.errors import ModelFileError
from hetrun.planner.costmodel import WorkTimes
from hetrun.prefetch.open_files import go_direct
from hetrun.system.ema import smoothed
from hetrun.system.files import open_regular
from hetrun.system.native_library import load_library
from hetrun.system.units import counted

MIB = 1 << 20
MEASURE_S = 0.3  # about what measuring may take...
MEASURE_BYTES = 256 * MIB  # ...and read
PART = 16 * MIB  # that a direct way reads in one go; the others twice that, as they begin slowly
TURNS = 2  # of each direct way; single goes differ by half
CACHED_ENOUGH = 1.15  # how many times as fast reads through the system's cache must be
ALIKE = 1.1  # ways that differ by less are equally good, and the one with less in memory is taken
RESIDENT = 0.02  # of a part of the file: more in the system's cache, and it says nothing of the disk
UNKNOWN_RATE = 1e9  # bytes a second, until reads show better
HORIZON = 2 << 30  # bytes: what was read before them counts for half
WAITED = 0.1  # of a pass: less, and it may not be the disk that bounds it


@dataclass(frozen=True, slots=True, order=True)
class ReadMethod:
    """How to read: past the system's cache or through it, by how many threads, how much at a time."""

    direct: bool
    readers: int
    request: int

    def __str__(self) -> str:
        how = "direct" if self.direct else "cached"
        return f"{how}, {counted(self.readers, 'thread')}, {self.request // MIB} MiB at a time"


# 4 MiB under way keep a disk busy, and every read takes time of the threads that compute: decoding an 8B
# model of which a thirteenth streams ran at 7.0 tokens/s with two readers of 2 MiB, 6.8 with four of 1 MiB,
# and at 4 with eight.
WAYS = tuple(ReadMethod(direct, n, 4 * MIB // n) for direct in (True, False) for n in (2, 4))
USUAL = WAYS[0]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Bytes a second of the ways that were tried, and why others were not."""

    rates: Mapping[ReadMethod, float]
    refused: str = ""  # why nothing is read directly
    unseen: str = ""  # why reads through the system's cache were not tried


@dataclass(frozen=True, slots=True)
class Disk:
    """How to read from a disk, and what it gives that way."""

    way: ReadMethod
    rate: float  # bytes a second
    why: str


def choose(found: ProbeResult) -> Disk:
    """The fastest way; through the system's cache only where direct reads are refused or far slower."""
    direct, cached = (_best({w: r for w, r in found.rates.items() if w.direct is d}) for d in (True, False))
    if not direct:
        way, rate = cached or (ReadMethod(False, USUAL.readers, USUAL.request), UNKNOWN_RATE)
        if found.refused:
            return Disk(way, rate, f"{_said(way, rate)}: direct reads are refused ({found.refused})")
    if not direct and not cached:
        why = f"the file is too small to measure its disk: {_said(USUAL, UNKNOWN_RATE)} is assumed"
        return Disk(USUAL, UNKNOWN_RATE, why)
    if cached and (not direct or cached[1] >= CACHED_ENOUGH * direct[1]):
        beside = f"directly {direct[1] / 1e9:.2f} GB/s" if direct else "direct reads were not measured"
        return Disk(*cached, f"{_said(*cached)}: {beside}")
    assert direct is not None
    beside = f"through the system's cache {cached[1] / 1e9:.2f} GB/s" if cached else found.unseen
    return Disk(*direct, f"{_said(*direct)}" + (f"; {beside}" if beside else ""))


def _best(rates: Mapping[ReadMethod, float]) -> tuple[ReadMethod, float] | None:
    if not rates:
        return None
    enough = max(rates.values()) / ALIKE
    return next((w, rates[w]) for w in sorted(rates, key=_in_flight) if rates[w] >= enough)


def _in_flight(way: ReadMethod) -> tuple[int, int]:
    return way.readers * way.request, way.readers


def _said(way: ReadMethod, rate: float) -> str:
    return f"{way}: {rate / 1e9:.2f} GB/s"


# --- measuring ---------------------------------------------------------------------------------------------


def measure(
    path: str | os.PathLike[str], seconds: float = MEASURE_S, most: int = MEASURE_BYTES
) -> ProbeResult:
    """Read parts of a file in every way, about so long and so much; OSError if it cannot be opened.

    The parts lie anywhere in it: what the last start read may still be in a cache below the system's.
    """
    with _opened(path) as (file, direct, refused), ExitStack() as held:
        pool = held.enter_context(ThreadPoolExecutor(max(w.readers for w in WAYS)))
        trial = _Trial(pool, seconds)
        held.callback(trial.close)
        parts = iter(_parts(os.fstat(file).st_size, most))
        ways = [] if refused else [w for w in WAYS if w.direct] * TURNS
        for way, part in zip(ways, parts, strict=False):
            trial.run(direct, way, part, PART)
        unseen = _try_cached(trial, file, parts)
        return ProbeResult(trial.rates(), refused, unseen)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[int, int, str]]:
    """The file for reads through the cache, and once more for direct ones unless they are refused: why."""
    with ExitStack() as held:
        both = []
        for _ in range(2):
            both.append(open_regular(path))
            held.callback(os.close, both[-1])
        yield both[0], both[1], go_direct(both[1])


def _parts(size: int, most: int) -> list[int]:
    """Where parts of a file begin that lie apart, as many as may be read, in any order."""
    places = size // (2 * PART)
    return [2 * PART * i for i in random.sample(range(places), min(places, most // PART))]


def _try_cached(trial: _Trial, file: int, parts: Iterator[int]) -> str:
    """Reads through the system's cache, of parts that are not in it; why there were none, if so."""
    if not hasattr(os, "posix_fadvise"):
        return "reads through the system's cache were not measured: this system cannot drop files from it"
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # as the streamer reads
    tried = False
    for way in (w for w in WAYS if not w.direct):
        if (part := next(parts, None)) is None or trial.over:
            break
        os.posix_fadvise(file, part, 2 * PART, os.POSIX_FADV_DONTNEED)
        if (there := cached_share(file, part, 2 * PART)) is None or there > RESIDENT:
            continue
        trial.run(file, way, part, 2 * PART)
        os.posix_fadvise(file, part, 2 * PART, os.POSIX_FADV_DONTNEED)
        tried = True
    return "" if tried else "reads through the system's cache were not measured: the file may be in it"


def cached_share(file: int, offset: int, nbytes: int) -> float | None:
    """How much of a part of a file is in the system's cache; None where the system does not say.

    It says so only of files that the user may write to; of others, that all is there.
    """
    try:
        libc = load_library(None, {"mincore": (c_int, c_void_p, c_size_t, c_void_p)})
        with mmap.mmap(file, nbytes, prot=mmap.PROT_READ, offset=offset) as view:
            seen = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(view, np.uint8).ctypes.data
            failed = libc.mincore(address, nbytes, seen.ctypes.data)
    except (OSError, ValueError, BufferError):
        return None
    return None if failed else float((seen & 1).mean())


class _Trial:
    """Threads that read parts of a file, in one way after another, until the time is over."""

    def __init__(self, pool: ThreadPoolExecutor, seconds: float) -> None:
        self._pool, self._end = pool, perf_counter() + seconds
        self._slice = seconds * PART / MEASURE_BYTES  # for a part
        largest = max(w.request for w in WAYS)
        self._memory = [mmap.mmap(-1, largest) for _ in range(max(w.readers for w in WAYS))]
        for block in self._memory:
            np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 1  # there before the clock starts
        list(pool.map(len, self._memory))  # so are the threads
        self._seen: dict[ReadMethod, tuple[int, float]] = {}

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return perf_counter() >= self._end

    def run(self, file: int, way: ReadMethod, part: int, size: int) -> None:
        """One way reads a part, or as much of it as a fair share of the time allows."""
        start = perf_counter()
        if start >= self._end:
            return
        end = start + self._slice * size / PART
        places, lock = iter(range(part, part + size, way.request)), Lock()

        def read(block: mmap.mmap) -> int:
            done = 0
            with memoryview(block) as view, view[: way.request] as target:
                while perf_counter() < end:
                    with lock:
                        place = next(places, None)
                    if place is None:
                        break
                    done += os.preadv(file, [target], place)
            return done

        nbytes = sum(self._pool.map(read, self._memory[: way.readers]))
        before, seconds = self._seen.get(way, (0, 0.0))
        self._seen[way] = before + nbytes, seconds + perf_counter() - start

    def rates(self) -> dict[ReadMethod, float]:
        """Bytes a second of the ways that were tried."""
        return {way: nbytes / seconds for way, (nbytes, seconds) in self._seen.items() if nbytes}

    def close(self) -> None:
        """Give the memory back."""
        for block in self._memory:
            block.close()


# --- what is known from before -----------------------------------------------------------------------------


def disk_of(paths: Sequence[str], memory: Path | None = None) -> Disk:
    """How to read a model's files, of which the largest counts: as its disk is known to be."""
    kept = memory or path_of_disks()
    forecast = WorkTimes.load(kept)
    path = paths[0]
    try:
        path = max(paths, key=os.path.getsize)
        device = device_of(path)
        with _opened(path) as (_, _, refused):
            pass
        known = {w: rate for w in WAYS if (rate := forecast.fact(str(w), device))}
        if known and any(w.direct for w in known) is not bool(refused):
            return choose(ProbeResult(known, refused))
        found = measure(path)
    except OSError as e:
        raise ModelFileError(path, f"measuring its disk failed: {e.strerror or e}") from e
    for way, rate in found.rates.items():
        forecast.learn_fact(str(way), device, rate)
    forecast.save(kept)
    return choose(found)


def remember(path: str, way: ReadMethod, rate: float, memory: Path | None = None) -> None:
    """What a way gave while a model ran. If another one was better, the next start takes that."""
    kept = memory or path_of_disks()
    forecast = WorkTimes.load(kept)
    forecast.learn_fact(str(way), device_of(path), rate)
    forecast.save(kept)


def path_of_disks() -> Path:
    """Where it is kept what disks give."""
    return dirs().cache / "times" / "disks.json"


def device_of(path: str) -> str:
    """A name for the disk that a file is on, good until disks are plugged in elsewhere."""
    status, whole = os.stat(path), os.statvfs(path)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return f"disk {device} of {whole.f_blocks * whole.f_frsize >> 30} GiB"


@dataclass(slots=True)
class DiskRate:
    """What the disk gives now: what was measured at first, and what passes see since."""

    rate: float
    _s_per_byte: float = field(init=False)

    def __post_init__(self) -> None:
        self._s_per_byte = 1 / self.rate

    def observe(self, nbytes: int, seconds: float, waited: float) -> None:
        """A pass read so much in so long, in part of which it waited for the disk.

        A pass that hardly waited did not ask for all that the disk can give: it only says what that is at
        least.
        """
        if nbytes <= 0 or seconds <= 0:
            return
        found = seconds / nbytes
        if waited < WAITED * seconds and found >= self._s_per_byte:
            return
        self._s_per_byte = smoothed(self._s_per_byte, found, nbytes / (nbytes + HORIZON))
        self.rate = 1 / self._s_per_byte
