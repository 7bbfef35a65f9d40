"""A mixture on the engine's thread and on a device with little memory: the experts that tokens choose most
come to lie there, others when tokens choose others, and answers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.backend import (
    Available,
    Buffer,
    Descriptor,
    Floats,
    OwnMemory,
    Pass,
    ReadInto,
    WeightUse,
    registry,
)
from hetrun.backend.interpreter import OpFunction
from hetrun.backends.reference.moe import route
from hetrun.backends.reference.ops import TABLE
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError
from hetrun.executor.autotune import autotuner, comparison_scheduler
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.autotune.measurement import backend_probe
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Op
from hetrun.graph.ops import Moe
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.expert_stats import known_choices
from hetrun.planner.two_device.balance import HostLink
from hetrun.planner.two_device.hot_experts import sets_of
from tests.engine.simulated import MEASURING
from tests.models import cases_hf, tiny
from tests.models.hf import Row
from tests.support.metered import Metered, MeteredBuffer
from tests.support.rig import graph_of, model_file
from tests.support.timeline import DEVICE, HOST, Host, Simulated

pytestmark = pytest.mark.slow

CONFIG = {**cases_hf.EXPERTS, "num_local_experts": 16, "num_experts_per_tok": 2}
MODEL = Row("hot", "mixtral", CONFIG)
MIXTURES = [op for op in graph_of(MODEL).ops if isinstance(op.attrs, Moe)]
EACH = sum(w.nbytes for w in MIXTURES[0].weights[1:]) // 16
ROOM = 20 * EACH  # of 32 experts; all of one layer have to fit, to be measured
LENGTH = 12
# Seconds of an op, and of an expert for each row: all that tokens choose is better on the device.
OP_S, HOST_S, DEVICE_S = 2e-4, 1e-3, 2e-5
ROUNDS = 4  # after which what was chosen before is worth next to nothing
LONGEST_S = 60.0  # by the clock of the timeline, which everything that measures reads


def pairs(op: Op, x: list[Floats], w: list[Floats]) -> int:
    """How many times an expert computes a row."""
    a = op.attrs
    assert isinstance(a, Moe)
    chosen, _ = route(a, x[0] @ w[0].T, a.others(w))
    return int((~np.isin(chosen, [*a.without])).sum())


def timed(timeline: Simulated, lane: str, each_s: float) -> dict[str, OpFunction]:
    """The reference's functions, with what they take on a lane."""

    def with_time(function: OpFunction) -> OpFunction:
        def run(op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
            out = function(op, x, w, work, kv)
            timeline.takes(lane, OP_S + (each_s * pairs(op, x, w) if op.kind == "moe" else 0.0))
            return out

        return run

    return {kind: with_time(function) for kind, function in TABLE.items()}


class Near(Metered):
    """A metered device whose weights all stay, in memory that it has to itself."""

    def __init__(self, timeline: Simulated) -> None:
        table = timed(timeline, DEVICE, DEVICE_S)
        link = HostLink(1e10, 1e-6)
        super().__init__(1 << 30, link, timeline, resident=lambda weight: True, name="near", table=table)
        self.most = 0

    def grant(self, nbytes: int | None) -> OwnMemory:
        return OwnMemory(nbytes or 1 << 30, 0)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return super().resident_bytes(wanted)

    def streams(self, wanted: WeightUse) -> bool:
        return False

    def upload(self, wanted: WeightUse, read: ReadInto) -> Buffer:
        if self.kept_bytes + self.device_bytes([wanted]) > ROOM:
            raise BudgetError(f"there is no room for {wanted.weight.name}")
        buffer = super().upload(wanted, read)
        self.most = max(self.most, self.kept_bytes)
        return buffer

    def release(self, buffer: Buffer) -> None:
        assert isinstance(buffer, MeteredBuffer)
        self.kept_bytes -= buffer.host.nbytes


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    timeline = Simulated()
    for name in ("executor", *(f"autotune.{part}" for part in MEASURING)):
        monkeypatch.setattr(f"hetrun.executor.{name}.perf_counter", timeline.now)
    return timeline


@pytest.fixture
def near(timeline: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    made, here = Near(timeline), Available("a test")

    def host() -> Host:
        return Host(timeline, timed(timeline, HOST, HOST_S))

    undo = [
        registry.register(Descriptor("host", lambda: here, host, preference=90)),
        registry.register(Descriptor("near", lambda: here, lambda: made, preference=10, own_memory=True)),
    ]
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    monkeypatch.setattr("hetrun.planner.expert_stats.EVERY", 1)
    monkeypatch.setattr("hetrun.planner.expert_stats.MEMORY", 200.0)
    monkeypatch.setattr(autotuner, "LOOK_S", 0.0)
    monkeypatch.setattr(comparison_scheduler, "LEAST_REST_S", 0.0)
    monkeypatch.setattr(backend_probe, "others_running", lambda: 0.0)
    yield made
    for each in undo:
        each()


def autotuner_of(loaded: LoadedModel) -> Autotuner:
    assert isinstance(loaded.model, PlannedModel)
    assert loaded.model.autotuner is not None
    return loaded.model.autotuner


def missed(loaded: LoadedModel) -> float:
    """Of what tokens choose, how much more the experts on the device could be, if they were others; 1 if
    there are none, or if what tokens choose is not known."""
    sets = sets_of(loaded.model.plans.plans.values(), "near")
    now = best = 0.0
    for op in MIXTURES:
        heat = autotuner_of(loaded).choices.likely(op.weights[0].name)
        if heat is None:
            return 1.0
        mine = sets.get(op.scope, ())
        now += float(heat[[*mine]].sum())
        best += float(np.sort(heat)[::-1][: len(mine)].sum())
    return 1 - now / best if best else 1.0


def talk_of(llm: LocalModel, timeline: Simulated, token: int) -> dict[str, tuple[int, ...]]:
    """Passes of one token again and again, with idle moments, until the experts that it chooses lie on the
    device."""

    def steps(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
        model, end = loaded.model, timeline.now() + LONGEST_S
        seq, chunk = model.alloc(), np.full(LENGTH, token)
        rounds = 0
        while timeline.now() < end and (rounds < ROUNDS or missed(loaded) > 0.1):
            rounds += 1
            for _ in range(20):
                model.truncate(seq, 0)
                model.step(Step((Chunk(seq, chunk, np.array([LENGTH - 1])),)))
                model.tend()
            model.tend(idle=True)
        model.free(seq)
        assert missed(loaded) <= 0.1, [c.reason for c in autotuner_of(loaded).changes]
        return sets_of(model.plans.plans.values(), "near")

    return llm.call(steps)


def test_experts_follow_what_tokens_choose(near: Near, timeline: Simulated) -> None:
    text = tiny.random_tokens(40, seed=11)
    with LocalModel(str(model_file(MODEL)), backends=["reference"], planner="static", kv_type="f32") as llm:
        expected = llm.logits(text)
    with LocalModel(
        str(model_file(MODEL)), backends=["host", "near"], vram=ROOM, threads=1, kv_type="f32", eager=True,
        planner="measured", ctx=256, ubatch=64,
    ) as llm:  # fmt: skip
        found = []
        for token in (7, 200):
            found.append(talk_of(llm, timeline, token))
            assert np.abs(llm.logits(text) - expected).max() < 1e-3
        assert found[0] != found[1]
        assert " of 16 experts, chosen by " in llm.plan.to_text()
        # Nothing is left of what was only measured.
        assert llm.plan.devices["near"]["parts"] == near.kept_bytes
    assert 0 < near.most <= ROOM
    # The next start knows what tokens chose.
    known = known_choices(graph_of(MODEL))
    assert all(known.likely(op.weights[0].name) is not None for op in MIXTURES)
