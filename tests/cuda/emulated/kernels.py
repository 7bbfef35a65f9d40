"""CUDA sources as shared libraries for the CPU, their kernels called with numpy arrays.

They are kept in the checkout, not in a test's home, and built once however many processes want them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hetrun.backends.cuda.driver import Argument
from hetrun.backends.cuda.programs import FOLDER, Source
from tests.cuda.emulated import real

INCLUDE = Path(__file__).parent / "include"
KEPT = Path(__file__).parents[3] / ".emulator_cache"
KERNEL = re.compile(r'extern "C" __global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(')
OPTIONS = (
    "-std=c++17",
    "-Og",  # with the checks for alignment -O1 takes twice as long to build
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fsanitize=alignment",  # a GPU stops there
)


def has_compiler() -> bool:
    """Whether kernels can be built here."""
    return shutil.which("g++") is not None


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="the emulator needs g++")


_ONE_AT_A_TIME = threading.Lock()  # fibers take turns on one thread


class EmulationError(AssertionError):
    """A kernel did what no kernel may."""


def names(text: str) -> list[str]:
    """The kernels of a source: those that it writes out, and those that a macro makes (`// kernels: a b`)."""
    listed = [name for line in re.findall(r"^// kernels: (.*)$", text, re.MULTILINE) for name in line.split()]
    return list(dict.fromkeys([*KERNEL.findall(text), *listed]))


@cache
def library(path: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    """A source, built for this machine; kept by what it is made of."""
    text = path.read_text()
    digest = _digest(text, *options, _machine())
    made = KEPT / f"{path.stem}-{digest}.so"
    _once(made, lambda target: _build(path, text, options, target))
    return ctypes.CDLL(str(made))


def _digest(*facts: str) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@cache
def _machine() -> str:
    """What every source is built with: headers, the compiler, and what this CPU can do."""
    headers = [p.read_text() for p in sorted([*INCLUDE.iterdir(), *FOLDER.glob("*.cuh")])]
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0] if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in cpu.splitlines() if line.startswith(("flags", "Features"))), "")
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return _digest(*headers, *OPTIONS, flags, version)


def _once(made: Path, build: Callable[[Path], object]) -> None:
    """Have a file built where it is not there yet; another process that wants it too waits for it."""
    if made.exists():
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    with _locked(made.with_suffix(".lock")):
        if made.exists():
            return
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            target = Path(folder, made.name)
            build(target)
            os.replace(target, made)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with a process that dies; its file stays, so that all mean the same one."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _header() -> Path:
    """The emulator's header, beside what g++ makes of it, so that no source has it read again."""
    header = KEPT / f"emulator-{_machine()}" / "emulator.h"
    _once(header, lambda target: shutil.copy(INCLUDE / "emulator.h", target))
    _once(
        header.with_name("emulator.h.gch"),
        lambda target: _compile("emulator.h", "-x", "c++-header", str(header), "-o", str(target)),
    )
    return header


def _build(path: Path, text: str, options: Sequence[str], target: Path) -> None:
    source = target.with_name("kernels.cpp")
    source.write_text(_entries(path, text))
    include = ("-include", str(_header()), f"-I{INCLUDE}", f"-I{FOLDER}")
    what = f"{path.name} {' '.join(options)}"
    _compile(what, "-shared", *include, *options, str(source), "-o", str(target))


def _compile(what: str, *arguments: str) -> None:
    done = subprocess.run(["g++", *OPTIONS, "-w", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{what} is not C++:\n{done.stderr[:4000]}")


def _entries(path: Path, text: str) -> str:
    """The source, and a way to start each of its kernels."""
    entries = [
        f'extern "C" int run_{name}(const unsigned *grid, unsigned threads, unsigned shared, '
        "const char *kinds, void **arguments, unsigned seed, char *error, int room) { "
        f"return !emulated::takes(::{name}, kinds, error, room) || emulated::run("
        f"emulated::bound(::{name}, arguments), grid, threads, shared, seed, error, room); }}"
        for name in names(text)
    ]
    return "\n".join([f'#include "{path}"', *entries])


def start(
    made: ctypes.CDLL,
    name: str,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    arguments: Sequence[Argument],
    seed: int,
) -> None:
    """Run a kernel; EmulationError where it does what no kernel may."""
    pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
    kinds = "".join(f"{_kind(a)}{ctypes.sizeof(a)} " for a in arguments).encode()
    error = ctypes.create_string_buffer(512)
    blocks, entry = (ctypes.c_uint * 3)(*grid), getattr(made, f"run_{name}")
    with _ONE_AT_A_TIME:
        failed = entry(blocks, threads, shared, kinds, pointers, seed, error, len(error))
    if failed:
        raise EmulationError(f"{name}: {error.value.decode()}")


def _kind(argument: Argument) -> str:
    """As the emulator calls a parameter that takes it."""
    match argument:
        case ctypes.c_void_p():
            return "p"
        case ctypes.c_float():
            return "f"
        case ctypes.Structure():
            return "s"
    return "i"


def run(
    source: Source | Path,
    name: str,
    grid: tuple[int, ...],
    threads: int,
    *arguments: Argument | np.ndarray | int | float,
    shared: int = 0,
    seed: int = 1,
) -> None:
    """Run a kernel on arrays, which it changes; ints are int, floats are float."""
    x, y, z = (*grid, 1, 1)[:3]
    given = [_argument(a) for a in arguments]
    if isinstance(source, Source) and real.on_gpu():
        real.start(source, name, (x, y, z), threads, shared, given)
        return
    path, options = (source, ()) if isinstance(source, Path) else (source.path, tuple(source.options))
    start(library(path, options), name, (x, y, z), threads, shared, given, seed)


def _argument(value: Argument | np.ndarray | int | float) -> Argument:
    match value:
        case np.ndarray():
            assert value.flags.c_contiguous
            return ctypes.c_void_p(value.ctypes.data)
        case bool() | int() | np.integer():
            return ctypes.c_int(int(value))
        case float() | np.floating():
            return ctypes.c_float(float(value))
    return value
