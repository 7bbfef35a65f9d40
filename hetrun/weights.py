"""Where weights are: the store of what each backend holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetrun.backend import Backend, Buffer, Buffers, WeightUse
from hetrun.cgroups import memory_limit
from hetrun.config.values import size_in_words
from hetrun.graph import Constant, Weight
from hetrun.reader import FileReader
from hetrun.sysfiles import lines_of

Progress = Callable[[float], None]


def stretch(progress: Progress | None, a: float, b: float) -> Progress:
    """The part of a longer way from a to b; to nobody where nobody wants to hear."""
    return (lambda part: progress(a + part * (b - a))) if progress else (lambda part: None)


# Above this share of the memory that is free, a model's file is not left in the page cache as well: the
# weights would push each other out. Smaller ones stay there, so that the next start is quick.
CACHE_SHARE = 0.25


class WeightStore:
    """Every weight that is in memory, by backend and use."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._buffers: dict[str, dict[WeightUse, Buffer]] = {name: {} for name in backends}

    @property
    def resident_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(b.nbytes for held in self._buffers.values() for b in held.values())

    def buffers(self, backend: str) -> Buffers:
        """What one backend holds."""
        return self._buffers[backend]

    def holds(self, backend: str, wanted: Iterable[WeightUse]) -> bool:
        """Whether a backend has all of these."""
        return all(use in self._buffers[backend] for use in wanted)

    def drop(self, backend: str, uses: Iterable[WeightUse]) -> None:
        """Give the memory of some weights back."""
        for use in uses:
            if (buffer := self._buffers[backend].pop(use, None)) is not None:
                self._backends[backend].release(buffer)

    def load(self, wanted: Mapping[str, Iterable[WeightUse]], progress: Progress | None = None) -> None:
        """Bring in what is not there yet, in the order of the files."""
        asked = dict.fromkeys((backend, use) for backend, uses in wanted.items() for use in uses)
        missing = [(backend, use) for backend, use in asked if use not in self._buffers[backend]]
        missing.sort(key=lambda item: _place(item[1].weight))
        total, done = sum(use.weight.nbytes for _, use in missing) or 1, 0
        reader = FileReader()
        drop = total > CACHE_SHARE * available_memory()
        try:
            for backend, use in missing:
                self._buffers[backend][use] = self._backends[backend].upload(use, reader.read)
                done += use.weight.nbytes
                if progress:
                    progress(done / total)
        finally:
            reader.close(drop)


def _place(weight: Weight) -> tuple[str, int]:
    first = weight.parts[0]
    return ("", 0) if isinstance(first, Constant) else (first.path, first.offset)


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that a new allocation could take without swapping."""

    nbytes: int
    limit: int | None = None  # of the container, where that is what there is least of

    @property
    def of(self) -> str:
        """What it is free of, in words."""
        return (
            "the machine's memory"
            if self.limit is None
            else f"the container's limit of {size_in_words(self.limit)}"
        )


def free_memory(root: Path = Path("/")) -> Free:
    """What is free on the machine, or of a container's limit where that is less."""
    machine, group = _machine_memory(root), memory_limit(root)
    return Free(machine) if group is None or group.left >= machine else Free(group.left, group.limit)


def available_memory() -> int:
    """Bytes that a new allocation could take without swapping, or passing a container's limit."""
    return free_memory().nbytes


def _machine_memory(root: Path) -> int:
    for line in lines_of(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_memory() -> int:
    """Bytes of this process that lie in memory now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
