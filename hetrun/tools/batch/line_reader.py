"""Lines of a file or a pipe as they come. None is held that is longer than a request may be."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from hetrun.errors import UserError

MOST_LINE = 32 << 20  # bytes: as many as the server takes
CHUNK = 1 << 20
MOST_AT_ONCE = 8 << 20  # bytes of lines


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end."""

    number: int  # from 1 on, as editors count
    data: bytes
    whole: bool = True  # one that is not is longer than MOST_LINE, and nothing of it was kept


class LineReader:
    """Reads a descriptor, which stays the caller's to close."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        found = os.fstat(fd)
        self.size = found.st_size if stat.S_ISREG(found.st_mode) else None  # None: unknown
        self.at = 0  # bytes of the lines that were given so far
        self._buffer = bytearray()
        self._looked = 0  # there is no line end in so much of the buffer
        self._number = 0
        self._ahead: list[Line] = []  # that were looked at
        self._ended = self._waits = self._too_long = False

    def some(self, most: int) -> list[Line]:
        """The next lines: as many as are there, up to `most`, and at least one. None: it is the end.

        What comes through a pipe is not waited for while there is anything to be done.
        """
        if self._ahead:
            looked_at, self._ahead = self._ahead[:most], self._ahead[most:]
            return looked_at
        found: list[Line] = []
        begin = self.at
        while len(found) < most and self.at - begin < MOST_AT_ONCE:
            line = self._next()
            if line is not None:
                found.append(line)
            elif self._ended or (found and self._waits):
                break
            else:
                self._read()
        return found

    def ahead(self, most: int) -> list[Line]:
        """The first lines, which stay to be read."""
        self._ahead = self.some(most)
        return self._ahead

    @property
    def at_end(self) -> bool:
        """Whether there are no more lines than those that were given or looked at."""
        return not self._buffer and (self._ended or (self.size is not None and self.at >= self.size))

    def _read(self) -> None:
        try:
            part = os.read(self._fd, CHUNK)
        except OSError as error:
            raise UserError(f"{self._name} cannot be read to its end: {error.strerror}") from None
        self._ended, self._waits = not part, len(part) < CHUNK
        self._buffer += part

    def _next(self) -> Line | None:
        """The next line of those that were read; None: its end has not come."""
        end = self._buffer.find(b"\n", self._looked)
        if end < 0 and not self._ended:
            self._looked = len(self._buffer)
            if self._looked > MOST_LINE:
                self._too_long = True
                self._drop(self._looked)
            return None
        if end < 0 and not self._buffer and not self._too_long:
            return None
        size = end if end >= 0 else len(self._buffer)
        whole = not self._too_long and size <= MOST_LINE
        data = bytes(self._buffer[:size]) if whole else b""
        self._drop(end + 1 if end >= 0 else size)
        self._too_long = False
        self._number += 1
        return Line(self._number, data.removesuffix(b"\r"), whole)

    def _drop(self, size: int) -> None:
        del self._buffer[:size]
        self.at += size
        self._looked = 0
