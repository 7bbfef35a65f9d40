"""Where weights come from: their bytes, read from files."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import ModelFileError
from hetrun.graph import Constant, Weight


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
