"""What an input of the fuzzer has, and the libraries that judge it: the ordinary ones, or numpy."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from tests.sanitizers.memory import Array, Memory

NODE = CFUNCTYPE(None, c_void_p, c_int, c_int, c_void_p)  # as ggml calls functions of ours
MOST_THREADS = 6
GAP = 7.0


@dataclass(frozen=True)
class Input:
    """One input: its random numbers, its memory, where the ordinary libraries are, and which instructions."""

    rng: Random
    memory: Memory
    plain: Path
    levels: tuple[str, ...]

    @property
    def numbers(self) -> np.random.Generator:
        """The same for arrays."""
        return np.random.default_rng(self.rng.getrandbits(32))

    def chance(self, one_in: int) -> bool:
        """True for one in this number of inputs."""
        return self.rng.randrange(one_in) == 0


# Raises AssertionError where a result is not right.
Case = Callable[[Input], None]


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sanitizers-") as path:
        yield Path(path)


def pooled(call: Callable[[int], object], threads: int) -> None:
    """As ggml does: all threads at once."""
    list(_pool().map(call, range(threads)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS)


def node(function: int, struct: ctypes.Structure, threads: int) -> None:
    """A node of a graph, by its function's address, without the interpreter's lock."""
    call, at = NODE(function), ctypes.addressof(struct)
    pooled(lambda i: call(None, i, threads, at), threads)


@dataclass(frozen=True)
class Spread:
    """Rows with something between them that must stay, and nothing behind the last one."""

    flat: Array
    stride: int
    rows: Array

    @property
    def address(self) -> int:
        return self.flat.ctypes.data

    def read(self) -> Array:
        """A copy of the rows."""
        found = self.rows.copy()
        self.rows[...] = GAP
        assert (self.flat == GAP).all(), "something was written between rows"
        self.rows[...] = found
        return found


def spread(case: Input, n: int, width: int, gap: int) -> Spread:
    """So many rows of float32."""
    flat = case.memory.full((n - 1) * (width + gap) + width, GAP)
    rows = np.lib.stride_tricks.as_strided(flat, (n, width), (4 * (width + gap), 4))
    return Spread(flat, width + gap, rows)


def same(a: Array, b: Array) -> bool:
    """Whether all bits are the same, but for those of what is no number."""
    strange = np.isnan(a) & np.isnan(b)
    return bool(np.array_equal(a.view(np.int32)[~strange], b.view(np.int32)[~strange]))


def close(a: Array, b: Array, error: float = 1e-5) -> bool:
    """Whether numbers are as near as float32 makes them, in parts of a usual one."""
    usual = float(np.sqrt(np.square(b, dtype=np.float64).mean())) if b.size else 0.0
    return bool((np.abs(a.astype(np.float64) - b) <= error * max(usual, 1e-30)).all())
