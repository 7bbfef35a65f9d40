"""What the engine says of its plan: the last change, also one that was taken back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hetrun.executor.autotune.state import Change
from hetrun.executor.model_tuning import ModelTuning


def reason(*changes: Change) -> str:
    executor = SimpleNamespace(plans=SimpleNamespace(reason="the fixed order"))
    tuning = SimpleNamespace(autotuner=SimpleNamespace(changes=changes), _executor=executor)
    told = vars(ModelTuning)["reason"].fget
    return cast(str, told(tuning))


def test_the_last_change_is_told_also_one_that_was_taken_back() -> None:
    fewer = Change(1.0, "another program takes a core: 1 thread instead of 2")
    tried = Change(2.0, "passes of 1 token use 1 thread again instead of 2", "taken back")
    back = Change(3.0, "cores are free again: 2 threads instead of 1")
    assert reason() == "the fixed order"
    assert reason(fewer) == fewer.reason
    assert reason(fewer, Change(1.5, "on amx", "proposed")) == fewer.reason  # nothing runs so yet
    assert reason(fewer, tried) == tried.reason
    assert reason(fewer, tried, back) == back.reason
