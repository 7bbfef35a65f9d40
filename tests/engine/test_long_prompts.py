"""Prompts on a device through whose link all weights cross, from the probe to the passes that run: on a clock
of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.backend import OwnMemory, WeightUse
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Op
from tests.engine import machines
from tests.engine.machines import DEVICE, made_up
from tests.models.tiny import TinyLlama
from tests.support.pass_listener import PassListener
from tests.support.rig import model_file

pytestmark = pytest.mark.usefixtures("all_threads")
MODEL = TinyLlama("long-prompts", layers=3, context=2048)
LONG, CONTEXT, PROMPT = 1024, 2048, 1900


class Crossing(machines.Device):
    """Every pass takes as long as weights cross, nearly however many tokens it has."""

    def grant(self, nbytes: int | None) -> OwnMemory:
        return OwnMemory(64 << 20, 1 << 20)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def streams(self, wanted: WeightUse) -> bool:
        return True

    def most_at_once(self, ops: Sequence[Op]) -> int:
        return LONG


@pytest.mark.parametrize("link", [20.0, 2000.0], ids=["a link", "hardly a link"])
def test_a_long_prompt_crosses_in_passes_of_the_device(link: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that pays: else in passes of the host, as long as suits its cores."""
    made, far = made_up(4), {"first": 1.0, "warm": 0.0, "ffn": 1.0, "together": 1.0}
    host = made.kinds["one"]
    kinds = {"one": host, DEVICE: replace(host, op=link, token=0.05, **far)}
    made = replace(made, kinds=kinds, names=("one", DEVICE), programs=[], bursts=[])
    monkeypatch.setattr(machines, "Device", Crossing)
    monkeypatch.setattr("hetrun.planner.static.FLOPS_PER_CORE", 2e7)  # as if the model were a large one
    heard: list[tuple[int, bool]] = []

    def read(loaded: LoadedModel) -> tuple[int, int]:
        model = loaded.model
        assert isinstance(model, PlannedModel)
        assert model.autotuner
        seq, left = model.alloc(), PROMPT

        def note(ran: PassTiming) -> None:
            heard.append((ran.tokens, model.plans.plans[ran.bucket].on_devices))

        executor = model._executor
        executor.observe(PassListener(note, before=executor._observer))
        model.expect(PROMPT)
        while left:
            n = min(left, model.plans.ubatch)
            left -= n
            wanted = np.array([] if left else [n - 1], np.int64)
            model.step(Step((Chunk(seq, np.full(n, 5), wanted),)))
        return model.plans.ubatch, model.plans.host_ubatch

    with machines.machine(made, monkeypatch):
        path = Path(model_file(MODEL))
        with LocalModel(path, backends=made.names, ctx=CONTEXT, planner="measured", eager=True) as llm:
            ubatch, at_once = llm.call(read)
    assert ubatch == LONG
    assert at_once <= 64
    assert sum(n for n, _ in heard) == PROMPT
    if link < 100:
        assert heard == [(LONG, True), (PROMPT - LONG, True)]
    else:
        assert max(n for n, _ in heard) == at_once
        assert not any(there for _, there in heard)
