"""Which CPUs the threads of a pass run on (Sandwich's hot switch: masks change, and no weight moves).

A library's threads are a team: the engine's thread, and others that its OpenMP made for it. Each of the
others takes its own seat by calling a C function, and keeps it. The engine's thread has a seat only while a
graph is computed: whatever it begins otherwise (a child, another library's threads) begins where it is.

Two threads of a team on one CPU wait for each other for a whole time slice, again and again. That is what the
system makes of them when other programs want the same cores, and what seats prevent.

Who says by OpenMP's own variables where threads belong is obeyed, and nothing is done where the library could
not be built. Where threads run changes how long a pass takes, never its result.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from ctypes import CFUNCTYPE, POINTER, Structure, c_int64, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from hetrun.system.core_sets import CoreSet, core_sets
from hetrun.system.cpu_topology import TopoTree, this_machine
from hetrun.system.native_library import address_of, load_built

NAME = "affinity_calls.so"  # beside this file
VERSION = 1  # of its structure
WORD = 64  # CPUs in a word of a mask
THEIRS = "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"  # who sets one has decided

Masks = tuple[tuple[int, ...], ...]

log = logging.getLogger(__name__)


class _Seats(Structure):
    """struct seats."""

    _fields_ = (
        ("number", c_void_p),
        ("masks", POINTER(c_uint64)),
        ("words", c_int64),
        ("count", c_int64),
        ("refused", c_int64),
    )


class ThreadCores:
    """For each number of threads the set of cores that they run on.

    A thread for each core needs no measurement: it is put on its core. Fewer threads than that run wherever
    the system puts them, until it is measured which set serves them best.
    """

    def __init__(self, tree: TopoTree) -> None:
        self._tree = tree
        self._sets: dict[int, list[CoreSet]] = {}
        for some in core_sets(tree):
            self._sets.setdefault(some.threads, []).append(some)
        whole = [s for sets in self._sets.values() for s in sets if self._covers(s)]
        self._chosen = {s.threads: s for s in reversed(whole)}

    def _covers(self, cores: CoreSet) -> bool:
        """Whether each core has a thread, and each thread a CPU."""
        used = set(cores.cpus)
        return cores.threads == len(used) and all(used.intersection(core.cpus) for core in self._tree.cores)

    def of(self, threads: int) -> CoreSet:
        """Where `threads` threads run."""
        found = self._chosen.get(threads)
        if found is None:
            found = self._chosen[threads] = CoreSet("anywhere", self._tree.cpus, threads)
        return found

    def choose(self, cores: CoreSet) -> None:
        """From the next pass on, that many threads run there."""
        self._chosen[cores.threads] = cores

    def open(self, threads: int) -> list[CoreSet]:
        """What to measure before this number of threads has a place; nothing where there is no choice."""
        sets = self._sets.get(threads, [])
        if all(len(s.cpus) > threads or self._covers(s) for s in sets):
            return []
        return [CoreSet("anywhere", self._tree.cpus, threads), *sets]


@cache
def chosen() -> ThreadCores:
    """The choices for this machine, which all engines of a process share."""
    return ThreadCores(this_machine())


ANYWHERE = nullcontext()


@cache
def everywhere() -> tuple[int, ...]:
    """All CPUs that this process may use."""
    return this_machine().cpus


class Team(threading.local):
    """The threads that one library computes with when the calling thread asks it to."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """A library that is linked to the OpenMP whose threads are meant."""
        self._run = _runner(library)
        self._seated = 0  # threads, at most

    def seated(self, threads: int) -> AbstractContextManager[None]:
        """`threads` threads in their seats, for a computation."""
        cores = chosen().of(threads) if self._run else None
        if cores is None or seats(cores) == (everywhere(),):
            self.rise()
            return ANYWHERE
        return self._in_their_seats(cores, threads)

    @contextmanager
    def _in_their_seats(self, cores: CoreSet, threads: int) -> Iterator[None]:
        # Each time: what else computes here may have ended some threads, and those that are made in their
        # place begin where the engine's thread is.
        self._sit(seats(cores), threads)
        self._seated = max(self._seated, threads)
        try:
            yield
        finally:
            _move(everywhere())

    def _sit(self, masks: Masks, threads: int) -> None:
        if self._run:
            self._run(masks, threads)

    def rise(self) -> None:
        """Let all threads go wherever this process may."""
        if self._seated:
            self._sit((everywhere(),), self._seated)
            self._seated = 0


def _move(cpus: Sequence[int]) -> None:
    """The calling thread. A CPU may have gone meanwhile: then the system knows where the thread is."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)


@cache
def seats(cores: CoreSet) -> Masks:
    """The CPUs that each thread of a team may use, the engine's first; one entry is for all."""
    if not cores.pinned:
        return (cores.cpus,)  # the system moves them away from what else runs
    return tuple((cpu,) for cpu in cores.cpus)


def _runner(library: ctypes.CDLL) -> Callable[[Masks, int], None] | None:
    """What has each thread of a team take its mask; None where that cannot or should not be done."""
    sit = _function()
    parallel = getattr(library, "GOMP_parallel", None)
    number = getattr(library, "omp_get_thread_num", None)
    if sit is None or parallel is None or number is None or any(os.environ.get(name) for name in THEIRS):
        return None
    start = CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)(address_of(parallel))
    asks = address_of(number)

    def run(masks: Masks, threads: int) -> None:
        bits, words = _bits(masks)
        asked = _Seats(asks, bits, words, len(masks), 0)
        start(sit, ctypes.addressof(asked), threads, 0)
        if asked.refused:
            log.debug("%d of %d threads could not be put on their CPUs", asked.refused, threads)

    return run


@cache
def _bits(masks: Masks) -> tuple[ctypes.Array[c_uint64], int]:
    """As the system reads them, and how many words each has."""
    words = 1 + max(max(mask) for mask in masks) // WORD
    bits = (c_uint64 * (words * len(masks)))()
    for at, mask in enumerate(masks):
        for cpu in mask:
            bits[at * words + cpu // WORD] |= 1 << cpu % WORD
    return bits, words


@cache
def _function() -> int | None:
    """The C function, where it was built, and from the source that this file goes with."""
    library = load_built(Path(__file__).parent / NAME, ("hetrun_seats_version", VERSION))
    return address_of(library.hetrun_sit) if library else None
