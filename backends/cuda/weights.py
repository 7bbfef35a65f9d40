"""Weights in a GPU's memory: the bytes of their file, which kernels read as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Buffers, ReadInto, WeightUse, fusion
from hetrun.backends.cuda import matmul_launch
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address, Driver, Event, Stream
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.programs import Source
from hetrun.errors import BackendError
from hetrun.graph import Op, Weight
from hetrun.graph.ops import Moe
from hetrun.graph.quant import QuantType, by_name
from hetrun.graph.sharding import of_router

# The types that kernels read; weights of any other are unpacked to floats when they are brought in.
READ = frozenset(
    (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    )
)
SHORT = 1024  # numbers of a vector that the host keeps as well: factors of ropes are such
SLICE = 16 << 20  # bytes of a weight that are read while those before them cross
Bytes = NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class DeviceWeight:
    """A weight in the device's memory."""

    address: Address
    shape: tuple[int, int]
    quant: QuantType  # that it is held in
    device_bytes: int
    numbers: NDArray[np.float32] | None = None  # of a short vector

    @property
    def nbytes(self) -> int:
        """Memory of the host that it takes."""
        return 0

    @property
    def source(self) -> Source:
        """The kernels that multiply by it."""
        return matmul_launch.source(self.quant.name)


@dataclass(eq=False, slots=True)
class InFile:
    """A weight in its file, from where it crosses when it is needed."""

    use: WeightUse

    @property
    def nbytes(self) -> int:
        """Memory of the host that it takes."""
        return 0

    @property
    def device_bytes(self) -> int:
        """What it takes of the device while it is there."""
        return device_bytes(self.use)

    def at(self, address: Address) -> DeviceWeight:
        """The weight as work finds it there."""
        return DeviceWeight(address, self.use.weight.shape, held_as(self.use), self.device_bytes)


@dataclass(eq=False, slots=True)
class OnHost:
    """A weight in page-locked memory of the host, from where it crosses when it is needed."""

    memory: Bytes
    shape: tuple[int, int]
    quant: QuantType

    @property
    def nbytes(self) -> int:
        """Memory of the host that it takes."""
        return len(self.memory)

    @property
    def device_bytes(self) -> int:
        """What it takes of the device while it is there."""
        return len(self.memory)

    def at(self, address: Address) -> DeviceWeight:
        """The weight as work finds it there."""
        return DeviceWeight(address, self.shape, self.quant, self.nbytes)


Crossing = OnHost | InFile  # what does not stay on the device


def held_as(use: WeightUse) -> QuantType:
    """The type in which the device has a weight."""
    if use.use == "vector":
        return by_name("F32")
    quant = use.weight.quant
    if quant.name in READ:
        return quant
    return by_name("F32" if use.use == "lookup" else "F16")  # rows of a table are taken as they are


def device_bytes(use: WeightUse) -> int:
    """What a weight takes there."""
    rows, cols = shape_of(use)
    return rows * held_as(use).row_bytes(cols)


def expert_bytes(op: Op) -> int:
    """What one expert of a mixture takes there, with the gaps between its matrices."""
    assert isinstance(op.attrs, Moe)
    routers = of_router(op)
    return sum(
        in_arena(-(-device_bytes(use) // op.attrs.matrices))
        for use in fusion.uses(op)
        if use.weight not in routers
    )


def shape_of(use: WeightUse) -> tuple[int, int]:
    """Its rows there, and how long they are."""
    rows, cols = use.weight.shape
    return (rows // use.matrices * len(use.slots) if use.slots else rows), cols


def expert_of(use: WeightUse, number: int) -> Weight:
    """What one of its experts has of a weight."""
    rows = use.weight.shape[0] // use.matrices
    return use.weight.rows(number * rows, (number + 1) * rows)


def fits(use: WeightUse) -> bool:
    """Whether kernels can read it: they take eight weights at a time."""
    return use.use == "vector" or use.weight.shape[1] % 8 == 0


def held(buffers: Buffers, use: WeightUse) -> DeviceWeight:
    """A weight of a segment."""
    found = buffers[use]
    assert isinstance(found, DeviceWeight)
    return found


class WeightUpload:
    """Brings weights in, slice by slice: one is read while the one before crosses."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._slices = [Slice(memory.driver, memory.bringing, SLICE) for _ in range(2)]

    def bring(self, use: WeightUse, read: ReadInto) -> DeviceWeight:
        """A weight, read and copied. When it returns, all of it is there."""
        weight, size = use.weight, device_bytes(use)
        address = at = self._memory.take(size, weight.name)
        self._memory.wait_for_work()
        for part in parts_of(use):
            s = self._free()
            at += s.send(at, fill(use, part, s.memory, read))
        for s in self._slices:
            s.wait()
        short = use.use == "vector" and not use.slots and weight.shape[0] * weight.shape[1] <= SHORT
        return DeviceWeight(
            address, shape_of(use), held_as(use), size, _numbers(weight, read) if short else None
        )

    def keep(self, use: WeightUse, read: ReadInto) -> OnHost:
        """A weight that stays on the host, as the device will want it."""
        memory, at = self._memory.driver.pinned(device_bytes(use)), 0
        for part in parts_of(use):
            at += fill(use, part, memory[at:], read)
        return OnHost(memory, use.weight.shape, held_as(use))

    def _free(self) -> Slice:
        """The slice that was sent first; it may be filled."""
        self._slices.reverse()
        self._slices[0].wait()
        return self._slices[0]


def _numbers(weight: Weight, read: ReadInto) -> NDArray[np.float32]:
    raw = np.empty(weight.nbytes, np.uint8)
    read(weight, raw)
    return weight.quant.dequantise(raw, weight.shape[1]).reshape(-1)


def parts_of(use: WeightUse, most: int = SLICE) -> Iterator[Weight]:
    """A weight in pieces that fit into a slice."""
    weight, cols = use.weight, use.weight.shape[1]
    widest = max(held_as(use).row_bytes(cols), weight.quant.row_bytes(cols))
    if widest > most:
        raise BackendError(f"{weight.name} has rows of {cols} weights: too wide for a GPU here")
    step = most // widest
    wholes = [expert_of(use, number) for number in use.slots] or [weight]
    return (w.rows(a, min(a + step, w.shape[0])) for w in wholes for a in range(0, w.shape[0], step))


def fill(use: WeightUse, part: Weight, target: Bytes, read: ReadInto) -> int:
    """Put a part of a weight somewhere as the device wants it; how many bytes."""
    quant = held_as(use)
    if quant is part.quant and not use.offset:
        read(part, target[: part.nbytes])
        return part.nbytes
    raw = np.empty(part.nbytes, np.uint8)
    read(part, raw)
    numbers = part.quant.dequantise(raw, part.shape[1]) + np.float32(use.offset)
    converted = quant.quantise(numbers).reshape(-1)
    target[: len(converted)] = converted
    return len(converted)


class Slice:
    """Page-locked memory that is on its way, or free."""

    def __init__(self, driver: Driver, stream: Stream, nbytes: int) -> None:
        self.memory = driver.pinned(nbytes)
        self._driver, self._stream = driver, stream
        self._gone: Event = driver.event()

    def send(self, target: Address, nbytes: int) -> int:
        """Send the first bytes off; how many."""
        self._driver.copy(target, int(self.memory.ctypes.data), nbytes, self._stream)
        self._driver.record(self._gone, self._stream)
        return nbytes

    def wait(self) -> None:
        """Until it is free."""
        self._driver.synchronize(self._gone)
