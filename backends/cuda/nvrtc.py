"""NVIDIA's compiler at run time, through ctypes: CUDA sources to programs. It needs no GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from hetrun.errors import BackendUnavailable

INSTALL = (
    "pip install cupy-cuda13x cuda-pathfinder nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt "
    "nvidia-cublas"
)
OLDEST = (12, 0)
# What sources include: a folder with the first but without the second is common, as they are two packages.
HEADERS = "cuda_fp16.h", "crt/mma.h"
SYSTEM = "/usr/local/cuda"


class Compiler:
    """NVRTC, and where the headers lie that sources include."""

    def __init__(self) -> None:
        """BackendUnavailable where something is missing, with the line that mends it."""
        self._library = _library()
        self._headers = _headers()
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = major.value, minor.value
        if self.version < OLDEST:
            raise BackendUnavailable(f"NVRTC {major.value}.{minor.value} is older than CUDA 12: {INSTALL}")

    def compile(self, name: str, text: str, folder: Path, options: Sequence[str]) -> tuple[bytes, str]:
        """A source as a program for one kind of GPU, and what the compiler said of it."""
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            folders = [f"-I{each}" for each in (folder, *self._headers)]
            given = [*folders, "--std=c++17", "-default-device", *options]
            array = (c_char_p * len(given))(*[option.encode() for option in given])
            failed = self._library.nvrtcCompileProgram(program, len(given), array)
            said = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if failed:
                raise BackendUnavailable(f"NVRTC cannot compile {name} ({' '.join(options)}):\n{said}")
            return self._bytes(program, "CUBIN"), said
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _bytes(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if failed := getattr(self._library, name)(*arguments):
            said = self._library.nvrtcGetErrorString(failed)
            raise BackendUnavailable(f"{name} failed: {said.decode(errors='replace')}")


@cache
def compiler() -> Compiler:
    """The one that is installed."""
    return Compiler()


def installed(name: str, missing: str) -> ctypes.CDLL:
    """A library of NVIDIA's, wherever it is installed; `missing` is said where it is not."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as e:
        raise BackendUnavailable(f"the package cuda-pathfinder is missing: {INSTALL}") from e
    try:
        path = load_nvidia_dynamic_lib(name).abs_path
    except (DynamicLibNotFoundError, RuntimeError) as e:
        raise BackendUnavailable(f"{missing}, or {INSTALL}") from e
    if path is None:
        raise BackendUnavailable(f"the library {name} was not found: {INSTALL}")
    return ctypes.CDLL(path)


def _library() -> ctypes.CDLL:
    missing = "NVRTC, CUDA's compiler, is not installed: pip install nvidia-cuda-nvrtc"
    library = installed("nvrtc", missing)
    library.nvrtcGetErrorString.restype = c_char_p
    library.nvrtcCreateProgram.argtypes = (
        *(POINTER(c_void_p), c_char_p, c_char_p, c_int),
        *(POINTER(c_char_p), POINTER(c_char_p)),
    )
    library.nvrtcCompileProgram.argtypes = (c_void_p, c_int, POINTER(c_char_p))
    return library


def _headers() -> tuple[Path, ...]:
    """Folders that hold every header together; BackendUnavailable names what none has."""
    return chosen_folders(_folders_of_headers())


def chosen_folders(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Of these, in order, those that have a header which none before them has."""
    missing, found = set(HEADERS), list[Path]()
    for folder in folders:
        if there := {name for name in missing if (folder / name).is_file()}:
            missing -= there
            found.append(folder)
    if missing:
        raise BackendUnavailable(
            f"CUDA's headers ({', '.join(sorted(missing))}) are not installed: "
            f"pip install nvidia-cuda-runtime nvidia-cuda-crt, or {INSTALL}"
        )
    return tuple(found)


def _folders_of_headers() -> Iterator[Path]:
    """Where packages and NVIDIA's installer put them."""
    from cuda.pathfinder import find_nvidia_header_directory

    if found := find_nvidia_header_directory("cudart"):
        yield Path(found)
    for entry in sys.path:  # packages that were unpacked, not installed, are there as well
        yield from sorted(Path(entry or ".").glob("nvidia/*/include"))
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), SYSTEM):
        if root:
            yield Path(root) / "include"
