"""Which CUDA there is: what the driver can do, and what the installed packages are made for."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

# By the major version of CUDA: the driver that it needs, CuPy's package, and all packages with that one.
DRIVERS = {13: 580, 12: 525}
CUPY = {13: "cupy-cuda13x", 12: "cupy-cuda12x"}
PACKAGES = {
    13: f"{CUPY[13]} cuda-pathfinder nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cublas",
    12: f"{CUPY[12]} cuda-pathfinder nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12 "
    "nvidia-cublas-cu12",
}
NEWEST, OLDEST = 13, 12


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
    return next((major for major in CUPY if version >= (major, 0)), OLDEST)


def too_old(version: tuple[int, int], installed: bool) -> str:
    """Why a driver cannot run what is installed, and what to do; empty if it can, or does not say."""
    if version == (0, 0):
        return ""
    can = f"the NVIDIA driver can run CUDA {version[0]}.{version[1]} at most"
    if version < (OLDEST, 0):
        return f"{can}, and at least CUDA {OLDEST} is needed: install driver {DRIVERS[OLDEST]} or newer"
    major = made_for()
    if not installed or version >= (major, 0):
        return ""
    return (
        f"{can}, and {CUPY[major]} needs CUDA {major}: install driver {DRIVERS[major]} or newer, or "
        f"pip uninstall {CUPY[major]}, then {install(for_driver(version))}"
    )
