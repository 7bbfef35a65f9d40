"""Holes in files: bytes that take no room on the disk and read as zeros."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def punch(file: int, offset: int, nbytes: int) -> None:
    """Give the room of some bytes back; an OSError where the file system has no holes."""
    if _fallocate()(file, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Any:  # noqa: ANN401 - a function of C
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function
