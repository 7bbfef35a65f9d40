"""Which experts of a mixture lie on a device: from times and choices that a test makes up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Backend, Floats, WeightUse, use_of
from hetrun.backend.expert_slots import ExpertSlots
from hetrun.graph import Constant, Graph, Op, Weight
from hetrun.graph.ops import Moe
from hetrun.graph.quant import by_name
from hetrun.graph.signature import units
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import PlanConditions, PlannerInputs, Proposal
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from hetrun.planner.plan_file import load_plan
from hetrun.planner.segment_cost import CALL
from hetrun.planner.trials import LINK, TOKENS, alone
from hetrun.planner.two_device.balance import operations
from hetrun.planner.two_device.expert_cost import OperationCost, hits, rates_of
from hetrun.planner.two_device.hot_experts import SPARE, sets_of
from hetrun.planner.two_device.plan_choice import is_concurrent
from hetrun.planner.two_device.planner import ConcurrentPlanner
from tests.models import cases_hf
from tests.support.nulldevice import NullDevice
from tests.support.rig import graph_of

N, USED, WIDTH = 32, 4, 64
HOST, FAR = "host", "far"
EXPERT = 3 * WIDTH * WIDTH * 4  # bytes
ROUTER = N * WIDTH * 4


def with_more_experts(graph: Graph) -> Graph:
    """The mixtures with enough experts for a choice; their weights are not read."""

    def weight(name: str, rows: int, cols: int) -> Weight:
        return Weight(name, (rows, cols), by_name("F32"), (Constant(bytes(4 * rows * cols), rows),))

    ops = []
    for op in graph.ops:
        if isinstance(op.attrs, Moe):
            attrs, width = Moe(N, USED, WIDTH, normalise=True), op.out.width
            shapes = [(N, width), (N * WIDTH, width), (N * WIDTH, width), (N * width, WIDTH)]
            weights = (weight(w.name, *s) for w, s in zip(op.weights, shapes, strict=True))
            op = replace(op, attrs=attrs, weights=tuple(weights))
        ops.append(op)
    return replace(graph, ops=tuple(ops))


GRAPH = with_more_experts(graph_of(cases_hf.MIXTRAL[0]))
UNITS = units(GRAPH)
LAYERS = [operations(GRAPH, i) for i in range(2)]
MIXTURES = [op for op in GRAPH.ops if isinstance(op.attrs, Moe)]
SCOPES, ROUTERS = [op.scope for op in MIXTURES], [op.weights[0].name for op in MIXTURES]
EACH = sum(w.nbytes for w in MIXTURES[0].weights[1:]) // N


class Far(NullDevice):
    """Works by itself, with memory of its own."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(FAR)

    def resident_bytes(self, wanted: object) -> int:
        return 0

    def device_bytes(self, wanted: object) -> int:
        assert isinstance(wanted, list | tuple)
        return sum(use.weight.nbytes for use in wanted)


class FarWithSlots(Far):
    """Experts come and go there without a new plan."""

    def expert_slots(self) -> ExpertSlots:
        return cast("ExpertSlots", object())  # planners only ask whether there are any

    def device_bytes(self, wanted: object) -> int:
        assert isinstance(wanted, list | tuple)
        return sum(use.weight.nbytes * (len(use.slots) / use.matrices if use.slots else 1) for use in wanted)

    def wants(self, ops: Sequence[Op]) -> tuple[WeightUse, ...]:
        return tuple(dict.fromkeys(use for op in ops for use in _with_slots(op)))


def _with_slots(op: Op) -> list[WeightUse]:
    uses, slots = [use_of(op, i) for i in range(len(op.weights))], getattr(op.attrs, "slots", ())
    return [replace(use, slots=slots) if use.use == "experts" else use for use in uses]


def learn(forecast: WorkTimes, form: str, backend: str, first: float, more: float) -> None:
    """A pass of one token, and what each further one takes."""
    for tokens in TOKENS:
        for depth in (1.0, 256.0, 1024.0):
            for several in (False, True):
                work = OpWork(form, backend, 1, several)
                forecast.learn(work, tokens, depth, first + more * (tokens - 1))


def measured() -> WorkTimes:
    """Mixtures take most of the time, and a tenth of it on the other device; all else is quick everywhere."""
    forecast, call = WorkTimes(), 1e-5
    for name, speed in ((HOST, 1.0), (alone(FAR), 0.1)):
        for layer in LAYERS:
            for o in layer:
                heavy = any(isinstance(op.attrs, Moe) for op in o.ops)
                first, more = (4e-3, 2e-3) if heavy else (1e-5, 1e-5)
                learn(forecast, o.form, name, call + speed * first, speed * more)
    for name, speed in ((HOST, 1.0), (FAR, 0.1), (alone(FAR), 0.1)):
        for unit in UNITS:
            heavy = any(isinstance(op.attrs, Moe) for op in unit.ops)
            first, more = (4e-3, 2e-3) if heavy else (4e-5, 1e-5)
            learn(forecast, unit.form, name, first * speed, more * speed)
    forecast.learn_fact(CALL, FAR, call)
    forecast.learn_fact(LINK, FAR, 1e12)
    return forecast


@dataclass
class Taste:
    """What tokens choose, as a test says."""

    known: dict[str, Floats]

    def likely(self, router: str) -> Floats | None:
        return self.known.get(router)


def skewed(first: int, share: float = 0.9, hot: int = 8) -> Floats:
    """Of all choices so much falls on some experts from a first one on, the nearest most."""
    heat = np.full(N, USED * (1 - share) / (N - hot), np.float32)
    order = (first + np.arange(hot)) % N
    weights = np.linspace(1.3, 0.7, hot)
    heat[order] = USED * share * weights / weights.sum()
    return np.minimum(heat, 1.0)


def planner(taste: Mapping[str, Floats], far: Far | None = None) -> ConcurrentPlanner:
    host = NullDevice(HOST)
    host.leaves_to_slots = True
    backends: dict[str, Backend] = {HOST: host, FAR: far or Far()}
    made = ConcurrentPlanner(GRAPH, backends, measured(), PlannerInputs((1,), (HOST, FAR)))
    made.listen(Taste(dict(taste)).likely)
    return made


def on_the_host() -> PlanSet:
    buckets = dict.fromkeys(BUCKETS, (1, (Placement("", HOST, "a test"),)))
    return PlanSet(make_plans(GRAPH, buckets), 512, "a test", devices={FAR: {}})


def now(room: int, **more: object) -> PlanConditions:
    home = frozenset((i, HOST) for i in range(len(UNITS)))
    started = frozenset([HOST, FAR])
    return PlanConditions(1 << 40, home, home, started, {}, {}, eager=True, own_room={FAR: room}, **more)  # type: ignore[arg-type]


def follow(before: PlanConditions, proposal: Proposal) -> PlanConditions:
    """What the autotuner makes of a proposal."""
    held = (before.held | proposal.bring) - proposal.drop
    return replace(before, held=held, parts=proposal.parts)


def experts(plans: PlanSet, bucket: str = "1") -> dict[str, tuple[int, ...]]:
    return sets_of([plans.plans[bucket]], FAR)


def on_device(moment: PlanConditions) -> int:
    """Bytes that lie there."""
    uses = [use for b, use in moment.parts if b == FAR]
    uses += [use for i, b in moment.held if b == FAR for use in Far().wants(UNITS[i].ops)]
    return FarWithSlots().device_bytes(list(dict.fromkeys(uses)))


BOTH = {ROUTERS[0]: skewed(3), ROUTERS[1]: skewed(20)}


# --- what experts take

HEATS = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12).map(lambda h: np.array(h, np.float32))


@given(HEATS, st.integers(1, 300), st.floats(0, 1), st.floats(1, 400), st.floats(0, 0.1))
@settings(max_examples=100)
def test_all_experts_together_take_what_was_measured(
    heat: Floats, tokens: int, one: float, growth: float, fixed: float
) -> None:
    many = OperationCost(fixed + one * growth, fixed)
    found = rates_of(OperationCost(fixed + one, fixed), many, heat, tokens)
    assert found.seconds(heat, tokens) == pytest.approx(many.seconds, rel=1e-4, abs=1e-9)
    assert found.expert >= -1e-9
    assert found.token >= 0
    half = list(range(len(heat) // 2))
    rest = list(range(len(heat) // 2, len(heat)))
    if many.seconds > many.fixed:
        assert found.part(heat, half, tokens) + found.part(heat, rest, tokens) == pytest.approx(1, rel=1e-4)
    assert found.up_to(heat, tokens)[-1] == pytest.approx(many.seconds, rel=1e-4, abs=1e-9)


def test_more_tokens_meet_at_the_same_experts() -> None:
    heat = np.array([0.5, 0.25], np.float32)
    assert hits(heat, 2) == pytest.approx([0.75, 0.4375])
    # Reading takes all the time: what a pass takes grows as experts are hit, and a second token is free.
    found = rates_of(OperationCost(0.75, 0.0), OperationCost(0.75 * 1.1875 / 0.75, 0.0), heat, 2)
    assert (found.expert, found.token) == pytest.approx((1.0, 0.0))
    # Computing does: each token takes as long as the first.
    found = rates_of(OperationCost(0.75, 0.0), OperationCost(1.5, 0.0), heat, 2)
    assert (found.expert, found.token) == pytest.approx((0.0, 1.0))


# --- which ones lie there


def test_those_that_tokens_choose_most_lie_on_the_device() -> None:
    decide, room = planner(BOTH), 14 * EACH
    proposal = decide.propose(on_the_host(), before := now(room))
    assert proposal is not None
    found = experts(proposal.plans)
    assert {*found} == {*SCOPES}
    for scope, router in zip(SCOPES, ROUTERS, strict=True):
        best = np.argsort(-BOTH[router], kind="stable")[: len(found[scope])]
        assert found[scope] == tuple(sorted(best.tolist()))
    after = follow(before, proposal)
    assert room / 2 < on_device(after) <= (1 - SPARE) * room
    # A backend that has all experts anyway gets no second copy of any.
    assert not [use for b, use in after.parts if b == HOST and use.use == "experts"]
    assert not decide.surprised()
    assert decide.propose(proposal.plans, after) is None


def test_both_sides_end_together_where_there_is_room() -> None:
    proposal = planner(BOTH).propose(on_the_host(), now(1 << 40))
    assert proposal is not None
    plan = proposal.plans.plans["1"]
    took = proposal.plans.expected["1"].segments
    for stage in plan.stages:
        both = {s.backend: took[s.name][0] for s in stage if ".experts" in s.ops[0].scope}
        if len(both) == 2 and len(stage) == 2:
            assert 0.8 < both[HOST] / both[FAR] < 1.25


def test_a_plan_says_which_and_why_and_comes_back_from_a_file(tmp_path: Path) -> None:
    proposal = planner(BOTH).propose(on_the_host(), now(9 * EACH))
    assert proposal is not None
    text = proposal.plans.to_text()
    assert "far and host at the same time, operations divided" in text or "host and far at the same" in text
    first = next(p for p in proposal.plans.plans["1"].placements if p.backend == FAR and p.share)
    named = "-".join(
        map(str, (experts(proposal.plans)[first.scope][0], experts(proposal.plans)[first.scope][-1]))
    )
    assert f"{named} of {N} experts, chosen by " in text
    assert "of the tokens; takes" in text
    assert "the experts that are not on far; " in text
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(proposal.plans.to_json()))
    assert load_plan(saved, GRAPH).buckets["1"][1] == proposal.plans.plans["1"].placements


def test_all_experts_are_alike_before_their_choices_are_counted() -> None:
    decide = planner({})
    proposal = decide.propose(on_the_host(), now(14 * EACH))
    assert proposal is not None
    assert sum(map(len, experts(proposal.plans).values())) >= 6
    assert not decide.surprised()


def test_all_sizes_of_passes_share_what_lies_there() -> None:
    proposal = planner(BOTH).propose(on_the_host(), now(14 * EACH))
    assert proposal is not None
    sets = {
        tuple(experts(proposal.plans, b).items()) for b in BUCKETS if is_concurrent(proposal.plans.plans[b])
    }
    assert len({item for some in sets for item in some}) == 2


def test_a_mixture_that_does_not_fit_comes_expert_by_expert() -> None:
    """One of the two would fit as a whole; no unit of a mixture is brought, unless all fit."""
    mixtures = {i for i, u in enumerate(UNITS) if u.scope.endswith("ffn")}
    for room, whole in ((40 * EACH, False), (1 << 40, True)):
        copies = planner(BOTH)._copies(now(room))
        assert any(copies.could_hold((i, FAR)) for i in mixtures) is whole


# --- while the model runs


def test_when_the_taste_changes_others_come_within_the_room() -> None:
    decide, room = planner(BOTH), 14 * EACH
    proposal = decide.propose(on_the_host(), before := now(room))
    assert proposal is not None
    plans, moment = proposal.plans, follow(before, proposal)
    other = {ROUTERS[0]: skewed(12), ROUTERS[1]: skewed(20)}
    decide.listen(Taste(other).likely)
    assert "tokens choose other experts" in decide.surprised()
    # In the middle of answers nothing is brought in, and what lies there goes on.
    held = decide.propose(plans, replace(moment, eager=False))
    assert held is None or experts(held.plans) == experts(plans)
    for _ in range(20):
        if (proposal := decide.propose(plans, moment)) is None:
            break
        brought = proposal.parts - moment.parts
        assert on_device(replace(moment, parts=moment.parts | brought)) <= room
        plans, moment = proposal.plans, follow(moment, proposal)
    assert proposal is None
    found = experts(plans)
    assert len({*found[SCOPES[0]]} & {(12 + i) % N for i in range(8)}) >= 0.8 * len(found[SCOPES[0]])
    assert not decide.surprised()


def test_a_little_more_or_less_changes_nothing() -> None:
    decide = planner(BOTH)
    proposal = decide.propose(on_the_host(), before := now(14 * EACH))
    assert proposal is not None
    rng = np.random.default_rng(5)
    for _ in range(10):
        noisy = {
            r: np.minimum(h * rng.uniform(0.95, 1.05, N).astype(np.float32), 1.0) for r, h in BOTH.items()
        }
        decide.listen(Taste(noisy).likely)
        assert not decide.surprised()
        assert decide.propose(proposal.plans, follow(before, proposal)) is None


def test_less_room_takes_experts_away_and_brings_none() -> None:
    decide = planner(BOTH)
    proposal = decide.propose(on_the_host(), before := now(14 * EACH))
    assert proposal is not None
    moment = replace(follow(before, proposal), own_room={FAR: 7 * EACH}, eager=False)
    less = decide.propose(proposal.plans, moment)
    assert less is not None
    assert not less.parts - moment.parts
    assert on_device(follow(moment, less)) <= 7 * EACH
    assert 0 < len(experts(less.plans)) < len(experts(proposal.plans))


# --- slots


def test_slots_stay_when_the_taste_changes_and_the_plan_says_how_many_are_found(tmp_path: Path) -> None:
    decide, room = planner(BOTH, FarWithSlots()), 14 * EACH
    proposal = decide.propose(on_the_host(), before := now(room))
    assert proposal is not None
    shares = [p for p in proposal.plans.plans["1"].placements if p.share]
    assert {p.backend for p in shares} == {HOST, FAR}
    assert all(p.share and p.share.moving for p in shares)
    assert 0.8 * room < on_device(after := follow(before, proposal)) <= room
    for p in (p for p in shares if p.backend == FAR):
        heat, n = BOTH[ROUTERS[SCOPES.index(p.scope)]], len(experts(proposal.plans)[p.scope])
        found = np.sort(heat)[::-1][:n].sum() / heat.sum()
        assert p.why.startswith(
            f"slots for {n} of {N} experts, which follow the text; {found:.0%} found there"
        )
        assert "by what was counted; takes" in p.why
    decide.listen(Taste({ROUTERS[0]: skewed(12), ROUTERS[1]: skewed(1)}).likely)
    assert not decide.surprised()
    assert decide.propose(proposal.plans, after) is None
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(proposal.plans.to_json()))
    assert load_plan(saved, GRAPH).buckets["1"][1] == proposal.plans.plans["1"].placements


def test_what_is_not_counted_yet_is_said() -> None:
    proposal = planner({}, FarWithSlots()).propose(on_the_host(), now(14 * EACH))
    assert proposal is not None
    assert "found there if all are chosen alike: nothing is counted yet; takes" in proposal.plans.to_text()


@pytest.mark.parametrize("host", [True, False])
def test_none_move_where_the_device_has_no_slots_or_the_host_leaves_nothing_to_them(host: bool) -> None:
    decide = planner(BOTH, Far() if host else FarWithSlots())
    decide._backends[HOST].leaves_to_slots = host
    proposal = decide.propose(on_the_host(), now(14 * EACH))
    assert proposal is not None
    shares = [p.share for p in proposal.plans.plans["1"].placements if p.share]
    assert shares
    assert not any(share.moving for share in shares)


def test_without_a_mixture_there_is_nothing_to_decide() -> None:
    from tests.models import cases

    graph = graph_of(cases.GQA)
    backends: dict[str, Backend] = {HOST: NullDevice(HOST), FAR: Far()}
    assert not ConcurrentPlanner(graph, backends, WorkTimes(), PlannerInputs((1,), (HOST, FAR))).hot
