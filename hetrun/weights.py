"""Where weights come from and where they are: a reader of files, and the store of what each backend holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Backend, Buffer, Buffers, WeightUse
from hetrun.errors import ModelFileError
from hetrun.graph import Constant, Weight

Progress = Callable[[float], None]

# Above this share of the memory that is free, a model's file is not left in the page cache as well: the
# weights would push each other out. Smaller ones stay there, so that the next start is quick.
CACHE_SHARE = 0.25


class FileReader:
    """Reads weights into memory that is already there; it checks that it got every byte."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.bytes_read = 0

    def read(self, weight: Weight, out: NDArray[np.uint8]) -> None:
        """The stored bytes of a weight, its parts one behind the other."""
        if out.shape != (weight.nbytes,):
            raise ValueError(f"{weight.name} has {weight.nbytes} bytes and cannot be read into {out.shape}")
        target, at = out.data, 0
        for part in weight.parts:
            if isinstance(part, Constant):
                out[at : at + len(part.data)] = np.frombuffer(part.data, np.uint8)
                at += len(part.data)
                continue
            # Rows that follow each other in the file are one read.
            runs, rows = (1, part.rows) if part.stride == part.row_bytes else (part.rows, 1)
            for run in range(runs):
                end = at + rows * part.row_bytes
                self._read_into(target[at:end], part.path, part.offset + run * part.stride, weight.name)
                at = end

    def _read_into(self, target: memoryview, path: str, offset: int, name: str) -> None:
        file, at = self._open(path), 0
        while at < len(target):  # the system reads at most 2 GiB at once
            try:
                got = os.preadv(file, [target[at:]], offset + at)
            except OSError as e:
                raise ModelFileError(
                    path, f"reading {name} at byte {offset + at} failed: {e.strerror}"
                ) from e
            if not got:
                where = f"inside the tensor {name}, at byte {offset + at}"
                raise ModelFileError(path, f"the file ends {where}: it was cut while in use; get it again")
            at += got
            self.bytes_read += got

    def _open(self, path: str) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                raise ModelFileError(path, f"cannot be opened: {e.strerror}") from e
        return self._files[path]

    def close(self, drop_cache: bool = False) -> None:
        """Close the files; `drop_cache` also frees the page cache that they take."""
        for file in self._files.values():
            if drop_cache:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        self._files.clear()


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


def available_memory() -> int:
    """Bytes that a new allocation could take without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
