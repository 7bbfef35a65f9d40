"""What memory gives on this machine, and what else the machine does at the moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hetrun.system.memory_info import available_memory
from hetrun.system.units import counted, format_bytes
from hetrun.tools.bench.read_kernels import LINE, ReadBlock, Reader, ReadRound, readers

BYTES = (
    512 << 20
)  # of a block that lies in no cache, unless the last cache is told to be larger than half of it
LEAST = 32 << 20  # bytes that a round reads: what is shorter says more of how it begins than of memory
TRIES = 3  # rounds with each way to read, or as many as read TRIED bytes
ROUNDS = 12  # more with the fastest one, or as many as read READ bytes
TRIED, READ = 1 << 30, 8 << 30  # so long that the system has found a core for each thread
BUSY = 0.5  # load average above which numbers are not to be trusted
CACHED = 1.1  # so much faster than from DRAM is a block that lies in a cache in part
DIGITS = 2  # of a block's size that count
CPUS = Path("/sys/devices/system/cpu")
_most: dict[tuple[int, int], float] = {}  # bytes per second, by threads and size of the block


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


@dataclass(frozen=True, slots=True)
class MemoryBandwidth:
    """What memory gives to a number of threads that read a block together, again and again."""

    threads: int
    block: int  # bytes
    rate: float  # bytes per second
    dram: float  # the same of a block that is too large for any cache

    @property
    def cached(self) -> bool:
        """Whether some of the block comes from a cache."""
        return self.rate > CACHED * self.dram

    def to_json(self) -> dict[str, float]:
        """For `bench -o json`."""
        return {
            "threads": self.threads,
            "block_bytes": self.block,
            "bytes_per_s": self.rate,
            "dram_bytes_per_s": self.dram,
        }

    @property
    def text(self) -> str:
        """`memory gives 37.0 GB/s to 2 threads`, and from where, where that is not plain."""
        gives = f"memory gives {self.rate / 1e9:.1f} GB/s to {threads(self.threads)}"
        if not self.cached:
            return gives
        return (
            f"{gives} for blocks of {format_bytes(self.block)} (in part from a cache), "
            f"{self.dram / 1e9:.1f} from DRAM"
        )


def threads(n: int) -> str:
    """A number of threads, in words."""
    return counted(n, "thread")


def memory(n: int, nbytes: float, again: bool = True) -> MemoryBandwidth:
    """What memory gives to `n` threads that read `nbytes` bytes in each step. Nothing else may run meanwhile.

    Measured once, or once more and then the best of all counts (`again`), as it takes seconds.
    """
    block, large = rounded(nbytes), _large()
    dram = _bandwidth(n, large, again)
    # A small block is never further away than a large one.
    rate = dram if block >= large else max(dram, _bandwidth(n, block, again))
    return MemoryBandwidth(n, block, rate, dram)


def rounded(nbytes: float) -> int:
    """The size of a block, so that steps that read nearly as much are held against the same measurement."""
    return int(float(f"{max(nbytes, 1.0):.{DIGITS - 1}e}"))


def _bandwidth(n: int, nbytes: int, again: bool = True) -> float:
    """The most that was measured so far: whatever else ran meanwhile took some of it."""
    known = _most.get((n, nbytes), 0.0)
    if again or not known:
        known = _most[n, nbytes] = max(bandwidth(n, nbytes), known)
    return known


def bandwidth(n: int, nbytes: int, rounds: int = ROUNDS, tries: int = TRIES) -> float:
    """Bytes per second that `n` threads get when they read a block together."""
    part = max(LINE, nbytes // n // LINE * LINE)
    work = ReadRound(n, part, max(1, LEAST // (n * part)))
    with ReadBlock(work) as block:
        ways = readers()
        few, many = max(tries, TRIED // work.nbytes), max(rounds, READ // work.nbytes)
        fastest = ways[0] if len(ways) == 1 else min(ways, key=lambda way: usual(way, block, few))
        return work.nbytes / usual(fastest, block, many)


def usual(way: Reader, block: ReadBlock, rounds: int) -> float:
    """Seconds of a round: the middle of the best quarter. Others slow most rounds down, and a few are too
    good to be true."""
    times = sorted(way(block, rounds))
    return median(times[: max(1, rounds // 4)])


def _large() -> int:
    """The size of a block of which next to nothing lies in a cache."""
    return max(BYTES, min(2 * sum(last_caches()), available_memory() // 4))


def last_caches(cpus: Path = CPUS) -> list[int]:
    """The sizes of the last caches of the cores that we may use, each once; none where they are unknown."""
    found: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        level, shared, size = max(_caches(cpus / f"cpu{core}" / "cache"), default=(0, "", 0))
        if level:
            found[shared] = size
    return list(found.values())


def _caches(folder: Path) -> Iterator[tuple[int, str, int]]:
    """Of one core: level, which cores share it, bytes."""
    for index in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            size = (index / "size").read_text().strip()
            level, shared = int((index / "level").read_text()), (index / "shared_cpu_list").read_text()
            yield level, shared.strip(), int(size.removesuffix("K")) << 10
