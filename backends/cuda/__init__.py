"""GPUs of NVIDIA, through CuPy: kernels of our own for quantised weights, cuBLAS for many tokens.

It has to be named: it has run on one kind of GPU so far (ADR 0053), and on the emulator of the tests.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from contextlib import suppress
from functools import cache, partial

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable
from hetrun.backends.cuda import nvrtc
from hetrun.errors import BackendUnavailable
from hetrun.system.native_library import load_library

DRIVER = "libcuda.so.1"
FILES = "/dev"  # where there is one for each GPU: nvidia0, nvidia1
OLDEST = (8, 0)  # compute capability: bf16 on tensor cores
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def probe(number: int = 0) -> Probe:
    """Whether there is such a GPU, and kernels can be compiled for it; CuPy itself stays unloaded."""
    try:
        driver = load_library(DRIVER)
    except OSError:
        return Unavailable(
            f"there is no NVIDIA driver ({DRIVER}): if there is an NVIDIA GPU, install its driver"
        )
    if status := driver.cuInit(0):
        return Unavailable(f"the NVIDIA driver does not start (cuInit says {status}): is there a GPU?")
    version, installed = nvrtc.driver_version(driver), importlib.util.find_spec("cupy") is not None
    if why := nvrtc.too_old(version, installed):
        return Unavailable(why)
    if not installed:
        return Unavailable(f"CuPy is not installed: {nvrtc.install(nvrtc.for_driver(version))}")
    return _found(driver, number)


def _found(driver: ctypes.CDLL, number: int) -> Probe:
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Unavailable("the NVIDIA driver finds no GPU; CUDA_VISIBLE_DEVICES may hide it")
    if number >= count.value:
        return Unavailable(
            f"the NVIDIA driver finds no GPU {number}, only {count.value}; CUDA_VISIBLE_DEVICES may hide it"
        )
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    found, capability = name.value.decode(errors="replace"), _capability(driver, number)
    if capability < OLDEST:
        return Unavailable(
            f"{found} has compute capability {capability[0]}.{capability[1]}, but at least 8.0 is needed"
        )
    return Available(f"{found}, compute capability {capability[0]}.{capability[1]}")


def _capability(driver: ctypes.CDLL, number: int) -> tuple[int, int]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), number)
    for value, attribute in ((major, MAJOR), (minor, MINOR)):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return major.value, minor.value


def examine(number: int = 0) -> Probe:
    """`probe`, and whether all libraries and headers are there: two programs are compiled for this GPU."""
    found = probe(number)
    if isinstance(found, Unavailable):
        return found
    from hetrun.backends.cuda.cublas import library
    from hetrun.backends.cuda.nvrtc import compiler
    from hetrun.backends.cuda.programs import FOLDER, Source

    capability = _capability(load_library(DRIVER), number)
    sources = Source("attention", (("KV", "F16"), ("HEAD", "128"))), Source("tiles", (("QUANT", "Q4_K"),))
    try:
        library()
        for source in sources:
            options = [compiler().architecture(capability), *source.options]
            compiler().compile(source.path.name, source.path.read_text(), FOLDER, options)
    except BackendUnavailable as e:
        return Unavailable(f"{found.detail}: {e}")
    return Available(f"{found.detail}; its kernels compile")


def create(number: int = 0) -> Backend:
    """A GPU."""
    from hetrun.backends.cuda.backend import CudaBackend
    from hetrun.backends.cuda.driver import Driver
    from hetrun.backends.cuda.gpu import Gpu
    from hetrun.backends.cuda.kernel_cache import HasPrograms
    from hetrun.backends.cuda.programs import Programs

    def open_() -> tuple[Driver, HasPrograms]:
        from hetrun.backends.cuda.cupy_driver import CupyDriver

        driver = CupyDriver(number)
        return driver, Programs(driver.device.capability)

    return CudaBackend(name_of(number), Gpu(open_))


def name_of(number: int) -> str:
    """cuda, cuda-1, cuda-2."""
    return f"cuda-{number}" if number else "cuda"


@cache
def descriptors() -> tuple[Descriptor, ...]:
    """One for each GPU that there seems to be, and at least one, whose probe says what is missing.

    The driver is not asked before one of them is needed. It may know of fewer.
    """
    files: list[str] = []
    with suppress(OSError):
        files = [name for name in os.listdir(FILES) if name.removeprefix("nvidia").isdecimal()]
    return tuple(
        Descriptor(
            name=name_of(number),
            probe=partial(probe, number),
            create=partial(create, number),
            summary="an NVIDIA GPU through CuPy: weights stay quantised as in the file, "
            "cuBLAS for many tokens",
            preference=95,
            own_memory=True,
            by_name=True,
            examine=partial(examine, number),
        )
        for number in range(max(1, len(files)))
    )
