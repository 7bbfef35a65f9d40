"""NVIDIA's compiler at run time, through ctypes: CUDA sources to programs. It needs no GPU.

It also knows which CUDA the driver can run, and which one the installed packages are made for.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hetrun.errors import BackendUnavailable
from hetrun.system.native_library import NONE, Prototypes, load_library

# By the major version of CUDA: the driver that it needs, CuPy's package, and all packages with that one.
DRIVERS = {13: 580, 12: 525}
CUPY = {13: "cupy-cuda13x", 12: "cupy-cuda12x"}
PACKAGES = {
    13: f"{CUPY[13]} cuda-pathfinder nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cublas",
    12: f"{CUPY[12]} cuda-pathfinder nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cublas-cu12",
}
NEWEST, LEAST = 13, 12
HEADERS = "cuda_fp16.h", "cuda_bf16.h"  # that sources include
ARCHITECTURE = "--gpu-architecture"
# The end of the name of a library that another one loads by name, so it has to be there before that.
BESIDE = {"nvrtc": "-builtins", "cublas": "Lt"}
SYSTEM = "/usr/local/cuda"
_STRINGS = POINTER(c_char_p)
FUNCTIONS: Prototypes = {
    "nvrtcGetErrorString": (c_char_p, c_int),
    "nvrtcCreateProgram": (c_int, POINTER(c_void_p), c_char_p, c_char_p, c_int, _STRINGS, _STRINGS),
    "nvrtcCompileProgram": (c_int, c_void_p, c_int, _STRINGS),
}


class Compiler:
    """NVRTC, and where the headers lie that sources include."""

    def __init__(self) -> None:
        """BackendUnavailable where something is missing, with the line that mends it."""
        self._library = _library()
        self._headers = chosen_folder(folders_of_headers())
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = major.value, minor.value
        if self.version < (LEAST, 0):
            raise BackendUnavailable(
                f"NVRTC {major.value}.{minor.value} is older than CUDA {LEAST}: {install()}"
            )

    def compile(self, name: str, text: str, folder: Path, options: Sequence[str]) -> tuple[bytes, str]:
        """A source as a program for one kind of GPU, and what the compiler said of it."""
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            folders = [f"-I{each}" for each in (folder, self._headers)]
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


def installed(name: str, missing: str, prototypes: Prototypes = NONE) -> ctypes.CDLL:
    """A library of NVIDIA's, wherever it is installed; `missing` is said where it is not.

    cuda-pathfinder knows most places, but of Python's path only the folders of installed packages."""
    for path in _libraries(name):
        with suppress(OSError):
            for beside in sorted(path.parent.glob(f"lib{name}{BESIDE[name]}.so.{made_for()}*")):
                load_library(beside)
            return load_library(path, prototypes)
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as e:
        raise BackendUnavailable(f"the package cuda-pathfinder is missing: {install()}") from e
    try:
        path = load_nvidia_dynamic_lib(name).abs_path
    except (DynamicLibNotFoundError, RuntimeError) as e:
        raise BackendUnavailable(f"{missing}, or {install()}") from e
    if path is None:
        raise BackendUnavailable(f"the library {name} was not found: {install()}")
    return load_library(path, prototypes)


def _libraries(name: str) -> Iterator[Path]:
    """Files of a library in packages on Python's path, for the version of CUDA that CuPy is made for."""
    for entry in sys.path:
        yield from sorted(Path(entry or ".").glob(f"nvidia/*/lib/lib{name}.so.{made_for()}"))


def _library() -> ctypes.CDLL:
    missing = "NVRTC, CUDA's compiler, is not installed: pip install nvidia-cuda-nvrtc"
    return installed("nvrtc", missing, FUNCTIONS)


def chosen_folder(folders: Iterable[Path]) -> Path:
    """The first of these with all headers; BackendUnavailable if none has them."""
    for folder in folders:
        if all((folder / name).is_file() for name in HEADERS):
            return folder
    raise BackendUnavailable(
        f"CUDA's headers ({', '.join(HEADERS)}) are not installed: pip install nvidia-cuda-runtime, "
        f"or {install()}"
    )


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


# --- which CUDA there is


@cache
def made_for() -> int:
    """The major version of CUDA that the installed CuPy is made for; the newest where none says so."""
    for major, package in CUPY.items():
        with suppress(PackageNotFoundError):
            distribution(package)
            return major
    return NEWEST


def install(major: int = NEWEST) -> str:
    """The line that installs what is missing."""
    return f"pip install {PACKAGES[major]}"


def driver_version(driver: ctypes.CDLL) -> tuple[int, int]:
    """The newest CUDA that a driver can run; (0, 0) where it does not say."""
    found = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(found)):
        return 0, 0
    return found.value // 1000, found.value % 1000 // 10


def for_driver(version: tuple[int, int]) -> int:
    """The major version whose packages suit a driver."""
    return next((major for major in CUPY if version >= (major, 0)), LEAST)


def too_old(version: tuple[int, int], installed: bool) -> str:
    """Why a driver cannot run what is installed, and what to do; empty if it can, or does not say."""
    if version == (0, 0):
        return ""
    can = f"the NVIDIA driver can run CUDA {version[0]}.{version[1]} at most"
    if version < (LEAST, 0):
        return f"{can}, and at least CUDA {LEAST} is needed: install driver {DRIVERS[LEAST]} or newer"
    major = made_for()
    if not installed or version >= (major, 0):
        return ""
    return (
        f"{can}, and {CUPY[major]} needs CUDA {major}: install driver {DRIVERS[major]} or newer, or "
        f"pip uninstall {CUPY[major]}, then {install(for_driver(version))}"
    )
