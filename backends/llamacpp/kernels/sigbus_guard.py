"""Reading a mapped file that was cut must not end the process: the library sigbus.c, as Python sees it."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_size_t
from functools import cache
from pathlib import Path

from hetrun.errors import BackendError
from hetrun.system.native_library import Prototypes, load_built

NAME = "sigbus.so"  # beside this file
VERSION = 1
FUNCTIONS: Prototypes = {
    "hetrun_sigbus_arm": (c_int64,),
    "hetrun_sigbus_register": (c_int64, c_size_t, c_int64),
    "hetrun_sigbus_unregister": (None, c_int64),
    "hetrun_sigbus_fault": (c_size_t, c_int64),
    "hetrun_sigbus_mend": (c_int64, c_int64, c_int),
}


class SigbusGuard:
    """What of the process's memory may turn into zeros, where its file does not give it any more."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._arm, self._register = dll.hetrun_sigbus_arm, dll.hetrun_sigbus_register
        self._unregister, self._fault = dll.hetrun_sigbus_unregister, dll.hetrun_sigbus_fault
        self._mend = dll.hetrun_sigbus_mend

    def arm(self) -> None:
        """Be the one who gets the signal: before every run, as others may have taken it meanwhile."""
        if self._arm():
            raise BackendError(
                "the system does not let this process handle SIGBUS, which mapped weights need"
            )

    def register(self, address: int, nbytes: int) -> int:
        """Guard a mapping; its number."""
        number: int = self._register(address, nbytes)
        if number < 0:
            raise BackendError("too many files are mapped at a time")
        return number

    def unregister(self, number: int) -> None:
        """Before the mapping goes."""
        self._unregister(number)

    def fault(self, number: int) -> int:
        """The first address that has become zeros since this was asked last; 0 if none has."""
        address: int = self._fault(number)
        return address

    def mend(self, number: int, file: int) -> bool:
        """Show the file in its mapping again."""
        return not self._mend(number, file)


@cache
def guard() -> SigbusGuard | None:
    """The library, where it was built, and from the source that this file goes with."""
    path, version = Path(__file__).parent / NAME, ("hetrun_sigbus_version", VERSION)
    dll = load_built(path, version, FUNCTIONS, locked=True)
    return SigbusGuard(dll) if dll else None
