"""Where weights are: the store of what each backend holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetrun.backend import Backend, Buffer, Buffers, WeightUse
from hetrun.graph import Constant, Remade, Weight
from hetrun.loader.weight_reader import FileReader
from hetrun.system.memory_info import available_memory
from hetrun.system.progress import Progress

# Above this share of the memory that is free, a model's file is not left in the page cache as well: the
# weights would push each other out. Smaller ones stay there, so that the next start is quick.
CACHE_SHARE = 0.25


class WeightStore:
    """Every weight that is in memory, by backend and use."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._buffers: dict[str, dict[WeightUse, Buffer]] = {name: {} for name in backends}
        self._first: Mapping[str, frozenset[WeightUse]] = {}

    @property
    def resident_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(b.nbytes for held in self._buffers.values() for b in held.values())

    def settle(self) -> None:
        """What is held now is the model; all that comes later are copies of it."""
        self._first = {name: frozenset(held) for name, held in self._buffers.items()}

    @property
    def copied_bytes(self) -> Mapping[str, int]:
        """Memory of the copies, by backend; what each has had from the beginning is none."""
        found = {}
        for name, held in self._buffers.items():
            first = self._first.get(name, frozenset())
            found[name] = sum(buffer.nbytes for use, buffer in held.items() if use not in first)
        return found

    def forget(self) -> None:
        """The backends were closed, and others have their places: none of them has anything."""
        self._buffers = {name: {} for name in self._backends}
        self._first = {}

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
    if isinstance(first, Remade):
        first = first.sources[0]
    return ("", 0) if isinstance(first, Constant) else (first.path, first.offset)
