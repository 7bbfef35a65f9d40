"""The library recorder.c: built, used by the process that it was loaded into, and its log read."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hetrun.system.native_library import Prototypes, load_library
from tests.support.preload import build_preload

SOURCE = Path(__file__).with_name("recorder.c")
FUNCTIONS: Prototypes = {
    "recorder_begin": (None, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int),
    "recorder_end": (ctypes.c_long,),
    "recorder_mark": (None, ctypes.c_char_p),
}
RECORD = struct.Struct("<IIIIQQQQ")


class Kind(IntEnum):
    """What a record is of; as in recorder.c."""

    MARK = 0
    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    PUNCH = 4
    SYNC = 5
    RENAME = 6
    LINK = 7
    SYMLINK = 8
    UNLINK = 9
    MKDIR = 10
    RMDIR = 11
    MAPPED = 12
    SYNC_ALL = 13


@dataclass(frozen=True, slots=True)
class Event:
    """One call that succeeded, or (MARK) something that the user was told."""

    kind: Kind
    inode: int
    at: int
    size: int
    name: str
    other: str
    data: bytes


def read_log(log: bytes) -> list[Event]:
    """What was recorded; a record that is cut off at the end, by a kill, is left out."""
    found, at = list[Event](), 0
    while at + RECORD.size <= len(log):
        kind, first, second, _, inode, place, size, nbytes = RECORD.unpack_from(log, at)
        at += RECORD.size
        end = at + first + second + nbytes
        if end > len(log):
            break
        name, other = log[at : at + first].decode(), log[at + first : at + first + second].decode()
        found.append(Event(Kind(kind), inode, place, size, name, other, log[end - nbytes : end]))
        at = end
    return found


def build(folder: Path) -> tuple[Path | None, str]:
    """The library, made in a folder; or why there is none here."""
    return build_preload(SOURCE, folder)


class Recorder:
    """The library in this process."""

    def __init__(self) -> None:
        self._dll = load_library(None, FUNCTIONS)
        self.calls = 0

    @contextmanager
    def recording(self, folder: Path, log: Path, nth: int = 0, middle: bool = False) -> Iterator[None]:
        """Record what happens below a folder; the process dies before the `nth` call, or in its middle."""
        with log.open("wb", buffering=0) as to:
            self._dll.recorder_begin(str(folder).encode(), to.fileno(), nth, middle)
            try:
                yield
            finally:
                self.calls = self._dll.recorder_end()

    def mark(self, text: str) -> None:
        """A message to the user: what was done until then has to last."""
        self._dll.recorder_mark(text.encode())
