"""A GPU through CuPy: its bindings of CUDA's runtime and driver, called with plain numbers."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_ulonglong, c_void_p
from functools import cache, partial
from typing import NoReturn

import numpy as np
from cupy_backends.cuda.api import driver as cu, runtime as rt
from numpy.typing import NDArray

from hetrun.backends.cuda.cublas import WORKSPACE, Cublas
from hetrun.backends.cuda.driver import (
    Address,
    Device,
    DeviceProduct,
    Event,
    Graph,
    Kernel,
    Launch,
    Loss,
    Stream,
)
from hetrun.errors import BackendError, BudgetError, DeviceLost
from hetrun.system.native_library import load_library
from hetrun.system.units import format_bytes

MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MANAGEMENT = "libnvidia-ml.so.1"
USUAL_SHARED = 48 << 10  # bytes that a kernel may have without asking
OUT_OF_MEMORY, NOT_READY = 2, 600  # cudaErrorMemoryAllocation, cudaErrorNotReady
ERRORS = (rt.CUDARuntimeError, cu.CUDADriverError)
NOT_LOCKED = (1, OUT_OF_MEMORY, 304)  # invalid value, no memory, an error of the system
# Errors after which each call of the process fails: uncorrectable memory, an illegal address, a timeout, a
# context that is gone, an assertion, a stack, an instruction, an address or a counter that is none, a launch.
STICKY = frozenset((214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721))
# Bytes of a GPU that CUDA takes later, as programs and cuBLAS come: counted from the beginning, so that what
# is granted is never exceeded.
LATER = 64 << 20


def device_count() -> int:
    """GPUs that there are; BackendError where the driver says it cannot work."""
    with _told("looking for GPUs"):
        return int(rt.getDeviceCount())


def properties(number: int) -> Device:
    """What a GPU is."""
    with _told(f"looking at GPU {number}"):
        p = rt.getDeviceProperties(number)
    name = p["name"].decode(errors="replace")
    return Device(
        name=name,
        capability=(p["major"], p["minor"]),
        processors=p["multiProcessorCount"],
        memory=p["totalGlobalMem"],
        engines=p["asyncEngineCount"],
        shared=p["sharedMemPerBlockOptin"],
    )


@cache
def context_bytes(number: int) -> int:
    """What CUDA itself takes of a GPU's memory: found out as it takes it, once for a process. CUDA cannot be
    asked before that; NVIDIA's management library, which comes with the driver, can."""
    before = free_bytes(rt.deviceGetPCIBusId(number))
    _work_on(number)
    rt.free(0)  # makes the context
    return max(0, (before or 0) - int(rt.memGetInfo()[0]))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


def free_bytes(bus: str) -> int | None:
    """Of the GPU at a place on the bus, by the management library; None where it does not say."""
    try:
        library = load_library(MANAGEMENT)
    except OSError:
        return None
    device, memory = c_void_p(), _Memory()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), byref(device)):
        return None
    return None if library.nvmlDeviceGetMemoryInfo(device, byref(memory)) else int(memory.free)


class PageLocked:
    """Page-locked memory of one driver. Arrays over it may die at any moment, also while a graph is recorded
    by the same thread: CUDA ends the recording if memory is given back then, so that waits."""

    def __init__(self) -> None:
        self.recording = False
        self._dead: list[int] = []
        self._registered: dict[int, mmap.mmap] = {}  # the system's own memory, by address

    def take(self, nbytes: int) -> int:
        """So much of it. Where CUDA gets none from the system, as where it may lock little at once, memory
        that is there is locked."""
        try:
            return int(rt.hostAlloc(nbytes, rt.hostAllocDefault))
        except rt.CUDARuntimeError as e:
            if e.status not in NOT_LOCKED or not (address := self._register(nbytes)):
                raise
            return address

    def _register(self, nbytes: int) -> int:
        """Memory of the system, locked; 0 where that cannot be."""
        try:
            memory = mmap.mmap(-1, nbytes)
        except OSError:
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            rt.hostRegister(address, nbytes, 0)
        except rt.CUDARuntimeError as e:
            if e.status not in NOT_LOCKED:
                raise
            return 0
        self._registered[address] = memory
        return address

    def give_back(self, address: int) -> None:
        """This memory is no longer used."""
        self._dead.append(address)
        self.tidy()

    def tidy(self) -> None:
        """Give back what has died."""
        while self._dead and not self.recording:
            address = self._dead.pop()
            memory = self._registered.pop(address, None)
            with suppress(rt.CUDARuntimeError):  # after an error that ends everything
                if memory is None:
                    rt.freeHost(address)
                else:
                    rt.hostUnregister(address)


class CupyDriver:
    """One GPU. CUDA has a current one for each thread, so every call says first which is meant."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.device = properties(number)
        self._sizes: dict[Address, int] = {}
        with _told(f"starting {self.device.name}"):
            self._context = context_bytes(number)
        self._cublas: dict[Stream, Cublas] = {}
        self._streams, self._events, self._programs = set[Stream](), set[Event](), set[int]()
        self._locked, self._loss = PageLocked(), Loss()

    def held_memory(self) -> int:
        return self._context + LATER + sum(self._sizes.values())

    def free_memory(self) -> int:
        with self._here("asking for free memory"):
            return max(0, int(rt.memGetInfo()[0]) - LATER)

    def allocate(self, nbytes: int) -> Address:
        with self._here(f"taking {format_bytes(nbytes)} of GPU memory"):
            try:
                address = int(rt.malloc(nbytes))
                self._sizes[address] = nbytes
                return address
            except rt.CUDARuntimeError as e:
                if e.status == OUT_OF_MEMORY:
                    raise MemoryError(f"{self.device.name} has no {format_bytes(nbytes)} left") from e
                raise

    def free(self, address: Address) -> None:
        del self._sizes[address]
        self._give_back("giving GPU memory back", lambda: rt.free(address))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        with self._here(f"page-locking {format_bytes(nbytes)} of memory"):
            try:
                address = self._locked.take(max(1, nbytes))
            except rt.CUDARuntimeError as e:
                if e.status not in NOT_LOCKED:
                    raise
                raise BudgetError(
                    f"{format_bytes(nbytes)} of RAM cannot be page-locked for {self.device.name} ({e}): "
                    "the system has no more for it. Containers and WSL2 may allow less than there is RAM"
                ) from e
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        # The end of the process gives it back anyway, maybe after CUDA has ended.
        weakref.finalize(held, self._locked.give_back, address).atexit = False
        return np.ctypeslib.as_array(held)

    def stream(self) -> Stream:
        with self._here("making a stream"):
            made = int(rt.streamCreateWithFlags(rt.streamNonBlocking))
        self._streams.add(made)
        return made

    def event(self, sleeps: bool = False) -> Event:
        with self._here("making an event"):
            flags = rt.eventDisableTiming | (rt.eventBlockingSync if sleeps else 0)
            made = int(rt.eventCreateWithFlags(flags))
        self._events.add(made)
        return made

    def drop(self, event: Event) -> None:
        self._events.discard(event)
        self._give_back("giving an event back", lambda: rt.eventDestroy(event))

    def record(self, event: Event, stream: Stream) -> None:
        self._select()
        try:
            rt.eventRecord(event, stream)
        except ERRORS as e:
            self._fail("recording an event", e)

    def wait(self, stream: Stream, event: Event) -> None:
        self._select()
        try:
            rt.streamWaitEvent(stream, event)
        except ERRORS as e:
            self._fail("waiting for an event", e)

    def synchronize(self, event: Event) -> None:
        self._select()
        try:
            rt.eventSynchronize(event)
        except ERRORS as e:
            self._fail("computing", e)

    def happened(self, event: Event) -> bool:
        self._select()
        try:
            status = int(rt.eventQuery(event))
            if status not in (0, NOT_READY):
                raise rt.CUDARuntimeError(status)
        except ERRORS as e:
            self._fail("computing", e)
        return status == 0

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._select()
        try:
            rt.memcpyAsync(target, source, nbytes, rt.memcpyDefault, stream)
        except ERRORS as e:
            self._fail("copying", e)

    def fill(self, target: Address, byte: int, nbytes: int, stream: Stream) -> None:
        with self._here("filling memory"):
            rt.memsetAsync(target, byte, nbytes, stream)

    def load(self, program: bytes) -> int:
        with self._here("loading kernels"):
            made = int(cu.moduleLoadData(program))
        self._programs.add(made)
        return made

    def kernel(self, program: int, name: str, shared: int) -> Kernel:
        with self._here(f"looking for the kernel {name}"):
            found = int(cu.moduleGetFunction(program, name))
            if shared > USUAL_SHARED:
                cu.funcSetAttribute(found, MOST_SHARED, shared)
            return found

    def launch(self, launch: Launch, stream: Stream) -> None:
        self._select()
        try:
            cu.launchKernel(
                launch.kernel,
                *launch.grid,
                launch.block,
                1,
                1,
                launch.shared,
                stream,
                launch.pointers,
                0,
            )
        except ERRORS as e:
            self._fail("starting a kernel", e)

    @property
    def workspace(self) -> int:
        return WORKSPACE

    def work_in(self, address: Address, stream: Stream) -> None:
        with self._here("starting cuBLAS"):
            self._cublas[stream] = Cublas(stream, address)

    def multiply(self, product: DeviceProduct, stream: Stream) -> None:
        with self._here("multiplying"):
            self._cublas[stream].multiply(product)

    def seconds(self, work: Callable[[], None], stream: Stream) -> float:
        events = list[Event]()
        try:
            for _ in range(2):
                with self._here("making an event"):
                    events.append(int(rt.eventCreateWithFlags(0)))
                self._events.add(events[-1])
            self.record(events[0], stream)
            work()
            self.record(events[1], stream)
            self.synchronize(events[1])
            with self._here("measuring"):
                return float(rt.eventElapsedTime(*events)) / 1000
        finally:
            for event in events:
                self.drop(event)

    def capture(self, stream: Stream) -> None:
        with self._here("recording a graph"):
            rt.streamBeginCapture(stream, rt.streamCaptureModeThreadLocal)
        self._locked.recording = True

    def captured(self, stream: Stream) -> Graph:
        try:
            with self._here("recording a graph"):
                graph = rt.streamEndCapture(stream)
                try:
                    return int(rt.graphInstantiate(graph))
                finally:
                    rt.graphDestroy(graph)
        finally:
            self._locked.recording = False
            self._locked.tidy()

    def replay(self, graph: Graph, stream: Stream) -> None:
        self._select()
        try:
            rt.graphLaunch(graph, stream)
        except ERRORS as e:
            self._fail("running a graph", e)

    def forget(self, graph: Graph) -> None:
        self._give_back("forgetting a graph", lambda: rt.graphExecDestroy(graph))

    def close(self) -> None:
        self._give_back("ending", rt.deviceSynchronize)
        for cublas in self._cublas.values():
            self._give_back("ending cuBLAS", cublas.close)
        self._cublas.clear()
        ends = (
            (self._events, rt.eventDestroy),
            (self._streams, rt.streamDestroy),
            (self._programs, cu.moduleUnload),
        )
        for held, end in ends:
            while held:
                self._give_back("ending", partial(end, held.pop()))

    def _give_back(self, what: str, call: Callable[[], object]) -> None:
        """A call that ends something: of a GPU that is lost there is nothing left to end."""
        if not self._loss:
            with suppress(DeviceLost), self._here(what):
                call()

    # A pass takes a dozen of these calls, which use these two at once; all others use `_here`.

    def _select(self) -> None:
        """From now on this thread's calls mean this GPU."""
        self._loss.check()
        if getattr(_thread, "number", None) != self._number:
            with self._here("choosing a GPU"):
                pass

    def _fail(self, what: str, e: Exception) -> NoReturn:
        """CUDA's errors as ours: what was done, and what CUDA says of it."""
        words = f"{self.device.name}: {what}: {e}"
        if getattr(e, "status", None) in STICKY:
            raise self._loss.by(words) from e
        raise BackendError(words) from e

    @contextmanager
    def _here(self, what: str) -> Iterator[None]:
        """Calls of this GPU by this thread."""
        self._loss.check()
        try:
            _work_on(self._number)
            yield
        except ERRORS as e:
            self._fail(what, e)


_thread = threading.local()  # which GPU its calls mean: only this module tells CUDA


def _work_on(number: int) -> None:
    """From now on the calls of this thread mean this GPU."""
    if getattr(_thread, "number", None) != number:
        rt.setDevice(number)
        _thread.number = number


@contextmanager
def _told(what: str) -> Iterator[None]:
    """The same of calls before there is a driver."""
    try:
        yield
    except ERRORS as e:
        raise BackendError(f"{what}: {e}") from e
