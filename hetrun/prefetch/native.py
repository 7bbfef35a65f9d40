"""What the C libraries of this folder have in common, as Python sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Functions = Mapping[str, tuple[Any, tuple[Any, ...]]]  # what each gives, and what it is given


class Read(Protocol):
    """A C function that takes the place of pread: a `READING`."""

    def __call__(self, fd: int, to: int, nbytes: int, offset: int, /) -> int: ...


class File(NamedTuple):
    """An open file; what is read of one that is not direct is dropped from the system's cache."""

    fd: int
    direct: bool


class CFile(Structure):
    """struct file."""

    _fields_ = (("fd", c_int64), ("direct", c_int64))


def file_table(files: Sequence[File]) -> Array[CFile]:
    """The same as C has them."""
    return (CFile * len(files))(*(CFile(*file) for file in files))


def address_of(read: Read | None) -> int | None:
    """Of a function that C calls."""
    function: Any = read
    return ctypes.cast(function, c_void_p).value if function else None


def opened(name: str, prefix: str, version: int, functions: Functions) -> ctypes.CDLL | None:
    """A library beside this file, where it was built, and from the source that its caller goes with. None of
    its functions holds Python's lock."""
    try:
        dll = ctypes.CDLL(str(Path(__file__).parent / name), use_errno=True)
        found = getattr(dll, f"{prefix}_version")
        found.restype = c_int64
        if found() != version:
            return None
        for each, (result, arguments) in functions.items():
            function = getattr(dll, f"{prefix}_{each}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return dll
