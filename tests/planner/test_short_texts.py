"""The memory of keys and values that weights leave free from the beginning, for texts that are short."""

from __future__ import annotations

import pytest

from hetrun.api.local_model import make_plan
from hetrun.config import Settings
from hetrun.executor.loading import load_budget
from hetrun.memory.kv.cache import STEP
from hetrun.memory.ledger import RESERVE


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes nothing here, whatever other tests have loaded."""
    monkeypatch.setattr(load_budget, "besides", lambda entries, to_come: RESERVE)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("ram", range(150, 180, 5))
def test_no_memory_is_left_while_weights_are_read_from_disk(ram: int, kv_type: str) -> None:
    """Pages of rows of 204 bytes come in units of 1,024 tokens: two of them are more than a full context."""
    settings = Settings.resolve(
        environ={}, backends=["llamacpp"], planner="static", ram=f"{ram}MiB", ctx=1024, kv_type=kv_type
    )
    plans = make_plan(settings)
    assert plans.weights is not None
    assert plans.weights.read == 0 or plans.memory["left"] <= STEP
    assert plans.memory["left"] >= 0
