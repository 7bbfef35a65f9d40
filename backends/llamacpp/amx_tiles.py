"""The CPU's tile registers, which ggml shares with others that use AMX in this process.

ggml configures a thread's tiles at its first product there, and never again. oneDNN (in torch) configures
them for each product of its own and releases them behind it; ggml's next product on that thread then ends the
process with SIGILL. So ggml's configuration is loaded again before each graph, on every thread that computes.
There is one instruction for it, and no function that we could call: its few bytes are written here.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from contextlib import suppress
from ctypes import c_int, c_size_t, c_uint, c_void_p
from functools import cache

from hetrun.backends.llamacpp.ggml_api import GgmlLibrary
from hetrun.system.native_library import MissingFunction, Prototypes, load_library

log = logging.getLogger(__name__)

LOAD = bytes.fromhex("c4e2784907c3")  # ldtilecfg [rdi]; ret
READ_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
# As ggml_tile_config_init of the tested versions has it: for each of 8 tiles its rows and its bytes in a row.
ROWS, ROW_BYTES = (8, 8, 16, 16, 16, 16, 16, 16), (64, 64, 32, 32, 64, 64, 64, 64)


class Tiles:
    """Loads ggml's tile configuration on the threads of its next graph."""

    def __init__(self, lib: GgmlLibrary) -> None:
        """Raises OSError where the system does not allow code to be made."""
        self._code = mmap.mmap(-1, mmap.PAGESIZE)
        self._code.write(LOAD)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        libc = load_library(None, {"mprotect": (c_int, c_void_p, c_size_t, c_int)}, keep_errno=True)
        if libc.mprotect(address, mmap.PAGESIZE, READ_EXECUTE):
            raise OSError(ctypes.get_errno(), "the system does not let this process make code")
        self._load = ctypes.CFUNCTYPE(None, c_void_p)(address)
        self._address = address
        self._config = ctypes.create_string_buffer(config(), 64)
        # Looked up in ggml's own library: the threads must be those of the OpenMP that it is linked to.
        # Without OpenMP the only thread that ggml shares with others is the caller's.
        parallel: Prototypes = {"GOMP_parallel": (None, c_void_p, c_void_p, c_uint, c_uint)}
        self._parallel = None
        with suppress(MissingFunction):
            self._parallel = load_library(lib.cpu_path, parallel).GOMP_parallel

    def restore(self, threads: int) -> None:
        """Before a graph that this many threads compute."""
        where = ctypes.addressof(self._config)
        if self._parallel and threads > 1:
            self._parallel(self._address, where, threads, 0)
        else:
            self._load(where)


def config() -> bytes:
    """The 64 bytes that the instruction reads: palette 1, and the size of each tile."""
    sizes = b"".join(n.to_bytes(2, "little") for n in ROW_BYTES).ljust(32, b"\0")
    return bytes((1,)).ljust(16, b"\0") + sizes + bytes(ROWS).ljust(16, b"\0")


@cache
def tiles(lib: GgmlLibrary) -> Tiles | None:
    """What restores ggml's tiles; None where that cannot be done, so that ggml must leave them alone."""
    try:
        return Tiles(lib)
    except OSError as e:
        log.info("ggml's AMX code is not used, because other libraries' could not be kept apart: %s", e)
        return None
