"""What the backend asks of a GPU: memory, copies, streams, kernels, products of matrices, graphs.

Everything is a number: addresses, streams, events. One class does it through CuPy (`cupy_driver.py`); the
tests have one that computes on the CPU, with the same kernels.

Work is given to streams. What one stream was given runs in order; two streams wait for each other by events
only. The caller keeps whatever a copy or a kernel uses until a `synchronize` that comes behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import DeviceLost

Address = int  # of device memory
Stream = int
Event = int
Kernel = int
Graph = int

Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_longlong | ctypes.c_float | ctypes.Structure


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU is."""

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int  # bytes in all
    engines: int = 2  # that copy: with one, small copies wait for large ones
    shared: int = 99 << 10  # bytes of shared memory that a block may have


class Loss:
    """What a driver remembers of an error after which a GPU does nothing more in this process. Each call that
    needs the GPU to work raises it again; giving something back does not, as nothing is left to give back."""

    def __init__(self) -> None:
        self._said = ""

    def __bool__(self) -> bool:
        return bool(self._said)

    def check(self) -> None:
        """Raise what happened."""
        if self._said:
            raise DeviceLost(self._said)

    def by(self, said: str) -> DeviceLost:
        """It is lost by this, if it was not before; the error to raise."""
        self._said = self._said or f"{said}; only a new process can use it again"
        return DeviceLost(self._said)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, on how many blocks of how many threads, with how much shared memory, and its arguments."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: Sequence[Argument]
    pointers: int = field(init=False)  # where the addresses of the arguments lie, as CUDA wants them
    _held: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        addresses = [ctypes.addressof(argument) for argument in self.arguments]
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        object.__setattr__(self, "_held", array)
        object.__setattr__(self, "pointers", ctypes.addressof(array))


@dataclass(frozen=True, slots=True)
class DeviceProduct:
    """c[rows, out] = x[rows, inner] @ w[out, inner].T in bf16, summed up in float32.

    x and w are bf16 without gaps; c is float32, `ldc` numbers from one row to the next. With `add` the
    product is added to what is there.
    """

    x: Address
    w: Address
    c: Address
    rows: int
    out: int
    inner: int
    ldc: int
    add: bool = False


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """Bytes from one address to another, either of the device or of the host."""

    target: int
    source: int
    nbytes: int


Work = Launch | DeviceProduct | MemoryCopy


class Driver(Protocol):
    """One GPU.

    Some errors leave a GPU without use for the process (DeviceLost). Then every call but those that give
    something back (`free`, `drop`, `forget`, `close`) raises that error; these do nothing.
    """

    @property
    def device(self) -> Device:
        """What it is."""
        ...

    def free_memory(self) -> int:
        """Free bytes, as the system counts them."""
        ...

    def held_memory(self) -> int:
        """Bytes of the device that this process has: CUDA itself, programs, and what was allocated."""
        ...

    def allocate(self, nbytes: int) -> Address:
        """Device memory; MemoryError where there is not so much."""
        ...

    def free(self, address: Address) -> None:
        """Give it back."""
        ...

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies run from and to while others compute; gone with the last array over it.
        BudgetError where the system has no more of it."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def event(self, sleeps: bool = False) -> Event:
        """A new event, which has happened. A thread that waits for it keeps a core busy or, some microseconds
        longer, `sleeps`."""
        ...

    def drop(self, event: Event) -> None:
        """It will not be recorded or waited for again; waits that have begun go on."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """It happens when the stream has done what it was given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on begins behind the event."""
        ...

    def synchronize(self, event: Event) -> None:
        """Return when it has happened; raise what went wrong."""
        ...

    def happened(self, event: Event) -> bool:
        """Whether it has happened; raise what went wrong."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Bytes from one address to another, either of the device or of the host."""
        ...

    def fill(self, target: Address, byte: int, nbytes: int, stream: Stream) -> None:
        """The same byte everywhere."""
        ...

    def load(self, program: bytes) -> int:
        """A compiled program, by whose number its kernels are found."""
        ...

    def kernel(self, program: int, name: str, shared: int) -> Kernel:
        """A kernel that may be given up to so much shared memory."""
        ...

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Run a kernel."""
        ...

    @property
    def workspace(self) -> int:
        """Bytes that products work in."""
        ...

    def work_in(self, address: Address, stream: Stream) -> None:
        """Where the products of a stream work, from now on; before the first of them."""
        ...

    def multiply(self, product: DeviceProduct, stream: Stream) -> None:
        """Run a product of matrices."""
        ...

    def seconds(self, work: Callable[[], None], stream: Stream) -> float:
        """How long the device takes for what `work` gives to a stream; returns when that is done."""
        ...

    def capture(self, stream: Stream) -> None:
        """From now on the stream only notes what it is given."""
        ...

    def captured(self, stream: Stream) -> Graph:
        """What it was given since, to be run as a whole."""
        ...

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Run it."""
        ...

    def forget(self, graph: Graph) -> None:
        """It does not run any more."""
        ...

    def close(self) -> None:
        """Give everything back: memory, streams, events, programs."""
        ...
