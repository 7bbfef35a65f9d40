"""Passes of prompts where a device has no room for all weights: as long as the device takes them, each bucket
judged at its own size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hetrun.backend import Available, Backend, Descriptor, OwnMemory, WeightUse, registry
from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.loading import placement_planner
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import crossing_bytes, work_bytes
from hetrun.graph import Op
from hetrun.graph.signature import units
from hetrun.loader.open_model import open_model
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import PlanConditions, PlannerInputs
from hetrun.planner.options import Options, PlannerMachine, Wishes
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans
from hetrun.planner.plan_file import load_plan as load_saved
from hetrun.planner.segment_cost import CALL
from hetrun.planner.trials import LINK, TOKENS, alone, trials_of
from hetrun.planner.two_device.balance import operations
from hetrun.planner.two_device.planner import ConcurrentPlanner
from tests.models.tiny import TinyLlama
from tests.planner.test_three_ways import (
    BACKENDS,
    CROSSING,
    GPU,
    GRAPH,
    HOST,
    LAYERS,
    TOTAL,
    UNITS,
    size,
    where,
)
from tests.support.nulldevice import NullDevice
from tests.support.pass_listener import PassListener
from tests.support.rig import ThreadedDevice, graph_of, model_file, rig

AT_ONCE, LONG = 128, 2048  # tokens of passes of the host, and of the device
DRAM, CROSSES, VRAM = 3e5, 3e4, 4e6  # bytes a second
HOST_RATE, GPU_RATE = 2e6, 2e8  # bytes times tokens a second
DEPTHS = (1.0, 64.0, 1024.0)


def forecast() -> WorkTimes:
    """As if a probe had measured it: reading weights or computing with them, whatever takes longer."""
    found = WorkTimes()
    layers = [o for i in range(LAYERS) for o in operations(GRAPH, i)]
    for form, ops in ({o.form: o.ops for o in layers} | {u.form: u.ops for u in UNITS}).items():
        nbytes = sum(w.nbytes for op in ops for w in op.weights)
        for tokens in (*TOKENS, LONG):
            host = max(nbytes / DRAM, nbytes * tokens / HOST_RATE)
            gpu = 1e-4 + max(nbytes / VRAM, nbytes * tokens / GPU_RATE)
            crossing = 1e-4 + max(nbytes / CROSSES, nbytes * tokens / GPU_RATE)
            for depth in DEPTHS:
                for several in (False, True):
                    if tokens <= TOKENS[-1]:
                        found.learn(OpWork(form, HOST, 1, several), tokens, depth, host)
                    for name, seconds in ((GPU, gpu), (CROSSING, crossing)):
                        found.learn(OpWork(form, name, 1, several), tokens, depth, seconds)
                        found.learn(OpWork(form, alone(name), 1, several), tokens, depth, seconds)
    for name in (GPU, CROSSING):
        found.learn_fact(CALL, name, 1e-4)
        found.learn_fact(LINK, name, 1e12)
    return found


@cache
def planned(ubatch: int, host_ubatch: int) -> tuple[PlanSet, ConcurrentPlanner]:
    planner = ConcurrentPlanner(
        GRAPH, BACKENDS, forecast(), PlannerInputs((1,), (HOST, GPU, CROSSING), host_ubatch=host_ubatch)
    )
    buckets = dict.fromkeys(BUCKETS, (1, (Placement("", HOST, "a test"),)))
    plans = PlanSet(make_plans(GRAPH, buckets, (GPU, CROSSING)), ubatch, "", host_ubatch=host_ubatch)
    home = frozenset((i, HOST) for i in range(len(UNITS)))
    room = {GPU: TOTAL // 4}
    now = PlanConditions(1 << 40, home, home, frozenset(BACKENDS), {}, {}, eager=True, own_room=room)
    for _ in range(4):
        if (proposal := planner.propose(plans, now)) is None:
            return plans, planner
        plans = proposal.plans
        now = replace(now, held=(now.held | proposal.bring) - proposal.drop, parts=proposal.parts)
    pytest.fail("the planner does not come to an end")


def crossing_of_a_token(plans: PlanSet, plan: Plan) -> float:
    """Bytes of weights for each token of a long prompt."""
    return where(plan)[CROSSING] / plans.most_of(plan)


def test_everything_crosses_for_a_long_prompt_and_little_of_it_for_each_token() -> None:
    """What crosses for one pass of the device would have crossed for sixteen of the host's."""
    plans, planner = planned(LONG, AT_ONCE)
    long = plans.plans["513+"]
    assert long.on_devices
    # Of its last layer the host may take what is computed for one row.
    assert where(long)[HOST] <= size(UNITS[-2])
    assert plans.most_of(long) == LONG
    assert 0 < crossing_of_a_token(plans, long) <= TOTAL / LONG
    one = where(plans.plans["1"])
    assert one[HOST] > one[CROSSING], "LIA's other half: the host reads its weights faster than they cross"
    long_s = planner.pass_seconds(long, LONG, LONG / 2)
    short, _ = planned(AT_ONCE, 0)
    plan = short.plans["65-256"]
    assert where(plan)[HOST] > 0
    short_s = planner.pass_seconds(plan, AT_ONCE, LONG / 2)
    assert long_s
    assert short_s
    assert long_s / LONG < 0.5 * short_s / AT_ONCE
    expected = plans.expected["513+"]
    assert expected.tokens == LONG
    assert sum(seconds for seconds, _ in expected.segments.values()) == pytest.approx(long_s, rel=0.1)


def test_a_host_that_has_a_part_makes_shorter_passes_and_is_judged_by_them() -> None:
    plans, planner = planned(LONG, AT_ONCE)
    mixed = (Placement("", HOST, "a test"), Placement("blk.1", CROSSING, "a test"))
    plan = make_plans(GRAPH, {"513+": (1, mixed)}, (GPU, CROSSING))["513+"]
    assert not plan.on_devices
    assert plans.most_of(plan) == AT_ONCE
    found = planner.pass_seconds(plan, LONG, 64.0)
    one = planner.pass_seconds(plan, AT_ONCE, 64.0)
    assert found
    assert one
    assert found == pytest.approx(LONG / AT_ONCE * one)


def test_devices_that_take_turns_too_often_leave_too_much_on_the_host() -> None:
    """Each value that crosses lies there, page-locked."""
    placed = [Placement("", CROSSING, ""), Placement("token_embd", HOST, "")]
    few = make_plans(GRAPH, {"513+": (1, tuple(placed))}, (GPU, CROSSING))["513+"]
    placed += [Placement(u.scope, GPU, "") for u in UNITS[2:-1:2]]
    many = make_plans(GRAPH, {"513+": (1, tuple(placed))}, (GPU, CROSSING))["513+"]
    assert (few.on_devices, many.on_devices) == (True, False)


def test_devices_are_measured_at_their_own_size() -> None:
    def sizes(device: bool) -> set[int]:
        trials = trials_of(GRAPH, units(GRAPH), GPU, False, (1,), 4096, LONG, (), device)
        return {t.tokens * t.sequences for t in trials if t.name.startswith("blk")}

    assert sizes(True) == {*TOKENS, LONG}
    assert sizes(False) == {*TOKENS}


# --- what runs

TINY = TinyLlama("long-passes", layers=2, context=1024)


def test_passes_are_cut_by_the_plan_that_runs_them() -> None:
    graph, heard = graph_of(TINY), list[tuple[str, int]]()
    device: Backend = ThreadedDevice(NullDevice("far"))
    backends = {"host": NullDevice("host"), "far": device}
    there = (Placement("", "far", ""), Placement("embed", "host", ""))
    buckets = dict.fromkeys(BUCKETS, (1, (Placement("", "host", ""),))) | {"513+": (1, there)}
    plans = PlanSet(make_plans(graph, buckets, ("far",)), 600, "a test", host_ubatch=200)
    everywhere = {b: (1, (Placement("", "host", ""),)) for b in BUCKETS}
    host = replace(plans, plans=make_plans(graph, everywhere, ("far",)))
    made = rig(TINY, backends, plans=plans, context=1024, ubatch=600)

    def hear(ran: PassTiming) -> None:
        heard.append((ran.bucket, ran.tokens))

    made.executor.observe(PassListener(hear))
    seq, text = made.kv.alloc(), [5] * 600

    def run(n: int) -> list[tuple[str, int]]:
        heard.clear()
        logits = made.step((seq, text[:n], [n - 1]))
        assert logits.argmax(-1).tolist() == [6]
        return heard[:]

    assert run(600) == [("513+", 600)]
    made.kv.truncate(seq, 0)
    # Of 450 tokens the host makes passes, by the plan for 450; what is left has one of its own.
    assert run(450) == [("257-512", 200), ("257-512", 200), ("33-64", 50)]
    made.kv.truncate(seq, 0)
    made.executor.adopt(host)
    assert run(600) == [("513+", 200)] * 3
    made.close()


def test_a_saved_plan_keeps_how_its_passes_are_cut(tmp_path: Path) -> None:
    plans, _ = planned(LONG, AT_ONCE)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plans.to_json()))
    saved = load_saved(path, GRAPH)
    assert (saved.ubatch, saved.host_ubatch) == (LONG, AT_ONCE)
    data = plans.to_json()
    old = [p | {"bucket": "257+"} for p in data["plans"][-1:]]
    path.write_text(json.dumps(data | {"plans": [*data["plans"][:-2], *old]}))
    buckets = load_saved(path, GRAPH).buckets
    assert buckets["257-512"] == buckets["513+"] == saved.buckets["513+"]


# --- what is decided before weights are read


class Gpu(NullDevice):
    """Too small for the model; takes passes of `LONG` tokens."""

    asynchronous = True

    def grant(self, nbytes: int | None) -> OwnMemory:
        return OwnMemory(1 << 20, (1 << 20) - (16 << 10))

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)

    def most_at_once(self, ops: Sequence[Op]) -> int:
        return LONG


@contextmanager
def prepared(
    monkeypatch: pytest.MonkeyPatch, cores: int, ram: int | None = None, planner: str = "measured"
) -> Iterator[LoadPlan]:
    monkeypatch.setattr(placement_planner, "this_machine", lambda: PlannerMachine(cores))
    # As if the model were one that keeps cores busy.
    monkeypatch.setattr("hetrun.planner.static.FLOPS_PER_CORE", 2e7)
    described = [
        Descriptor(name, lambda: Available("a test"), make, preference=1000 - i, own_memory=name == "gpu")
        for i, (name, make) in enumerate(
            {"gpu": lambda: Gpu("gpu"), "cpu": lambda: NullDevice("cpu")}.items()
        )
    ]
    undo = [registry.register(one) for one in described]
    try:
        options = Options(Wishes(), ("gpu", "cpu"), ctx=256, ram=ram, planner=planner)
        found = prepare(open_model(model_file(TINY)), options)
        yield found
        for backend in found.backends.values():
            backend.close()
    finally:
        for each in undo:
            each()


def test_passes_of_a_device_do_not_depend_on_the_host_s_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for cores in (2, 16):
        with prepared(monkeypatch, cores) as decided:
            plans = decided.plans
            assert plans.backends == ["cpu"], "what is measured decides later"
            found[cores] = plans.ubatch, plans.host_ubatch
            assert plans.memory["graphs and scratch"] >= crossing_bytes(decided.graph, LONG)
            assert (
                sum(plans.memory[name] for name in ("weights", "graphs and scratch")) <= plans.memory["limit"]
            )
            assert "as many as gpu has room for" in plans.ubatch_why
    assert {ubatch for ubatch, _ in found.values()} == {LONG}
    assert found[2][1] < found[16][1] <= 512
    with prepared(monkeypatch, 2, planner="static") as decided:
        assert (decided.plans.ubatch, decided.plans.host_ubatch) == (found[2][1], 0)


def test_passes_stay_within_the_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(monkeypatch, 2) as decided:
        graph, host = decided.graph, decided.plans.host_ubatch
        memory = decided.plans.memory
        most = memory["graphs and scratch"]
        fixed = sum(n for name, n in memory.items() if name not in ("KV of all, at most", "left", "limit"))
    own = work_bytes(graph, host)
    assert own < most
    for less in (0, (most - own) // 2, most):
        with prepared(monkeypatch, 2, ram=fixed + (1 << 16) - less) as decided:
            plans = decided.plans
            n = plans.ubatch
            assert n == LONG if not less else n < LONG
            assert n == host or crossing_bytes(graph, n) <= most - less + (1 << 16)


def test_values_of_a_long_pass_are_those_of_short_ones() -> None:
    """Logits of the executor that cuts are those of one that does not."""
    host = {"host": NullDevice("host")}
    everywhere = {b: (1, (Placement("", "host", ""),)) for b in BUCKETS}
    plans = PlanSet(make_plans(graph_of(TINY), everywhere), 600, "a test", host_ubatch=64)
    text, found = [i % 250 for i in range(300)], []
    for each in (plans, replace(plans, host_ubatch=0)):
        made = rig(TINY, host, plans=each, context=1024)
        found.append(made.step((made.kv.alloc(), text, range(0, 300, 7))))
        made.close()
    assert (found[0] == found[1]).all()
