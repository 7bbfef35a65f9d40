"""CUDA as CuPy binds it, without a GPU: it keeps books, and refuses what CUDA refuses."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from types import ModuleType

import numpy as np
import pytest

CONTEXT = 300 << 20  # bytes that CUDA takes when the first call needs it
MEMORY, INVALID, OUT, INVALIDATED = 1 << 30, 1, 2, 901
ADDRESS = 700  # an illegal memory access
LIGHT = frozenset(("getDeviceCount", "getDeviceProperties", "deviceGetPCIBusId"))
DRIVER = "hetrun.backends.cuda.cupy_driver"


class CudaError(RuntimeError):
    """As CuPy has them."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeCuda:
    """One GPU of 1 GiB; `fails` has the status that a call is answered with."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.broken = 0  # the status of every call, from now on
        self.context = False
        self.held: dict[str, set[int]] = {
            kind: set()
            for kind in ("memory", "pinned", "streams", "events", "graphs", "recorded", "programs")
        }
        self.sizes: dict[int, int] = {}
        self.flags: dict[int, int] = {}  # of events
        self.recording = self.spoilt = False
        self.calls: list[str] = []
        self.arrays: dict[int, np.ndarray] = {}
        self._numbers = count(1 << 20, 4096)

    @property
    def free_bytes(self) -> int:
        """As the management library sees it: it needs no context."""
        return MEMORY - CONTEXT * self.context - sum(self.sizes.values())

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name not in LIGHT:
            self.context = True
        if status := self.broken or self.fails.get(name, 0):
            raise CudaError(status)

    def make(self, kind: str) -> int:
        number = next(self._numbers)
        self.held[kind].add(number)
        return number

    def runtime(self) -> ModuleType:
        """`cupy_backends.cuda.api.runtime`."""
        made = ModuleType("cupy_backends.cuda.api.runtime")
        constants = {
            **{
                "hostAllocDefault": 0,
                "streamNonBlocking": 1,
                "eventDisableTiming": 2,
                "eventBlockingSync": 1,
            },
            **{"memcpyDefault": 4, "streamCaptureModeThreadLocal": 1, "CUDARuntimeError": CudaError},
        }
        for name, value in constants.items():
            setattr(made, name, value)
        for name in RUNTIME:
            setattr(made, name, self._call(name))
        return made

    def driver(self) -> ModuleType:
        """`cupy_backends.cuda.api.driver`."""
        made = ModuleType("cupy_backends.cuda.api.driver")
        made.CUDADriverError = CudaError  # type: ignore[attr-defined]
        for name in ("moduleLoadData", "moduleUnload"):
            setattr(made, name, self._call(name))
        return made

    def _call(self, name: str) -> object:
        work = getattr(self, f"_{name}", lambda *arguments: None)

        def call(*arguments: int) -> object:
            self.called(name)
            return work(*arguments)

        return call

    # --- what calls do

    def _getDeviceCount(self) -> int:
        return 1

    def _getDeviceProperties(self, number: int) -> dict[str, object]:
        sizes = {"totalGlobalMem": MEMORY, "sharedMemPerBlockOptin": 99 << 10, "asyncEngineCount": 1}
        return {"name": b"A fake", "major": 8, "minor": 6, "multiProcessorCount": 28, **sizes}

    def _deviceGetPCIBusId(self, number: int) -> str:
        return "0000:01:00.0"

    def _memGetInfo(self) -> tuple[int, int]:
        return self.free_bytes, MEMORY

    def _malloc(self, size: int) -> int:
        if size > self.free_bytes:
            raise CudaError(OUT)
        number = self.make("memory")
        self.sizes[number] = size
        return number

    def _free(self, address: int) -> None:
        if address:
            self.held["memory"].remove(address)
            del self.sizes[address]

    def _hostAlloc(self, size: int, flags: int) -> int:
        array = np.zeros(size, np.uint8)
        address = int(array.ctypes.data)
        self.arrays[address] = array
        self.held["pinned"].add(address)
        return address

    def _freeHost(self, address: int) -> None:
        self.spoilt = self.spoilt or self.recording
        self.held["pinned"].remove(address)

    def _hostRegister(self, address: int, size: int, flags: int) -> None:
        ctypes.memset(address, 0, size)  # there is memory
        self.held["pinned"].add(address)

    def _hostUnregister(self, address: int) -> None:
        self.spoilt = self.spoilt or self.recording
        self.held["pinned"].remove(address)

    def _streamCreateWithFlags(self, flags: int) -> int:
        return self.make("streams")

    def _streamDestroy(self, stream: int) -> None:
        self.held["streams"].remove(stream)

    def _eventCreateWithFlags(self, flags: int) -> int:
        number = self.make("events")
        self.flags[number] = flags
        return number

    def _eventDestroy(self, event: int) -> None:
        self.held["events"].remove(event)

    def _eventElapsedTime(self, start: int, end: int) -> float:
        assert not self.flags[start] | self.flags[end], "events that do not tell the time"
        return 0.5

    def _streamBeginCapture(self, stream: int, mode: int) -> None:
        if self.recording:
            raise CudaError(INVALIDATED)
        self.recording = True

    def _streamEndCapture(self, stream: int) -> int:
        spoilt, self.recording, self.spoilt = self.spoilt, False, False
        if spoilt:
            raise CudaError(INVALIDATED)
        return self.make("recorded")

    def _graphInstantiate(self, graph: int) -> int:
        return self.make("graphs")

    def _graphDestroy(self, graph: int) -> None:
        self.held["recorded"].remove(graph)

    def _graphExecDestroy(self, graph: int) -> None:
        self.held["graphs"].remove(graph)

    def _moduleLoadData(self, program: bytes) -> int:
        return self.make("programs")

    def _moduleUnload(self, program: int) -> None:
        self.held["programs"].remove(program)


# All that `cupy_driver.py` calls of the runtime. `test_cupy_driver.py` looks for them in CuPy where it is.
RUNTIME = (
    *("getDeviceCount", "getDeviceProperties", "deviceGetPCIBusId", "setDevice", "deviceSynchronize"),
    *("malloc", "free", "memGetInfo", "hostAlloc", "freeHost", "memcpyAsync", "memsetAsync"),
    *("hostRegister", "hostUnregister"),
    *("streamCreateWithFlags", "streamDestroy", "streamWaitEvent", "streamBeginCapture", "streamEndCapture"),
    *("eventCreateWithFlags", "eventDestroy", "eventRecord", "eventSynchronize", "eventQuery"),
    "eventElapsedTime",
    *("graphInstantiate", "graphDestroy", "graphLaunch", "graphExecDestroy"),
)


@contextmanager
def under_cupy_driver(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the real driver, over this CUDA."""
    api = "cupy_backends.cuda.api"
    with monkeypatch.context() as m:
        for name in ("cupy_backends", "cupy_backends.cuda", api):
            m.setitem(sys.modules, name, ModuleType(name))
        for name, made in (("runtime", fake.runtime()), ("driver", fake.driver())):
            m.setitem(sys.modules, f"{api}.{name}", made)
            m.setattr(sys.modules[api], name, made, raising=False)
        known = sys.modules.pop(DRIVER, None)
        try:
            module = import_module(DRIVER)
            m.setattr(module, "free_bytes", lambda bus: fake.free_bytes)
            yield module
        finally:
            sys.modules.pop(DRIVER, None)
            if known:
                sys.modules[DRIVER] = known
