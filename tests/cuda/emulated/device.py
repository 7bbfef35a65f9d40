"""The CUDA backend on a GPU that is not there."""

from __future__ import annotations

from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.gpu import Gpu
from tests.cuda.emulated import real
from tests.cuda.emulated.driver import EmulatedDriver, EmulatedPrograms

NAME = "cuda on a CPU"


def emulated(driver: EmulatedDriver | None = None, grant: int | None = None, name: str = NAME) -> CudaBackend:
    """A backend; its driver is `backend.gpu.memory.driver` once it has started.

    Where tests are to run on a GPU it is that one, unless a test has a driver of its own to look into.
    """
    if driver is None and real.on_gpu():
        return real.backend(name, grant)
    made = driver or EmulatedDriver()
    backend = CudaBackend(name, Gpu(lambda: (made, EmulatedPrograms())))
    if grant is not None:
        backend.grant(grant)
    return backend
