"""The switch: with TESTS_ON_GPU=1 the same tests run on the GPU of this machine, not on the emulator.

Tests that look into the emulated driver, or that want a kernel to do what no kernel may, stay there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from hetrun.backends.cuda.driver import Argument, Driver, Launch
from hetrun.backends.cuda.programs import Programs, Source

SWITCH = "TESTS_ON_GPU"
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
    return Programs(driver().device.capability, Path(tempfile.gettempdir(), "hetrun-gpu-kernels"))


@cache
def sees_arrays() -> bool:
    """Whether kernels may be given the addresses of numpy's arrays, as tests do."""
    from cupy_backends.cuda.api import runtime

    return bool(runtime.deviceGetAttribute(PAGEABLE, 0))


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
    if not sees_arrays():
        pytest.skip("this GPU does not see the host's arrays; the whole backend is tested there")
    stream, done = gpu.stream(), gpu.event()
    kernel = gpu.kernel(gpu.load(programs().program(source)), name, shared)
    gpu.launch(Launch(kernel, grid, threads, shared, arguments), stream)
    gpu.record(done, stream)
    gpu.synchronize(done)
    gpu.drop(done)
