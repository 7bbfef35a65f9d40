"""What products of amx reach: as quickly measured on a CPU without the instructions as on one with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from hetrun.backends.amx import peak


class Machine:
    """Products that take the time that a CPU of some speed needs, on a clock of their own."""

    def __init__(self, operations_s: float) -> None:
        self.operations_s, self.now, self.longest = operations_s, 0.0, 0.0
        self.interrupted_at: float | None = None

    def make(self, rows: int, side: int) -> Callable[[], object]:
        def product() -> None:
            if self.interrupted_at is not None and self.now >= self.interrupted_at:
                raise KeyboardInterrupt
            seconds = 2 * rows * side * side / self.operations_s
            self.now += seconds
            self.longest = max(self.longest, seconds)

        return product

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.parametrize("operations_s", [2e7, 1e9, 2e11, 2e13])
def test_slow_products_are_measured_with_small_ones(
    operations_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(operations_s)
    monkeypatch.setattr(peak, "perf_counter", machine.clock)
    assert peak.rate_of(machine.make) == pytest.approx(operations_s, rel=0.1)
    assert machine.now < 2.5
    assert machine.longest <= peak.LONGEST_S


def test_ctrl_c_ends_it_between_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2e7)
    machine.interrupted_at = 0.05
    monkeypatch.setattr(peak, "perf_counter", machine.clock)
    monkeypatch.setattr(peak, "_bf16", machine.make)
    with pytest.raises(KeyboardInterrupt):
        peak.peaks()
    assert machine.now < 0.05 + peak.LONGEST_S


def test_both_types_are_measured_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "SIZES", ((1, 64), (2, 64)))
    monkeypatch.setattr(peak, "SECONDS", 0.0)
    found = peak.peaks()
    assert found["bf16"] > 0
    assert all(rate > 0 for rate in found.values())
