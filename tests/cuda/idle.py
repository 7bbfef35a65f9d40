"""A GPU that takes no time: the real driver over a CUDA whose calls return at once, having done nothing. What
passes take then is our own Python and C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.gpu import Gpu
from hetrun.backends.cuda.programs import Source
from tests.cuda.fake_cuda import FakeCuda, under_cupy_driver

NOT_READY = 600  # cudaErrorNotReady
OFTEN = (
    *("eventRecord", "eventSynchronize", "eventQuery", "streamWaitEvent"),
    *("memcpyAsync", "memsetAsync", "graphLaunch", "launchKernel"),
)


def _at_once(*arguments: int) -> int:
    return 0


class IdleCuda(FakeCuda):
    """What a pass calls keeps no books, and all is done at once. If calls are `counted`, they are noted, and
    nothing has happened before the caller waits for it."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self._counted, self._end = counted, 1 << 40

    def _malloc(self, size: int) -> int:
        """Memory that nothing else lies in: the arena looks for its own by addresses."""
        self.held["memory"].add(address := self._end)
        self.sizes[address], self._end = size, address + size
        return address

    def runtime(self) -> ModuleType:
        made = super().runtime()
        for name in OFTEN:
            setattr(made, name, self._often(name))
        return made

    def driver(self) -> ModuleType:
        made = super().driver()
        for name in ("launchKernel", "funcSetAttribute"):
            setattr(made, name, self._often(name))
        made.moduleGetFunction = self._function  # type: ignore[attr-defined]
        return made

    def _often(self, name: str) -> object:
        if not self._counted:
            return _at_once

        def call(*arguments: int) -> int:
            self.called(name)
            return NOT_READY if name == "eventQuery" else 0

        return call

    def _function(self, program: int, name: str) -> int:
        return next(self._numbers)


class NoPrograms:
    """Nothing runs, so nothing is compiled."""

    def program(self, source: Source) -> bytes:
        return b""


class NoCublas:
    """The same of products."""

    def __init__(self, stream: int, workspace: int) -> None:
        pass

    def multiply(self, product: object) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def idle_backend(counted: bool = False) -> Iterator[tuple[CudaBackend, IdleCuda]]:
    """A backend over it."""
    cuda, patch = IdleCuda(counted), pytest.MonkeyPatch()
    with patch.context() as m, under_cupy_driver(cuda, patch) as module:
        m.setattr(module, "Cublas", NoCublas)
        yield CudaBackend("cuda", Gpu(lambda: (module.CupyDriver(0), NoPrograms()))), cuda
