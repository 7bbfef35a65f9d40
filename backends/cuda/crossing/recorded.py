"""What crosses between the host and a device with the work of a pass: parts of the device's memory, and where
they lie in page-locked memory of the host. Both are the same for all passes of a shape, so the copies are
recorded with the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address, Driver, Work
from hetrun.backends.cuda.memory import FEW_BYTES, Bytes


@dataclass(frozen=True, slots=True)
class RecordedTransfer:
    """Parts, each with its memory on the host, and the work that moves all of them."""

    parts: Sequence[Bytes]
    work: Sequence[Work]


def crossing(
    driver: Driver, parts: Sequence[tuple[Address, int]], move: Callable[[Address, int, int], Work]
) -> RecordedTransfer:
    """Of parts of an arena, by address and size. `move` makes work of an address, one of the host, and a
    size; parts that lie next to each other move together, as long as they are few bytes."""
    if not parts:
        return RecordedTransfer([], [])
    memory = driver.pinned(sum(in_arena(size) for _, size in parts))
    begins, at = [], 0
    for _, size in parts:
        begins.append(at)
        at += in_arena(size)
    runs: list[tuple[Address, int, int]] = []
    for (address, size), begin in zip(parts, begins, strict=True):
        first, at, _ = runs[-1] if runs else (0, 0, 0)
        if runs and address - first == begin - at and begin + size - at <= FEW_BYTES:
            runs[-1] = first, at, begin + size - at
        else:
            runs.append((address, begin, size))
    host = int(memory.ctypes.data)
    work = [move(address, host + begin, size) for address, begin, size in runs]
    return RecordedTransfer(
        [memory[begin : begin + size] for begin, (_, size) in zip(begins, parts, strict=True)], work
    )
