"""What the C library's allocator keeps goes to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hetrun.system import allocator

# Free memory below a piece that is in use: glibc gives none of it back by itself.
FREED = """
import ctypes
from hetrun.memory.ledger import kernel_figures
from hetrun.system.allocator import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
pieces = [libc.malloc(64 << 10) for _ in range(512)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 64 << 10)
for piece in pieces[:-1]:
    libc.free(piece)
before = kernel_figures().anonymous
give_back()
print((before - kernel_figures().anonymous) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps less")
def test_what_was_freed_goes_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 24  # MiB, of 32


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    allocator._libc.cache_clear()
    try:
        allocator.give_back()
    finally:
        allocator._libc.cache_clear()
