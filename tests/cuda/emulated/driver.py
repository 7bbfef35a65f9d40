"""A GPU that is not there: the backend's driver on the CPU, with the same kernels.

Streams run nothing until the caller waits, and then in any order that streams and events allow: a caller that
forgot to wait gets wrong numbers. Memory that was not written holds no numbers at all.
"""

from __future__ import annotations

import ctypes
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.cuda.driver import (
    Address,
    Argument,
    Device,
    DeviceProduct,
    Event,
    Graph,
    Kernel,
    Launch,
    Loss,
    Stream,
)
from hetrun.backends.cuda.programs import Source
from hetrun.errors import DeviceLost
from tests.cuda.emulated.kernels import library, start

ALIGNED = 256
CONTEXT = 1 << 20  # bytes that "CUDA itself" has
BESIDE = np.tile(np.array([0xA5, 0xFF], np.uint8), ALIGNED // 2)  # lies around memory: no number, either


@dataclass(slots=True)
class Moment:
    """When an event happens that was recorded."""

    passed: bool = False


@dataclass(slots=True)
class Task:
    """Work of a stream; the moment that has come with it; the moment that must have come before it."""

    run: Callable[[], None] | None = None
    records: Moment | None = None
    waits: Moment | None = None


@dataclass(slots=True)
class Memories:
    """Who has which bytes: what may be copied from and to."""

    begins: list[int] = field(default_factory=list)
    arrays: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def add(self, array: NDArray[np.uint8]) -> int:
        address = int(array.ctypes.data)
        self.begins.insert(bisect_right(self.begins, address), address)
        self.arrays[address] = array
        return address

    def remove(self, address: int) -> NDArray[np.uint8]:
        self.begins.remove(address)
        return self.arrays.pop(address)

    def holds(self, address: int, nbytes: int) -> bool:
        i = bisect_right(self.begins, address) - 1
        return i >= 0 and address + nbytes <= self.begins[i] + self.arrays[self.begins[i]].nbytes

    def intact(self) -> bool:
        """Whether nothing was written beside them."""
        return all(_intact(array) for array in self.arrays.values())


class EmulatedPrograms:
    """Sources stand for their programs: the driver builds them."""

    def program(self, source: Source) -> bytes:
        return "\0".join([str(source.path), *source.options]).encode()


class EmulatedDriver:
    """See the module's words."""

    def __init__(
        self, nbytes: int = 64 << 20, seed: int = 0, workspace: int = 1024, engines: int = 2
    ) -> None:
        # Shared memory is what an RTX has: kernels for any GPU make do with that.
        self.device = Device("an emulated GPU", (9, 0), 4, nbytes, engines)
        self.workspace = workspace  # bytes that products work in; cuBLAS has 32 MiB of them
        self.calls = 0
        self.breaks_at: int | None = None  # the call from which on each fails, as after an illegal address
        self.loss = Loss()
        self.sleeping: set[Event] = set()  # a wait for these keeps no core busy
        self.late: Stream | None = None  # does nothing as long as another stream can do something
        self.others = 0  # bytes that other processes have
        self.most_allocated = 0
        self.launches: list[str] = []  # the names of kernels that ran
        self.takes: dict[str, float] = {}  # seconds, by the name of a kernel
        self.replays = 0
        self.closed = False
        self._random = random.Random(seed)
        self._allocated = 0
        self._device, self._pinned, self._left = Memories(), Memories(), list[NDArray[np.uint8]]()
        self._streams: dict[Stream, deque[Task]] = {}
        self._moments: dict[Event, Moment] = {}  # of the last time that an event was recorded
        self._programs: dict[int, tuple[Path, tuple[str, ...]]] = {}
        self._kernels: dict[Kernel, tuple[int, str, int]] = {}
        self._graphs: dict[Graph, list[Task]] = {}
        self._capturing: dict[Stream, list[Task]] = {}
        self._workspaces: set[Stream] = set()
        self._numbers = count(1)

    def _called(self) -> None:
        """At the beginning of whatever asks the GPU for something."""
        self.loss.check()
        self.calls += 1
        if self.breaks_at is not None and self.calls >= self.breaks_at:
            raise self.loss.by(f"{self.device.name}: computing: an illegal memory access was encountered")

    def _gives_back(self) -> bool:
        """The same for calls that give something back, which raise no error; whether it works."""
        with suppress(DeviceLost):
            self._called()
        return not self.loss

    # --- memory

    def free_memory(self) -> int:
        self._called()
        return self._free

    @property
    def _free(self) -> int:
        return self.device.memory - CONTEXT - self.others - self._allocated

    def held_memory(self) -> int:
        return CONTEXT + self._allocated

    def allocate(self, nbytes: int) -> Address:
        self._called()
        if nbytes > self._free:
            raise MemoryError(f"{nbytes} bytes are more than the {self._free} that are free")
        self._allocated += nbytes
        self.most_allocated = max(self.most_allocated, self._allocated)
        return self._device.add(_aligned(nbytes))

    def free(self, address: Address) -> None:
        if not self._gives_back():
            return
        array = self._device.remove(address)
        assert _intact(array), f"something was written beside the memory at {address:#x}"
        array[:] = 0xFF
        self._left.append(array)  # it stays where it is, so that a kernel that still uses it reads no numbers
        self._allocated -= array.nbytes

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._called()
        array = _aligned(max(nbytes, 1))
        self._pinned.add(array)
        return array[:nbytes]

    # --- streams

    def stream(self) -> Stream:
        self._called()
        number = next(self._numbers)
        self._streams[number] = deque()
        return number

    def event(self, sleeps: bool = False) -> Event:
        self._called()
        number = next(self._numbers)
        self._moments[number] = Moment(passed=True)
        if sleeps:
            self.sleeping.add(number)
        return number

    def drop(self, event: Event) -> None:
        if self._gives_back():
            del self._moments[event]

    def record(self, event: Event, stream: Stream) -> None:
        self._called()
        assert stream not in self._capturing, "events are no part of a graph here"
        self._moments[event] = Moment()
        self._streams[stream].append(Task(records=self._moments[event]))

    def wait(self, stream: Stream, event: Event) -> None:
        self._called()
        assert stream not in self._capturing, "events are no part of a graph here"
        self._streams[stream].append(Task(waits=self._moments[event]))

    def synchronize(self, event: Event) -> None:
        self._called()
        assert not self._capturing, "no one waits while a graph is recorded"
        while not self._moments[event].passed:
            self._some()
        # Maybe more is done than was asked for.
        while self._random.random() < 0.3 and any(self._streams.values()):
            self._some()

    def happened(self, event: Event) -> bool:
        self._called()
        if not self._moments[event].passed:
            self._some()
        return self._moments[event].passed

    def _some(self) -> None:
        """Whatever one of the streams can do next."""
        able = [queue for queue in self._streams.values() if queue and _can(queue[0])]
        if len(able) > 1 and self.late is not None:
            able = [queue for queue in able if queue is not self._streams[self.late]]
        assert able, "streams wait for each other for ever"
        task = self._random.choice(able).popleft()
        if task.run:
            task.run()
        if task.records:
            task.records.passed = True

    def _give(self, stream: Stream, run: Callable[[], None]) -> None:
        queue = self._capturing.get(stream, self._streams[stream])
        queue.append(Task(run))

    # --- work

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._called()
        for address in (target, source):
            known = self._device.holds(address, nbytes) or self._pinned.holds(address, nbytes)
            assert known, f"{nbytes} bytes at {address:#x} are neither the device's nor page-locked"
        self._give(stream, partial(_moved, target, source, nbytes))

    def fill(self, target: Address, byte: int, nbytes: int, stream: Stream) -> None:
        self._called()
        assert self._device.holds(target, nbytes)
        self._give(stream, partial(_filled, target, byte, nbytes))

    def load(self, program: bytes) -> int:
        self._called()
        path, *options = program.decode().split("\0")
        number = next(self._numbers)
        self._programs[number] = Path(path), tuple(options)
        return number

    def kernel(self, program: int, name: str, shared: int) -> Kernel:
        self._called()
        most = self.device.shared
        assert shared <= most, f"{name} wants {shared} bytes of shared memory, and a block has {most}"
        number = next(self._numbers)
        self._kernels[number] = program, name, shared
        return number

    def launch(self, launch: Launch, stream: Stream) -> None:
        self._called()
        program, name, most = self._kernels[launch.kernel]
        assert launch.shared <= most, f"{name} was not to get {launch.shared} bytes of shared memory"
        assert min(launch.grid) > 0, f"{name} on no blocks"
        assert launch.grid[1] < 1 << 16, f"{name} on too many blocks"
        assert launch.grid[2] < 1 << 16, f"{name} on too many blocks"
        mine = replace(launch, arguments=[_copied(a) for a in launch.arguments])
        self._give(stream, lambda: self._run(mine, program, name))

    def _run(self, launch: Launch, program: int, name: str) -> None:
        self.launches.append(name)
        made = library(*self._programs[program])
        seed = self._random.randrange(1 << 30)
        start(made, name, launch.grid, launch.block, launch.shared, launch.arguments, seed)
        assert self._device.intact(), f"{name} wrote beside memory that was allocated"

    def work_in(self, address: Address, stream: Stream) -> None:
        self._called()
        assert self._device.holds(address, self.workspace)
        self._workspaces.add(stream)

    def multiply(self, product: DeviceProduct, stream: Stream) -> None:
        self._called()
        assert stream in self._workspaces, "products have nowhere to work"
        c_numbers = (product.rows - 1) * product.ldc + product.out
        assert self._device.holds(product.x, 2 * product.rows * product.inner), "x is not the device's"
        assert self._device.holds(product.w, 2 * product.out * product.inner), "w is not the device's"
        assert self._device.holds(product.c, 4 * c_numbers), "c is not the device's"
        self._give(stream, lambda: _multiply(product))

    def seconds(self, work: Callable[[], None], stream: Stream) -> float:
        """As `takes` says of what ran; nothing takes time here."""
        done = self.event()
        self.record(done, stream)
        self.synchronize(done)
        before = len(self.launches)
        work()
        self.record(done, stream)
        self.synchronize(done)
        self.drop(done)
        return sum(self.takes.get(name, 0.0) for name in self.launches[before:])

    # --- graphs

    def capture(self, stream: Stream) -> None:
        self._called()
        assert stream not in self._capturing
        self._capturing[stream] = []

    def captured(self, stream: Stream) -> Graph:
        noted = self._capturing.pop(stream)
        self._called()
        number = next(self._numbers)
        self._graphs[number] = noted
        return number

    def replay(self, graph: Graph, stream: Stream) -> None:
        self._called()
        self.replays += 1
        self._streams[stream].extend(self._graphs[graph])

    def forget(self, graph: Graph) -> None:
        if self._gives_back():
            del self._graphs[graph]

    def close(self) -> None:
        self.closed = True
        if not self._gives_back():
            return
        while any(self._streams.values()):
            self._some()
        assert not self._device.arrays, "not all memory was given back"
        assert not self._graphs, "not all graphs were forgotten"
        assert all((array == 0xFF).all() for array in self._left), "someone wrote to memory given back"


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """Bytes that are no numbers, where the widest loads may begin, between two guards."""
    room = np.full(nbytes + 3 * ALIGNED, 0xFF, np.uint8)
    begin = ALIGNED + -room.ctypes.data % ALIGNED
    room[begin - ALIGNED : begin] = room[begin + nbytes :][:ALIGNED] = BESIDE
    return room[begin : begin + nbytes]


def _intact(array: NDArray[np.uint8]) -> bool:
    begin = int(array.ctypes.data)
    guards = (ctypes.string_at(at, ALIGNED) for at in (begin - ALIGNED, begin + array.nbytes))
    return all(guard == BESIDE.tobytes() for guard in guards)


def _can(task: Task) -> bool:
    return task.waits is None or task.waits.passed


def _moved(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _filled(target: int, byte: int, nbytes: int) -> None:
    ctypes.memset(target, byte, nbytes)


def _copied(argument: Argument) -> Argument:
    copy = type(argument)()
    ctypes.memmove(ctypes.addressof(copy), ctypes.addressof(argument), ctypes.sizeof(argument))
    return copy


def _multiply(p: DeviceProduct) -> None:
    def bf16(address: Address, rows: int) -> NDArray[np.float32]:
        raw = np.ctypeslib.as_array((ctypes.c_uint16 * (rows * p.inner)).from_address(address))
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(rows, p.inner)

    c = np.ctypeslib.as_array((ctypes.c_float * ((p.rows - 1) * p.ldc + p.out)).from_address(p.c))
    made = bf16(p.x, p.rows) @ bf16(p.w, p.out).T
    for i in range(p.rows):
        row = c[i * p.ldc : i * p.ldc + p.out]
        row[:] = row + made[i] if p.add else made[i]
