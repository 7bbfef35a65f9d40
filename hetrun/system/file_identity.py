"""Which file it was: headers are checked once, and what lies behind them is read later, by path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hetrun.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file, and its state when its header was read; of another, checked lengths say nothing."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp of a file that has this status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, path: str, status: os.stat_result) -> None:
        """Refuse the file that now has this path and status unless it is the same."""
        if (now := Stamp.of(status)) == self:
            return
        other = (now.device, now.inode) != (self.device, self.inode)
        cut = f"is {now.size} bytes long and was {self.size}"
        how = "is another file now" if other else cut if now.size != self.size else "was written to"
        raise ModelFileError(path, f"{how}: it was changed while in use; open it again")


@contextmanager
def unchanged(files: Mapping[str, Stamp]) -> Iterator[None]:
    """Inside, these files are read by path; if they changed, that also explains any other failure."""
    try:
        yield
    finally:
        for path, stamp in files.items():
            try:
                status = os.stat(path)
            except OSError as e:
                reason = f"was changed while in use: {e.strerror}; open it again"
                raise ModelFileError(path, reason) from e
            stamp.check(path, status)
