"""Landlock: which files this process can still reach, and that it opens no connection.

The kernel keeps to it for ever, and for children too. What is open stays open. Only the calling thread is
restricted, and the threads that it begins later: so it is done before there are others.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping

from hetrun.system.sandbox import kernel
from hetrun.system.sandbox.kernel import Unrestricted

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all machines
GET_VERSION, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = 16, 32, 128, 256
MAKE_SOCK, MAKE_FIFO, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = 512, 1024, 4096, 8192, 16384, 32768
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the others are of folders

READ = READ_FILE | READ_DIR
RUN = READ | EXECUTE
WRITE = READ | WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER
DEVICE = READ | WRITE_FILE | IOCTL_DEV

# What a version of the kernel's interface can restrict: files; connections by TCP; sockets without a file,
# and signals, of processes outside.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_SINCE, _OUTSIDE_SINCE = 4, 6
_ALL_NETWORK, _ALL_OUTSIDE = 3, 3


def version() -> int:
    """The version of the kernel's interface; 0: it has none, or it is off."""
    try:
        return kernel.call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(GET_VERSION))
    except OSError:
        return 0


def restrict(grants: Mapping[str, int], *, network: bool = False, others: bool = False) -> int:
    """Nothing but these files and folders, each with its rights. `network`: TCP may stay; `others`: also
    signals to processes outside, and their sockets without a file.

    What does not exist is left out. Returns the version by which it was done. Unrestricted: the kernel does
    not do that.
    """
    known = version()
    if not known:
        raise Unrestricted("Landlock: this kernel does not have it, or it is off")
    handled = _FILES[min(known, max(_FILES))]
    net = _ALL_NETWORK if known >= _NETWORK_SINCE and not network else 0
    outside = _ALL_OUTSIDE if known >= _OUTSIDE_SINCE and not others else 0
    size = 24 if known >= _OUTSIDE_SINCE else 16 if known >= _NETWORK_SINCE else 8
    rules = struct.pack("=QQQ", handled, net, outside)[:size]
    try:
        ruleset = kernel.call(CREATE_RULESET, rules, ctypes.c_size_t(size), ctypes.c_uint32(0))
        try:
            for path, rights in grants.items():
                _grant(ruleset, path, rights & handled)
            kernel.promise_no_more_rights()
            kernel.call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
        finally:
            os.close(ruleset)
    except OSError as error:
        raise Unrestricted(f"Landlock: {error.strerror}") from error
    return known


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is not there, or cannot be reached anyway
        return
    try:
        is_folder = os.path.isdir(f"/proc/self/fd/{place}")
        rule = struct.pack("=Qi", rights if is_folder else rights & OF_FILES, place)
        kernel.call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
    except OSError as error:
        if error.errno != errno.EBADFD:  # such as a pipe: no rule is needed for it
            raise
    finally:
        os.close(place)


def merged(*grants: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Rights by path, those of the same path together."""
    found: dict[str, int] = {}
    for each in grants:
        for path, rights in each:
            found[path] = found.get(path, 0) | rights
    return found
