"""Trials: what lies behind them, what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from hetrun.backend import Backend, Buffers, Floats, PassShape, Runner, Segment
from hetrun.backend.interpreter import InterpretingBackend
from hetrun.backends import reference
from hetrun.backends.reference.ops import TABLE
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import kv_shapes
from hetrun.graph.quant import by_name
from hetrun.graph.signature import units
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.trials import Trial
from tests.models.tiny import TinyLlama
from tests.support.rig import graph_of, windowed

CASE, CONTEXT = TinyLlama("probed", layers=2), 256


class Drawing(Prober):
    """Counts the rows of numbers that are drawn."""

    drawn = 0

    def _noise(self, rows: int, width: int) -> Floats:
        self.drawn += rows
        return super()._noise(rows, width)


class Failing(InterpretingBackend):
    """Cannot compile anything."""

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        raise RuntimeError("no")


def prober(
    windows: tuple[int, ...] = (), backend: Backend | None = None
) -> tuple[Drawing, KvCache, WorkTimes]:
    graph = windowed(graph_of(CASE), windows) if windows else graph_of(CASE)
    backends: dict[str, Backend] = {"reference": backend or reference.create()}
    kv = KvCache(kv_shapes(graph), by_name("F16"), CONTEXT, 2, 64)
    forecast = WorkTimes()
    return Drawing(graph, backends, WeightStore(backends), kv, forecast, CONTEXT), kv, forecast


def attention(probe: Prober, layer: int, seen: int, tokens: int = 1) -> Trial:
    unit = next(u for u in units(probe._graph) if u.scope == f"blk.{layer}.attn")
    return Trial("a test", unit.form, (unit.ops,), "reference", 1, tokens, seen)


def test_what_lies_behind_a_trial_is_drawn_once_whatever_its_depth() -> None:
    probe, _, _ = prober()
    counts = []
    for seen in (10, 40, 200, 200):
        before = probe.drawn
        probe.measure(attention(probe, 0, seen), once=True)
        counts.append(probe.drawn - before)
    assert counts[0] > 1
    assert counts[1:] == [1, 1, 1]  # the row that goes in


@pytest.mark.parametrize("windows", [(), (32, 0)])
def test_every_row_behind_a_trial_holds_numbers(windows: tuple[int, ...]) -> None:
    probe, kv, _ = prober(windows)
    trial = attention(probe, 1, 150)
    with probe._sequences(trial, [probe._segment(trial, trial.ops[0])]) as work:
        group = kv.group(1)
        rows = work.parts[0].kv[group].rows
        assert len(rows) == 151
        for table in kv.tables[1]:
            numbers = table.read(rows)[:150]
            assert np.isfinite(numbers).all()
            assert numbers.any(axis=(1, 2)).all()
    assert kv.used_bytes == 0


def test_a_trial_that_fails_leaves_no_sequence_behind() -> None:
    probe, kv, forecast = prober(backend=Failing("reference", TABLE))
    with pytest.raises(RuntimeError, match="no"):
        probe.measure(attention(probe, 0, 100))
    assert kv.used_bytes == 0
    assert not list(forecast.works())


def test_what_a_trial_takes_is_filed_under_its_size() -> None:
    probe, _, forecast = prober()
    trial = attention(probe, 0, 96, tokens=8)
    probe.measure(trial)
    ((size, cell),) = forecast.measured(trial.work).cells.items()
    assert (cell.tokens, cell.depth) == (8, 96 + 4.5)
    assert cell.smoothed > 0
    assert size == (3, 2)
