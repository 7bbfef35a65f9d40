"""The switch: with TESTS_ON_GPU=1 the same tests run on the GPU of this machine, not on the emulator.

Tests that look into the emulated driver, or that want a kernel to do what no kernel may, stay there.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.driver import Argument, Driver, Launch
from hetrun.backends.cuda.gpu import Gpu
from hetrun.backends.cuda.programs import Programs, Source

SWITCH = "TESTS_ON_GPU"
GRANT = 512 << 20
KERNELS = Path(tempfile.gettempdir(), "hetrun-gpu-kernels")
WORDS = 2  # of what an argument points to, among which a table of slabs and a part of a pass have an address
PAGEABLE = 88  # cudaDevAttrPageableMemoryAccess: kernels read and write what numpy has


def on_gpu() -> bool:
    """Whether the switch is on."""
    return os.environ.get(SWITCH) == "1"


@cache
def driver() -> Driver:
    """The GPU."""
    from hetrun.backends.cuda.cupy_driver import CupyDriver

    return CupyDriver(0)


@cache
def programs() -> Programs:
    """Compiled kernels outlive a test's home."""
    return Programs(driver().device.capability, KERNELS)


def backend(name: str, grant: int | None = None) -> CudaBackend:
    """A backend on the GPU that takes little of it, as several processes share it: so much besides what CUDA
    and cuBLAS take."""
    made = CudaBackend(name, Gpu(lambda: (driver(), programs())))
    made.grant(
        made.gpu.least + GRANT if grant is None else driver().held_memory() + driver().workspace + grant
    )
    return made


@cache
def sees_arrays() -> bool:
    """Whether kernels may be given the addresses of any memory of the host."""
    from cupy_backends.cuda.api import runtime

    return bool(runtime.deviceGetAttribute(PAGEABLE, 0))


@contextmanager
def seen(arguments: Sequence[Argument]) -> Iterator[None]:
    """Where kernels do not see the host's memory by themselves, they see what is page-locked: here all that
    lies around the addresses which they are given."""
    if sees_arrays():
        yield
        return
    from cupy_backends.cuda.api import runtime

    locked = _around(_addresses(arguments))
    for begin, end in locked:
        runtime.hostRegister(begin, end - begin, 0)
    try:
        yield
    finally:
        for begin, _ in locked:
            with suppress(
                runtime.CUDARuntimeError
            ):  # after an error of the kernel, which is the one to hear of
                runtime.hostUnregister(begin)


def _addresses(arguments: Sequence[Argument]) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, ctypes.c_void_p):
            yield argument.value or 0
        elif isinstance(argument, ctypes.Structure):
            for name, kind, *_ in argument._fields_:
                if kind is ctypes.c_void_p:
                    yield getattr(argument, name) or 0


def _around(addresses: Iterable[int]) -> Sequence[tuple[int, int]]:
    """Beginnings and ends of the process's memory that has these addresses, or whose address stands there."""
    maps = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    mappings = list[tuple[int, int]]()
    for begin, end in (_ends(ends) for ends, rights in maps if rights.startswith("rw")):
        if mappings and mappings[-1][1] == begin:  # an array may be in both
            mappings[-1] = mappings[-1][0], end
        else:
            mappings.append((begin, end))

    def mapping(address: int) -> tuple[int, int] | None:
        return next((each for each in mappings if each[0] <= address < each[1]), None)

    found = dict[tuple[int, int], None]()
    for address in addresses:
        if (here := mapping(address)) is None:
            continue
        found[here] = None
        for at in range(address, min(address + 8 * WORDS, here[1] - 7), 8):
            if there := mapping(ctypes.c_uint64.from_address(at).value):
                found[there] = None
    return list(found)


def _ends(text: str) -> tuple[int, int]:
    begin, end = text.split("-")
    return int(begin, 16), int(end, 16)


def start(
    source: Source,
    name: str,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    arguments: Sequence[Argument],
) -> None:
    """Run a kernel on arrays of the host."""
    gpu = driver()
    stream, done = gpu.stream(), gpu.event()
    kernel = gpu.kernel(gpu.load(programs().program(source)), name, shared)
    with seen(arguments):
        gpu.launch(Launch(kernel, grid, threads, shared, arguments), stream)
        gpu.record(done, stream)
        gpu.synchronize(done)
    gpu.drop(done)
