"""How many rows are few is measured once on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.measured import few_rows
from hetrun.backends.cuda.measured.few_rows import FewRowsLimits
from hetrun.backends.cuda.pass_args import FEW
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.backends.reference import descriptor
from hetrun.errors import BudgetError
from hetrun.graph.quant import by_name
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.models.tiny import TinyLlama
from tests.support.rig import rig

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
MODEL = TinyLlama("cuda-few", layers=1, embd=64, ffn=64, heads=2, kv_heads=2, head_dim=32, quant="Q4_0")
ROWS, COLS = 32, 64
MEASURING = 2 * (1 + few_rows.TIMES)  # kernels of one measurement


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "LEAST", 1)


def driver_that_takes(few: float, unpacking: float, name: str = "a GPU") -> EmulatedDriver:
    driver = EmulatedDriver()
    driver.device = replace(driver.device, name=name)
    driver.takes = {"few_8": few, "unpack_bf16": unpacking}
    return driver


def found(
    driver: EmulatedDriver, quant: str = "Q4_0", prepare: Callable[[CudaBackend], None] | None = None
) -> int:
    """As many rows as are few with a weight of a type."""
    backend = emulated(driver)
    backend.start()
    gpu = backend.gpu
    size = by_name(quant).row_bytes(COLS) * ROWS
    weight = DeviceWeight(gpu.memory.take(size, "a weight"), (ROWS, COLS), by_name(quant), size)
    driver.seconds(lambda: driver.fill(weight.address, 0, size, gpu.memory.computing), gpu.memory.computing)
    if prepare:
        prepare(backend)
    used = gpu.memory.arena.used
    n = FewRowsLimits(gpu.memory, gpu.library).of(weight, gpu.scratch, gpu.scratch_bytes)
    assert gpu.memory.arena.used == used
    backend.close()
    return n


@pytest.mark.parametrize(
    ("few", "unpacking", "rows"),
    [(1.0, 0.9, 56), (1.0, 0.1, FEW), (1.0, 5.0, few_rows.MOST), (0.0, 0.0, FEW)],
)
def test_as_many_as_take_no_longer_than_unpacking(few: float, unpacking: float, rows: int) -> None:
    assert found(driver_that_takes(few, unpacking, f"{few} {unpacking}")) == rows


def test_it_is_measured_once_for_a_device_and_a_type() -> None:
    first, again, other = (driver_that_takes(1.0, x) for x in (0.9, 0.1, 0.1))
    assert found(first) == 56
    assert found(again) == 56
    assert (len(first.launches), again.launches) == (MEASURING, [])
    assert found(other, "Q8_0") == FEW
    assert found(driver_that_takes(1.0, 0.1, "another GPU")) == FEW
    assert found(again, "BF16") == FEW
    assert again.launches == []


def test_without_memory_to_measure_it_is_as_before() -> None:
    def full(backend: CudaBackend) -> None:
        def take(nbytes: int, what: str) -> int:
            raise BudgetError(f"no room for {what}")

        backend.gpu.memory.take = take  # type: ignore[method-assign]

    assert found(driver_that_takes(1.0, 0.9, "full"), prepare=full) == FEW
    assert found(driver_that_takes(1.0, 0.9, "full")) == 56, "what was not measured is not kept"


def test_rows_that_are_few_are_not_unpacked() -> None:
    driver = driver_that_takes(1.0, 0.9, "with a model")
    mine = rig(MODEL, {"it": emulated(driver)}, context=256, ubatch=64)
    right = rig(MODEL, {"reference": descriptor.create()}, context=256, ubatch=64)
    a, b = mine.kv.alloc(), right.kv.alloc()
    errors, unpacked = [], []
    for n in (40, 56, 57):
        before = len(driver.launches)
        tokens = np.random.default_rng(n).integers(0, 100, n).tolist()
        y, expected = mine.step((a, tokens, [n - 1])), right.step((b, tokens, [n - 1]))
        errors.append(float(np.square(y - expected).sum() / np.square(expected).sum()))
        unpacked.append(driver.launches[before:].count("unpack_bf16"))
    assert unpacked[:2] == [MEASURING // 2, 0]
    assert unpacked[2] > 0
    assert max(errors[:2]) < 1e-9 < errors[2]
    mine.close()
    right.close()
