"""Calls of a GPU that fail: those of the emulated driver, counted and refused as CUDA refuses them.

A call that fails alone is one after which the GPU goes on: no memory, or a start that was refused. All from
the Nth on, and each call of the kind `gpu`, is a GPU that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hetrun.errors import BackendError, BudgetError
from tests.cuda.emulated.driver import EmulatedDriver
from tests.faults.count import Count

KINDS = {
    "gpu-memory": ("allocate",),
    "gpu-pinned": ("pinned",),
    "gpu-copy": ("copy", "fill"),
    "gpu-launch": ("launch", "multiply", "replay"),
    "gpu-wait": ("synchronize", "happened", "record", "wait"),
    "gpu-make": ("stream", "event", "load", "kernel", "work_in", "capture"),
}
LOST = "gpu"
DEVICE_CALLS = (*KINDS, LOST)


@dataclass
class DeviceCalls:
    """Which of the calls of all emulated GPUs of this process fails."""

    kind: str = ""
    nth: int = 0
    lasting: bool = False
    count: Count = field(default_factory=Count)

    @contextmanager
    def armed(self, kind: str, nth: int, lasting: bool) -> Iterator[Count]:
        """Count the calls of a kind, and fail the Nth."""
        self.kind, self.nth, self.lasting, self.count = kind, nth, lasting, Count()
        try:
            yield self.count
        finally:
            self.kind = ""

    def fails(self, kind: str, name: str) -> bool:
        """Whether this call does."""
        if self.kind not in (kind, LOST):
            return False
        self.count.calls += 1
        if not self.nth or self.count.calls < self.nth or (self.count.calls > self.nth and not self.lasting):
            return False
        self.count.site = self.count.site or name
        return True

    @property
    def is_lost(self) -> bool:
        """Whether the GPU does nothing more after such a failure."""
        return self.kind == LOST or self.lasting


DEVICE = DeviceCalls()


class FailingDriver(EmulatedDriver):
    """An emulated GPU of which calls fail."""

    def refuse(self, kind: str, name: str) -> None:
        """Raise what CUDA says where such a call fails."""
        if kind == "gpu-memory" and DEVICE.kind != LOST:
            raise MemoryError(f"{self.device.name} has no memory left")
        if kind == "gpu-pinned" and DEVICE.kind != LOST:
            raise BudgetError(f"no RAM can be page-locked for {self.device.name}")
        said = f"{self.device.name}: {name}: refused"
        raise self.loss.by(said) if DEVICE.is_lost else BackendError(said)


def _guard(kind: str, name: str) -> None:
    original: Callable[..., object] = getattr(EmulatedDriver, name)

    def call(self: FailingDriver, *arguments: object, **more: object) -> object:
        self.loss.check()
        if DEVICE.fails(kind, name):
            self.refuse(kind, name)
        return original(self, *arguments, **more)

    setattr(FailingDriver, name, call)


for _kind, _names in KINDS.items():
    for _name in _names:
        _guard(_kind, _name)
