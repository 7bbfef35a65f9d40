"""The file of results. It grows by whole lines, and says by itself what has been done.

There is no journal beside it that could say something else: a line that is in the file was answered, and one
that is not was not. What a process that was killed left of a line is cut off by the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hetrun.errors import UserError
from hetrun.system.files import sync_names

CHUNK = 1 << 20
BEGINNING = 64  # bytes that tell what a line is of
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(Exception):
    """The disk is full, or the file may not become larger; nothing of the line was written."""


class LineOutput:
    """Writes lines to a descriptor: a file's, which may be gone on with, or that of anything else."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd
        self._lock = threading.Lock()  # the file must not be closed while another thread writes to it
        self._closed = False
        self.is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        # What is there already stays: standard output may be a user's file, at any place in it.
        self.size = os.lseek(fd, 0, os.SEEK_END) if self.is_file else 0
        self.rest = b""

    def lines(self) -> Iterator[bytes]:
        """Those that are there, with their ends. Half a line at the end of the file stays there until `cut`;
        `rest` is what it begins with."""
        at, rest = 0, b""
        while part := os.pread(self._fd, CHUNK, at):
            at += len(part)
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line + b"\n"
        self.size, self.rest = at - len(rest), rest[:BEGINNING]

    def clear(self) -> None:
        """Take all lines away."""
        self.cut(0)

    def cut(self, size: int) -> None:
        """Take away what is after these bytes, and go on there."""
        with self._lock:
            if not self._closed:
                self.size = size
                self._cut()

    def write(self, line: bytes) -> None:
        """A whole line or, with NoRoom, nothing."""
        with self._lock:
            if not self._closed:
                self._write(line)

    def _write(self, line: bytes) -> None:
        at = 0
        try:
            while at < len(line):
                at += os.write(self._fd, line[at:])
        except OSError as error:
            if self.is_file and at:
                self._cut()
            if error.errno in NO_ROOM:
                raise NoRoom(f"{self.name}: {error.strerror}") from None
            if error.errno == errno.EPIPE:
                raise BrokenPipeError from None
            raise UserError(f"{self.name} cannot be written: {error.strerror}") from None
        self.size += len(line)

    def _cut(self) -> None:
        """Take what is not a whole line off the file's end, and go on there."""
        os.ftruncate(self._fd, self.size)
        os.lseek(self._fd, self.size, os.SEEK_SET)

    def sync(self) -> None:
        """Have it on the disk."""
        if self.is_file:
            os.fsync(self._fd)


class OutputFile(LineOutput):
    """A file of results by its path; no other process writes to it meanwhile."""

    def __init__(self, path: Path, resume: bool, source: Path | None) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UserError(f"-o {path} cannot be opened for writing: {error.strerror}") from None
        try:
            os.set_blocking(fd, True)
            super().__init__(fd, str(path))
            self._check(resume, source)
            if self.is_file:
                sync_names(Path(os.path.realpath(path)).parent)
        except BaseException:
            os.close(fd)
            raise

    def _check(self, resume: bool, source: Path | None) -> None:
        if source and source.exists() and os.path.samestat(os.fstat(self._fd), source.stat()):
            raise UserError(f"-o {self.name} is the file with the requests: choose another one")
        with suppress(OSError):  # where there are no locks
            if not _is_alone(self._fd):
                raise UserError(
                    f"another process is writing to {self.name}: wait for it, or choose another file"
                )
        if resume and not self.is_file:
            raise UserError(f"--resume needs a file that can be read again, which {self.name} is not")
        if self.size and not resume:
            raise UserError(f"{self.name} exists already: continue it with --resume, or choose another file")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)


def _is_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
