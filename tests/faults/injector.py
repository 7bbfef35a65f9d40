"""The library faults.c: built, and used by the process that it was loaded into."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetrun.system.native_library import Prototypes, load_library
from tests.faults.count import Count
from tests.faults.device_calls import DEVICE, DEVICE_CALLS
from tests.support.preload import build_preload

SHARED = "FAULTS_SHARED"  # the variable with the file of a state that several processes have
SOURCE = Path(__file__).with_name("faults.c")
# Numbers of faults.c, and what the system says where such a call fails.
CALLS = {
    "open": (1, errno.EMFILE),
    "read": (2, errno.EIO),
    "pread": (3, errno.EIO),
    "mmap": (4, errno.ENOMEM),
    "malloc": (5, errno.ENOMEM),
    "write": (6, errno.ENOSPC),
    "pwrite": (7, errno.ENOSPC),
    "fsync": (8, errno.EIO),
    "rename": (9, errno.EIO),
    "thread": (10, errno.EAGAIN),
    "send": (11, errno.ECONNRESET),
    "new": (12, errno.ENOMEM),
    "list": (13, errno.EIO),
    "truncate": (14, errno.ENOSPC),
    "unlink": (15, errno.EIO),
    "mkdir": (16, errno.ENOSPC),
    "lock": (17, errno.ENOLCK),
    "accept": (18, errno.EMFILE),
    "receive": (19, errno.ECONNRESET),
}
# Libraries whose memory is counted: ours, ggml's, llama.cpp's and numpy's.
WATCHED = (b"/hetrun/", b"/backends/", b"libggml", b"libllama", b"/numpy/")
FUNCTIONS: Prototypes = {
    "faults_watch": (None, ctypes.c_char_p),
    "faults_leave": (None, ctypes.c_int),
    "faults_arm": (None, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int),
    "faults_disarm": (ctypes.c_long,),
    "faults_report": (None, ctypes.c_int),
    "faults_exempt": (None, ctypes.c_int),
    "faults_site": (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
}


def build(folder: Path) -> tuple[Path | None, str]:
    """The library, made in a folder; or why there is none here."""
    return build_preload(SOURCE, folder, "-fexceptions")


class Injector:
    """The library in this process."""

    def __init__(self) -> None:
        self._dll = load_library(None, FUNCTIONS)
        self._dll.faults_report(1)

    @contextmanager
    def armed(self, call: str, nth: int = 0, lasting: bool = False) -> Iterator[Count]:
        """Count calls of one kind, and fail the Nth; `lasting`: and all after it."""
        if call in DEVICE_CALLS:
            with DEVICE.armed(call, nth, lasting) as found:
                yield found
            return
        number, error = CALLS[call]
        self._dll.faults_watch(ctypes.create_string_buffer(b"\0".join(WATCHED), 256))
        count, name = Count(), ctypes.create_string_buffer(256)
        self._dll.faults_arm(number, nth, lasting, error)
        try:
            yield count
        finally:
            count.calls = self._dll.faults_disarm()
            if self._dll.faults_site(name, len(name)):
                count.site = name.value.decode(errors="replace").strip()

    def leave(self) -> None:
        """None of this process's calls fail: only those of others that have its state."""
        self._dll.faults_leave(1)

    def exempt(self) -> None:
        """This thread's calls do not fail, and are not counted."""
        self._dll.faults_exempt(1)
