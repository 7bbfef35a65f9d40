"""What is timed on a GPU, run without one: nothing may break there for a slip of the pen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hetrun.backends.cuda.kernel_cache import KernelLibrary
from hetrun.backends.cuda.memory import CudaMemory
from tests.cuda import kernel_times, smoke
from tests.cuda.emulated.driver import EmulatedDriver, EmulatedPrograms
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.rows import Table
from tests.support.tiers import exhaustive

pytestmark = [needs_compiler, pytest.mark.slow, exhaustive]  # seconds of an emulator, for tools of developers


@contextmanager
def gpu_memory(nbytes: int) -> Iterator[CudaMemory]:
    yield CudaMemory(EmulatedDriver(96 << 20), 80 << 20)


def test_every_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"OF_WEIGHTS": 1 << 20, "BIG": 8 << 20, "WIDTH": 256, "INNER": 64, "ROWS": 32}
    lists = {"QUANTS": ("Q4_K", "Q6_K", "Q4_0", "Q8_0"), "FEW": (1,), "MANY": (33,), "DEPTHS": (64,)}
    for name, value in {**small, **lists, "TILED": (64,)}.items():
        monkeypatch.setattr(kernel_times, name, value)
    monkeypatch.setattr(kernel_times, "gpu_memory", gpu_memory)
    monkeypatch.setattr(kernel_times, "Programs", lambda capability: EmulatedPrograms())
    monkeypatch.setattr(smoke, "REPLAYS", 2)
    table = Table("kernels", None)
    kernel_times.kernel_times(table)
    found = {line.what: line.value for line in table.lines}
    assert {
        "few_1 Q4_K 1 tokens",
        "gated_1 Q4_K",
        "products_64 Q4_K 33 tokens",
        "attend_many 32 rows of 64",
        "attend_few 1 rows of 64",
    } <= found.keys()
    assert all(value > 0 for value in found.values())


def test_copies_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COPIED": 2 << 20, "REPLAYS": 3, "NODES": 4}.items():
        monkeypatch.setattr(smoke, name, value)
    monkeypatch.setattr(smoke, "library_of", lambda driver: KernelLibrary(driver, EmulatedPrograms()))
    table = Table("smoke", None)
    with gpu_memory(0) as memory:
        places = [memory.take(2 << 20, "a copy") for _ in range(2)]
        smoke.copies(table, memory.driver, places)
        smoke.graphs(table, memory.driver, memory.computing, memory.take(4 << 20, "numbers"))
    assert not table.missed
    found = [line.what for line in table.lines]
    assert "copies both ways at once, together" in found
    assert "numbers that differ in a graph" in found
