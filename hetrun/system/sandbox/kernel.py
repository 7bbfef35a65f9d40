"""Calls of the kernel that libc has no function for, and the promise that goes before all restrictions."""

from __future__ import annotations

import ctypes
import os
from functools import cache

PR_SET_NO_NEW_PRIVS = 38


class Unrestricted(Exception):
    """A restriction could not be set; the text says why, for a line of a log."""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """A call of the kernel by its number; OSError if it fails."""
    result = int(_libc().syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def promise_no_more_rights() -> None:
    """No program that this process starts gets rights by its file, such as those of sudo. The kernel asks for
    it before it takes restrictions from those who are not root. Unrestricted: it does not know that."""
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if _libc().prctl(PR_SET_NO_NEW_PRIVS, one, none, none, none):
        raise Unrestricted(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
