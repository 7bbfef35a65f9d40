"""Plans for two devices at once, from times that a test makes up: against every assignment, and what they
cost, keep and say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Backend, Precision, WeightUse
from hetrun.executor.autotune.setup import Setup, planner_for
from hetrun.graph import Graph, Op
from hetrun.graph.signature import units
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import WORTH, OnlinePlanner, PlanConditions, PlannerInputs, Proposal
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, Stages, cut, make_plans
from hetrun.planner.plan_file import load_plan
from hetrun.planner.segment_cost import CALL
from hetrun.planner.trials import LINK, TOKENS, alone
from hetrun.planner.two_device.balance import PARTS, operations
from hetrun.planner.two_device.candidates import CandidateSet, PlacementCandidate, share
from hetrun.planner.two_device.cost import PassSetting
from hetrun.planner.two_device.expert_cost import OperationCost
from hetrun.planner.two_device.plan_choice import is_concurrent
from hetrun.planner.two_device.planner import ConcurrentPlanner
from tests.models.tiny import TinyLlama
from tests.support.nulldevice import NullDevice
from tests.support.rig import graph_of

LAYERS = 2
GRAPH = graph_of(TinyLlama("concurrent", layers=LAYERS, kv_heads=2))
UNITS = units(GRAPH)
OPERATIONS = [operations(GRAPH, i) for i in range(LAYERS)]
NAMES = [o.name for o in OPERATIONS[0]]
OUTSIDE = 0.5  # of each unit that is in no layer
BUCKET = "257-512"
HOST, FAR = "host", "far"


class Far(NullDevice):
    """Works by itself; its weights stay with it, or come over a link."""

    asynchronous = True

    def __init__(self, streamed: bool, error: float = 0.0) -> None:
        super().__init__(FAR)
        self._streamed, self._error = streamed, error

    def rounding(self, op: Op) -> float:
        return self._error

    def streams(self, wanted: WeightUse) -> bool:
        return self._streamed


Times = Mapping[str, float]  # by operation


def learn(forecast: WorkTimes, form: str, backend: str, one: float, many: float) -> None:
    """What a pass of one token takes, and what one of more."""
    for tokens in TOKENS:
        for depth in (1.0, 256.0, 1024.0):
            for several in (False, True):
                seconds = one if tokens == 1 else many
                forecast.learn(OpWork(form, backend, 1, several), tokens, depth, seconds)


def measured(host: Times, far: Times, load: Times | None = None, call: float = 0.0) -> WorkTimes:
    """As if a probe had measured both sides. Passes of one token take no computing on the other device."""
    forecast, load = WorkTimes(), load or dict.fromkeys(NAMES, 0.0)
    for layer in OPERATIONS:
        for o in layer:
            learn(forecast, o.form, HOST, host[o.name], host[o.name])
            one = call + load[o.name] if any(load.values()) else far[o.name]
            learn(forecast, o.form, alone(FAR), one, load[o.name] + far[o.name])
    for unit in UNITS:
        names = {PARTS[op.scope.split(".")[-1]] for op in unit.ops if op.scope.split(".")[-1] in PARTS}
        here = sum(host[n] for n in names) or OUTSIDE
        there = sum(load[n] + far[n] for n in names) or 2 * OUTSIDE
        learn(forecast, unit.form, HOST, here, here)
        learn(forecast, unit.form, FAR, there, there)
        learn(forecast, unit.form, alone(FAR), there, there)
    forecast.learn_fact(CALL, FAR, call)
    forecast.learn_fact(LINK, FAR, 1e12)
    return forecast


def planner(times: WorkTimes, streamed: bool = True) -> ConcurrentPlanner:
    backends: dict[str, Backend] = {HOST: NullDevice(HOST), FAR: Far(streamed)}
    return ConcurrentPlanner(GRAPH, backends, times, PlannerInputs((1,), (HOST, FAR)))


def on_the_host() -> PlanSet:
    buckets = dict.fromkeys(BUCKETS, (1, (Placement("", HOST, "a test"),)))
    return PlanSet(make_plans(GRAPH, buckets), 512, "a test")


def now(room: int = 1 << 40, **more: object) -> PlanConditions:
    home = frozenset((i, HOST) for i in range(len(UNITS)))
    return PlanConditions(room, home, home, frozenset([HOST, FAR]), {}, {}, eager=True, **more)  # type: ignore[arg-type]


def follow(before: PlanConditions, proposal: Proposal) -> PlanConditions:
    """What the autotuner makes of a proposal."""
    held = (before.held | proposal.bring) - proposal.drop
    return replace(before, held=held, parts=proposal.parts)


def same(seconds: float) -> dict[str, float]:
    return dict.fromkeys(NAMES, seconds)


def without(kind: str) -> pytest.MonkeyPatch:
    """No candidates of one kind."""
    patch = pytest.MonkeyPatch()
    patch.setattr(CandidateSet, kind, lambda *args, **kwargs: PlacementCandidate((), 0.0))
    return patch


def sides_of(plan: Plan, layer: int) -> dict[str, str]:
    """Where each operation of a layer runs."""
    found = {}
    for s in plan.segments:
        for op in s.ops:
            parts = op.scope.split(".")
            if parts[:2] == ["blk", str(layer)] and parts[-1] in PARTS:
                found[PARTS[parts[-1]]] = s.backend
    return found


# --- balanced

EIGHTHS = st.integers(0, 80).map(lambda n: n / 8)
MACHINES = st.tuples(*[st.lists(EIGHTHS.map(lambda t: t + 0.125), min_size=7, max_size=7)] * 3)


@given(MACHINES)
@settings(max_examples=25)
def test_layers_are_balanced_as_by_trying_every_assignment(machine: tuple[list[float], ...]) -> None:
    host, far, load = (dict(zip(NAMES, times, strict=True)) for times in machine)
    load["score"] = 0.0  # it has no weights; keys and values stay where they are
    rest = 2 * OUTSIDE / LAYERS
    patch = without("_shared")
    try:
        proposal = planner(measured(host, far, load)).propose(on_the_host(), now())
    finally:
        patch.undo()

    def makespan(here: Mapping[str, bool]) -> float:
        mine = sum(host[n] if here[n] else far[n] for n in NAMES)
        return max(rest + mine, sum(load[n] for n in NAMES if not here[n]))

    every = [dict(zip(NAMES, here, strict=True)) for here in product((False, True), repeat=len(NAMES))]
    best = min(map(makespan, every))
    plan = proposal.plans.plans[BUCKET] if proposal else None
    if plan is None or not is_concurrent(plan):
        by_turns = OnlinePlanner(
            GRAPH,
            {HOST: NullDevice(HOST), FAR: Far(True)},
            measured(host, far, load),
            PlannerInputs((1,), (HOST, FAR)),
        )
        other = by_turns.propose(on_the_host(), now())
        plans = other.plans if other else by_turns.annotate(on_the_host(), now())
        took = sum(seconds for seconds, _ in plans.expected[BUCKET].segments.values())
        assert LAYERS * best > (1 - WORTH) * took * (1 - 1e-9)
        return
    for layer in range(LAYERS):
        here = {name: backend == HOST for name, backend in sides_of(plan, layer).items()}
        assert makespan(here) == pytest.approx(best)
    assert proposal is not None
    facts = next(p for p in proposal.plans.to_json()["plans"] if p["bucket"] == BUCKET)
    assert facts["expected"]["predicted_s"] <= LAYERS * best * (1 + 1e-9)


# The paper's figure 6: 58.3 ms on the host, and 39.0 balanced.
CPU = dict(zip(NAMES, (4.7, 4.7, 4.7, 3.5, 4.7, 18.0, 18.0), strict=True))
GPU = dict(zip(NAMES, (8.0, 8.0, 8.0, 11.5, 8.0, 31.0, 31.0), strict=True))


def test_the_papers_layers_are_balanced_and_say_so(tmp_path: Path) -> None:
    patch = without("_shared")
    decide = planner(measured(CPU, same(1e-6), GPU))
    proposal = decide.propose(on_the_host(), now())
    patch.undo()
    assert proposal is not None
    plan = proposal.plans.plans[BUCKET]
    expected = proposal.plans.expected[BUCKET].segments
    took = sum(max(expected[s.name][0] for s in stage) for stage in plan.stages)
    assert took == pytest.approx(LAYERS * 39, abs=1.5)
    assert "host and far at the same time, layers balanced" in proposal.reason
    assert "less time expected" in proposal.reason
    assert {b for b, _ in proposal.parts} >= {FAR}
    assert proposal.plans.memory["parts for far"] > 0
    assert any("balanced: this layer takes" in p.why for p in plan.placements)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(proposal.plans.to_json()))
    assert load_plan(saved, GRAPH).buckets[BUCKET] == (1, plan.placements)


def test_a_balanced_plan_stays_until_times_change() -> None:
    times = measured(CPU, same(1e-6), GPU)
    decide, before = planner(times), now()
    first = decide.propose(on_the_host(), before)
    assert first is not None
    assert decide.propose(first.plans, follow(before, first)) is None
    # The link has become so slow that nothing is worth its way.
    for o in {o.form: o for layer in OPERATIONS for o in layer}.values():
        for several in (False, True):
            times.rescale(OpWork(o.form, alone(FAR), 1, several), 1000.0)
    second = decide.propose(first.plans, follow(before, first))
    assert second is not None
    assert not any(map(is_concurrent, second.plans.plans.values()))
    assert "both devices at the same time are not faster" in second.reason
    assert not second.parts
    assert second.spare == first.parts


def test_passes_that_take_longer_than_planned_decide() -> None:
    patch = without("_shared")
    times = measured(CPU, same(1e-6), GPU)
    decide, before = planner(times), now()
    first = decide.propose(on_the_host(), before)
    patch.undo()
    assert first is not None
    plan = first.plans.plans[BUCKET]
    said = decide.pass_seconds(plan, 512, 256.0)
    assert said
    for factor in (1.5, 1.2):
        decide.observe(BUCKET, factor)
    assert decide.pass_seconds(plan, 512, 256.0) == pytest.approx(1.8 * said)
    second = decide.propose(first.plans, follow(before, first))
    assert second is not None
    assert not is_concurrent(second.plans.plans[BUCKET])


def test_keys_and_values_have_to_pay_for_their_way() -> None:
    """Score is better on the other device; with much to move first, it stays where it is."""
    host, load = same(1.0) | {"score": 3.0}, same(1.0) | {"score": 0.0}
    far = same(0.01) | {"score": 0.5}
    patch = without("_shared")
    for kv_bytes, backend in ((0, FAR), (1 << 50, HOST)):
        proposal = planner(measured(host, far, load)).propose(on_the_host(), now(kv_bytes=kv_bytes))
        assert proposal is not None
        assert sides_of(proposal.plans.plans[BUCKET], 0)["score"] == backend
    patch.undo()


# --- shared out

COSTS = st.builds(
    lambda seconds, fixed, load: OperationCost(seconds, fixed * seconds, load),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.floats(0, 10),
)


@given(COSTS, COSTS, st.integers(2, 16))
def test_both_end_at_the_same_time_as_far_as_pieces_allow(
    here: OperationCost, there: OperationCost, pieces: int
) -> None:
    some, seconds = share(here, there, pieces)

    def ends(n: int) -> tuple[float, float]:
        theirs = max(there.fixed + n / pieces * (there.seconds - there.fixed), n / pieces * there.load)
        return here.fixed + (1 - n / pieces) * (here.seconds - here.fixed), theirs

    assert seconds == pytest.approx(max(ends(some)))
    # One piece more or less, and one of the two is done no earlier.
    assert all(max(ends(n)) >= seconds * (1 - 1e-9) for n in range(1, pieces))
    assert share(here, there, 1)[1] == float("inf")


def test_products_are_shared_out_where_two_devices_hold_all_weights() -> None:
    proposal = planner(measured(same(1.0), same(1.0)), streamed=False).propose(on_the_host(), now())
    assert proposal is not None
    plan = proposal.plans.plans[BUCKET]
    borders = {(p.share.kind, p.share.b / p.share.of) for p in plan.placements if p.share and not p.share.a}
    assert borders == {("heads", 0.5), ("rows", 0.5)}
    assert [{s.backend for s in stage} for stage in plan.stages if len(stage) > 1]
    expected = proposal.plans.expected[BUCKET].segments
    took = sum(max(expected[s.name][0] for s in stage) for stage in plan.stages)
    # Attention by heads and every other product in half the time; what is outside of layers by the host.
    assert took == pytest.approx(LAYERS * 7 / 2 + 2 * OUTSIDE, rel=0.02)
    assert "operations divided between them" in proposal.reason


def test_what_was_judged_before_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Sequence[Placement]] = []

    def counted(graph: Graph, placements: Sequence[Placement], alone: Collection[str]) -> Stages:
        cuts.append(placements)
        return cut(graph, placements, alone)

    monkeypatch.setattr("hetrun.planner.two_device.planner.cut", counted)
    decide = planner(measured(same(1.0), same(1.0)), streamed=False)
    first, before = decide.propose(on_the_host(), now()), len(cuts)
    second = decide.propose(on_the_host(), now())
    assert first
    assert second
    assert first.plans.plans == second.plans.plans
    assert before
    assert len(cuts) == before == len({*map(tuple, cuts)})


def test_attention_is_shared_by_heads_where_each_crossing_costs() -> None:
    """Operations of their own would pay for six calls; heads stay together until results are added."""
    far = same(0.9)
    times = measured(same(1.0), far, call=0.45)
    proposal = planner(times, streamed=False).propose(on_the_host(), now())
    assert proposal is not None
    plan = proposal.plans.plans[BUCKET]
    kinds = {p.share.kind: p.scope for p in plan.placements if p.share}
    assert kinds["heads"].endswith(".attn")


def test_a_gain_that_is_too_small_shares_nothing_out() -> None:
    times = measured(same(1.0), same(40.0), call=0.99)
    assert planner(times, streamed=False).propose(on_the_host(), now()) is None


@pytest.mark.parametrize(("error", "precision", "both"), [(0.0, "exact", True), (0.01, "exact", False),
                                                       (0.01, "fast", True)])  # fmt: skip
def test_what_rounds_more_must_gain_more(error: float, precision: Precision, both: bool) -> None:
    """A sixteenth or an eighth of each product goes to a device that is much slower: 5 % less."""
    backends: dict[str, Backend] = {HOST: NullDevice(HOST), FAR: Far(False, error)}
    times = measured(same(1.0), same(7.5))
    decide = ConcurrentPlanner(GRAPH, backends, times, PlannerInputs((1,), (HOST, FAR), precision))
    assert bool(decide.propose(on_the_host(), now())) == both


# --- memory, and who pays


def test_parts_stay_within_the_room() -> None:
    times = measured(CPU, same(1e-6), GPU)
    home = sum(planner(times).nbytes[i, HOST] for i in range(len(UNITS)))
    for room in (home, home + 10_000, 1 << 40):
        decide = planner(times)
        proposal = decide.propose(on_the_host(), now(room))
        parts = proposal.parts if proposal else frozenset()
        needed = sum(decide._backends[b].resident_bytes([use]) for b, use in parts)
        assert home + needed <= room
        assert bool(needed) == (room == 1 << 40)


class FarWithMemory(Far):
    """Weights that it holds take nothing of the host's memory."""

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)


@pytest.mark.parametrize("room", [0, 10_000, 1 << 40])
def test_parts_stay_within_a_device_s_own_room(room: int) -> None:
    backends: dict[str, Backend] = {HOST: NullDevice(HOST), FAR: FarWithMemory(True)}
    decide = ConcurrentPlanner(
        GRAPH, backends, measured(CPU, same(1e-6), GPU), PlannerInputs((1,), (HOST, FAR))
    )
    before = replace(on_the_host(), devices={FAR: {"limit": room}})
    here = now(own_room={FAR: room})
    proposal = decide.propose(before, here)
    parts = proposal.parts if proposal else frozenset()
    needed = backends[FAR].device_bytes([use for b, use in parts if b == FAR])
    assert needed <= room
    assert bool(needed) == (room == 1 << 40)
    if not proposal or not needed:
        return
    assert proposal.plans.devices == {FAR: {"limit": room, "parts": needed}}
    assert not any(name.startswith("parts for far") for name in proposal.plans.memory)
    # There is no room for others beside what it has, and what it has stays.
    after = replace(follow(here, proposal), own_room={FAR: needed})
    again = decide.propose(proposal.plans, after)
    assert again is None or again.parts <= proposal.parts


def test_nothing_is_brought_in_before_it_pays() -> None:
    times = measured(CPU, same(1e-6), GPU)
    times.learn_fact("upload_bytes_s", FAR, 1000.0)
    quiet = replace(now(), eager=False)
    assert planner(times).propose(on_the_host(), quiet) is None
    proposal = planner(times).propose(on_the_host(), replace(quiet, waiting=1 << 20))
    assert proposal is not None
    assert is_concurrent(proposal.plans.plans[BUCKET])


# --- without such a backend

SETUP = Setup({}, (HOST,), (1,), 1 << 40, 512, True, None)


def test_without_a_backend_that_works_by_itself_nothing_is_different() -> None:
    backends: dict[str, Backend] = {HOST: NullDevice(HOST), FAR: Far(True)}
    assert type(planner_for(GRAPH, backends, WorkTimes(), SETUP)) is OnlinePlanner
    both = replace(SETUP, candidates=(HOST, FAR))
    assert type(planner_for(GRAPH, backends, WorkTimes(), both)) is ConcurrentPlanner


def test_without_one_nothing_is_imported() -> None:
    code = """
import sys
import hetrun.executor.planned_model, hetrun.cli, hetrun.executor.autotune
names = ("concurrent", "two", "sides", "balance")
assert not any("hetrun.planner." + name in sys.modules for name in names)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_never_measured_is_left_alone() -> None:
    times = measured(CPU, same(1e-6), GPU)
    known = WorkTimes()
    for unit in UNITS:
        for backend in (HOST, FAR):
            seconds = times.seconds(OpWork(unit.form, backend, 1), 512, 256.0)
            assert seconds is not None
            learn(known, unit.form, backend, seconds, seconds)
    assert planner(known).propose(on_the_host(), now()) is None


def test_operations_are_tried_on_every_side() -> None:
    decide = planner(WorkTimes())
    here, there = (decide.more_trials(b, 2048, 512) for b in (HOST, FAR))
    assert {t.work.backend for t in here} == {HOST}
    assert {t.work.backend for t in there} == {alone(FAR)}
    for o in (o for layer in OPERATIONS for o in layer):
        for tokens in TOKENS:
            works = [t.work for t in there if t.tokens * t.sequences == tokens]
            assert decide.sides.work(o, FAR, PassSetting(tokens, 1.0, 1)) in works
    deep = [t for t in there if t.seen]
    assert {t.name for t in deep} == {"score"}


def test_operations_are_tried_where_they_do_not_run_and_a_faster_link_changes_the_plan() -> None:
    patch = without("_shared")
    times = measured(CPU, same(1e-6), GPU)
    decide, before = planner(times), now()
    first = decide.propose(on_the_host(), before)
    assert first is not None
    plan = first.plans.plans[BUCKET]
    here = {(o.form, sides_of(plan, i)[o.name]) for i, of in enumerate(OPERATIONS) for o in of}
    trials = decide.other_trials(plan, 100.0)
    assert not {(t.form, t.backend) for t in trials} & here
    assert {t.backend for t in trials} == {HOST, FAR}
    assert not decide.other_trials(on_the_host().plans[BUCKET], 100.0)
    for trial in (t for t in decide.more_trials(FAR, 2048, 512) if t.tokens * t.sequences == 1):
        for work in (trial.work, trial.work.other):
            times.rescale(work, 0.25)
    second = decide.propose(first.plans, follow(before, first))
    patch.undo()
    assert second is not None
    more = [sum(b == FAR for b in sides_of(p.plans.plans[BUCKET], 0).values()) for p in (first, second)]
    assert more[1] > more[0]
