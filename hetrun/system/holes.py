"""Holes in files: bytes that take no room on the disk and read as zeros."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_int64
from functools import cache

from hetrun.system.native_library import load_library

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def punch(file: int, offset: int, nbytes: int) -> None:
    """Give the room of some bytes back; an OSError where the file system has no holes."""
    if _libc().fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    return load_library(None, {"fallocate": (c_int, c_int, c_int, c_int64, c_int64)}, keep_errno=True)
