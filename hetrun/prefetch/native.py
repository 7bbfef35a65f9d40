"""What the C libraries of this folder have in common, as Python sees them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, c_int64
from typing import NamedTuple, Protocol


class ReadFunction(Protocol):
    """A C function that takes the place of pread: a `READING`."""

    def __call__(self, fd: int, to: int, nbytes: int, offset: int, /) -> int: ...


class OpenFile(NamedTuple):
    """An open file; what is read of one that is not direct is dropped from the system's cache."""

    fd: int
    direct: bool


class CFile(Structure):
    """struct file."""

    _fields_ = (("fd", c_int64), ("direct", c_int64))


def file_table(files: Sequence[OpenFile]) -> Array[CFile]:
    """The same as C has them."""
    return (CFile * len(files))(*(CFile(*file) for file in files))
