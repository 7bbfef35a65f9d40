"""`hetrun plan` and the run that follows it say the same, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.api.local_model import as_options
from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.executor.loading.memory_estimates import HELPER
from hetrun.executor.plan_prediction import predict_plans
from hetrun.loader.open_model import open_model
from hetrun.memory import breakdown
from hetrun.planner.plan import PlanSet
from hetrun.prefetch import ring_buffer
from tests.tools.plan_table import Row, planned, ran

pytestmark = pytest.mark.skipif(ring_buffer.library() is None, reason="built without a C compiler")
MIB = 1 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"ram": "176MiB", "ctx": 1024},
        {"ram": "230MiB", "kv_type": "q8_0", "threads": 1},
        {"ram": "400MiB"},
    ],
    ids=str,
)
def test_what_is_planned_runs(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options |= {"planner": "static", "backends": ["llamacpp"], "spec": "off"}
    run = ran(options, 8)
    row = Row(options, planned(options), run, again=run)
    assert row.context[0] == row.context[1] == row.plan["context"] == row.run["plan"]["context"]
    assert row.weights[0] == pytest.approx(row.weights[1], abs=0.1)
    assert row.plan["weights"] == row.run["plan"]["weights"]
    assert row.read[0] == pytest.approx(row.read[1], rel=0.02)


def plan(ram: int, backends: Sequence[str] = ("llamacpp",), **options: object) -> PlanSet:
    settings = Settings.resolve(
        environ=None, ram=f"{ram}MiB", planner="static", backends=list(backends), **options
    )
    held = {breakdown.INTERPRETER: 84 * MIB, breakdown.HELPERS: HELPER, breakdown.RESERVE: 24 * MIB}
    return predict_plans(open_model(model_path(settings)), replace(as_options(settings), besides=held))


def test_a_plan_stays_within_its_budget_and_grows_with_it() -> None:
    plans = [plan(ram) for ram in range(140, 420, 13)]
    for found in plans:
        assert breakdown.total(found.memory) <= found.memory["limit"]
        assert found.memory["left"] >= 0
        assert found.context_why
    contexts = [found.context for found in plans]
    assert contexts == sorted(contexts)
    kept = [found.weights.full for found in plans if found.weights]
    assert kept == sorted(kept)
    assert len(kept) == len(plans)
    # Weights come before a context that is longer than usual.
    assert all(found.context <= 4096 or w.full == w.total for found in plans if (w := found.weights))
    assert contexts[-1] > 4096


def test_a_context_that_was_asked_for_is_had() -> None:
    assert [plan(ram, ctx=3000).context for ram in (220, 300, 600)] == [3000] * 3


def test_why_one_backend_runs_all_that_comes_from_disk() -> None:
    def why(*backends: str) -> str:
        return plan(200, backends).plan(1).segments[0].why

    assert why("reference", "llamacpp") == "the first of llamacpp, reference that can read weights from disk"
    assert why("llamacpp") == "the only backend allowed"
    (segment,) = plan(600, ("llamacpp", "reference")).plan(1).segments
    assert segment.why == "first in the fixed order llamacpp > reference"
