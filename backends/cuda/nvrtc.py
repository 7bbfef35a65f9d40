"""NVIDIA's compiler at run time, through ctypes: CUDA sources to programs. It needs no GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from hetrun.backends.cuda.versions import NEWEST, install, made_for
from hetrun.errors import BackendUnavailable

INSTALL = install()
OLDEST = (12, 0)
# What sources include: a folder with the first but without the second is common, as they are two packages.
HEADERS = "cuda_fp16.h", "crt/mma.h"
ARCHITECTURE = "--gpu-architecture"
# The end of the name of a library that another one loads by name, so it has to be there before that.
BESIDE = {"nvrtc": "-builtins", "cublas": "Lt"}
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
            is_ptx = any(option.startswith(f"{ARCHITECTURE}=compute_") for option in options)
            failed = self._library.nvrtcCompileProgram(program, len(given), array)
            said = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if failed:
                raise BackendUnavailable(f"NVRTC cannot compile {name} ({' '.join(options)}):\n{said}")
            return self._bytes(program, "PTX" if is_ptx else "CUBIN"), said
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def architecture(self, capability: tuple[int, int]) -> str:
        """The option that makes programs for a GPU. One that is newer than the compiler gets those of the
        nearest older one: as they are if their generation is the same, else as PTX, which its driver
        translates."""
        major, minor = capability
        wanted, known = 10 * major + minor, self._architectures()
        older = [each for each in known if each <= wanted]
        if not known or wanted in known or not older:
            return f"{ARCHITECTURE}=sm_{wanted}"
        kind = "sm" if older[-1] // 10 == major else "compute"
        return f"{ARCHITECTURE}={kind}_{older[-1]}"

    def _architectures(self) -> list[int]:
        """Those that it knows, ascending."""
        n = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(n))
        found = (c_int * n.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

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
    """A library of NVIDIA's, wherever it is installed; `missing` is said where it is not.

    cuda-pathfinder knows most places, but of Python's path only the folders of installed packages."""
    for path in _libraries(name):
        with suppress(OSError):
            for beside in sorted(path.parent.glob(f"lib{name}{BESIDE[name]}.so.{made_for()}*")):
                ctypes.CDLL(str(beside))
            return ctypes.CDLL(str(path))
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


def _libraries(name: str) -> Iterator[Path]:
    """Files of a library in packages on Python's path, for the version of CUDA that CuPy is made for."""
    for entry in sys.path:
        yield from sorted(Path(entry or ".").glob(f"nvidia/*/lib/lib{name}.so.{made_for()}"))


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
    return chosen_folders(folders_of_headers())


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


def folders_of_headers() -> Iterator[Path]:
    """Where packages and NVIDIA's installer put them."""
    for entry in sys.path:  # packages that were unpacked, not installed, are there as well
        folders = sorted(Path(entry or ".").glob("nvidia/*/include"))
        yield from (folder for folder in folders if _suits(folder.parent.name))
    from cuda.pathfinder import find_nvidia_header_directory

    if found := find_nvidia_header_directory("cudart"):
        yield Path(found)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), SYSTEM):
        if root:
            yield Path(root) / "include"


def _suits(folder: str) -> bool:
    """Whether packages for this version of CUDA use a folder: `cu13`; before that each had its own."""
    version = folder.removeprefix("cu")
    return int(version) == made_for() if version.isdecimal() else made_for() < NEWEST
