"""Where weights come from: their bytes, read from files."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import ModelFileError
from hetrun.graph import Constant, Extent, Remade, Weight
from hetrun.system.file_identity import Stamp
from hetrun.system.files import open_regular


class FileReader:
    """Reads weights into memory that is already there; it checks that it got every byte.

    It refuses files that are not, or no longer, those whose headers were read: what was read of a file is
    good once `close` has found it unchanged.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, Stamp | None]] = {}
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
            end = at + part.rows * part.row_bytes
            if isinstance(part, Remade):
                out[at:end] = part.make(lambda extent: self._extent(extent, weight.name)).reshape(-1)
            else:
                self._rows(target[at:end], part, weight.name)
            at = end

    def _extent(self, extent: Extent, name: str) -> NDArray[np.uint8]:
        found = np.empty(extent.rows * extent.row_bytes, np.uint8)
        self._rows(found.data, extent, name)
        return found

    def _rows(self, target: memoryview, part: Extent, name: str) -> None:
        """Rows that follow each other in the file are one read."""
        runs, rows = (1, part.rows) if part.stride == part.row_bytes else (part.rows, 1)
        size = rows * part.row_bytes
        for run in range(runs):
            self.fill(target[run * size : (run + 1) * size], part, run * part.stride, name)

    def fill(self, target: memoryview, part: Extent, skip: int, name: str) -> None:
        """Bytes of a file from `skip` bytes behind a part's beginning; `name` is for messages."""
        file, offset, at = self._open(part), part.offset + skip, 0
        while at < len(target):  # the system reads at most 2 GiB at once
            try:
                got = os.preadv(file, [target[at:]], offset + at)
            except OSError as e:
                raise ModelFileError(
                    part.path, f"reading {name} at byte {offset + at} failed: {e.strerror}"
                ) from e
            if not got:
                where = f"inside the tensor {name}, at byte {offset + at}"
                raise ModelFileError(
                    part.path, f"the file ends {where}: it was truncated while in use; get it again"
                )
            at += got
            self.bytes_read += got

    def _open(self, part: Extent) -> int:
        path = part.path
        if path not in self._files:
            try:
                file = open_regular(path)
            except OSError as e:
                reason = f"was changed while in use: {e.strerror}; open it again"
                raise ModelFileError(path, reason) from e
            self._files[path] = file, part.stamp
            _check(path, file, part.stamp)
        return self._files[path][0]

    def check(self) -> None:
        """Raise if a file has changed since it was opened."""
        for path, (file, stamp) in self._files.items():
            _check(path, file, stamp)

    def close(self, drop_cache: bool = False) -> None:
        """Close the files, none of which may have changed; `drop_cache` also frees their page cache."""
        files = self._files
        self._files = {}
        try:
            for path, (file, stamp) in files.items():
                _check(path, file, stamp)
        finally:
            for file, _ in files.values():
                if drop_cache:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


class SharedReader:
    """Reads weights for as long as a model runs, from any number of threads: each has files of its own."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[FileReader] = []
        self._lock = threading.Lock()

    def read(self, weight: Weight, out: NDArray[np.uint8]) -> None:
        """The stored bytes of a weight."""
        reader = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = FileReader()
            with self._lock:
                self._all.append(reader)
        reader.read(weight, out)

    def check(self) -> None:
        """Raise if a file that was read has changed since."""
        with self._lock:
            for reader in self._all:
                reader.check()

    def close(self) -> None:
        """Close the files; no thread reads any more."""
        with self._lock:
            while self._all:
                with suppress(ModelFileError):  # what was read is not used any more
                    self._all.pop().close(drop_cache=True)


def _check(path: str, file: int, stamp: Stamp | None) -> None:
    if stamp is not None:
        stamp.check(path, os.fstat(file))
