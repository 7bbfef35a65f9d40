"""The planner that measures, fed with times that a test makes up: what it proposes, keeps and says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hetrun.backend import Backend, Precision, WeightUse
from hetrun.graph import Op
from hetrun.graph.signature import coarse, form_of, of_wanted_rows, units
from hetrun.planner import residency
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import HOLDS, RATE, START, OnlinePlanner, PlanConditions, PlannerInputs
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from hetrun.planner.segment_cost import CALL
from hetrun.planner.switch_cost import turn
from tests.models.tiny import TinyLlama
from tests.support.nulldevice import NullDevice
from tests.support.rig import graph_of

GRAPH = graph_of(TinyLlama("planned", layers=3))
UNITS = units(GRAPH)
POINTS = ((1, 1.0), (1, 2048.0), (16, 8.0), (512, 256.0))
Truth = Callable[[str, int, float, int], float]  # what kind of unit, tokens, depth, threads -> seconds


def forecast(**truths: Truth) -> WorkTimes:
    """As if a probe had measured every unit on these backends."""
    made = WorkTimes()
    for backend, truth in truths.items():
        for unit in UNITS:
            kind = coarse(unit.scope).split(".")[-1]
            for threads in (1, 2):
                for tokens, depth in ((1, 1.0), (16, 1.0)) if of_wanted_rows(unit.ops) else POINTS:
                    seconds = truth(kind, tokens, depth, threads)
                    made.learn(OpWork(unit.form, backend, threads), tokens, depth, seconds)
        made.learn_fact(CALL, backend, 0.0)
    return made


def small(kind: str, tokens: int, depth: float, threads: int) -> float:
    """Fast where tokens are few."""
    return 0.001 * tokens / threads


def faster(kind: str, tokens: int, depth: float, threads: int) -> float:
    """Always."""
    return large(kind, tokens, depth, threads) / 10


def large(kind: str, tokens: int, depth: float, threads: int) -> float:
    """Fast where they are many."""
    return (0.002 + 0.0001 * tokens) / threads


def planner(times: WorkTimes, *names: str, alone: bool = False) -> OnlinePlanner:
    backends: dict[str, Backend] = {name: NullDevice(name) for name in names}
    return OnlinePlanner(GRAPH, backends, times, PlannerInputs((1, 2), names))


def static(name: str = "cpu", ubatch: int = 512) -> PlanSet:
    """Everything on one backend, with two threads."""
    buckets = dict.fromkeys(BUCKETS, (2, (Placement("", name, "a test"),)))
    return PlanSet(make_plans(GRAPH, buckets), ubatch, "a test", memory={"weights": 1})


def now(held: str = "cpu", room: int = 1 << 40, **more: object) -> PlanConditions:
    home = frozenset((i, held) for i in range(len(UNITS)))
    return PlanConditions(room, home, home, frozenset([held]), {}, {}, **more)  # type: ignore[arg-type]


def backends_of(plans: PlanSet, bucket: str) -> set[str]:
    return {s.backend for s in plans.plans[bucket].segments}


def test_each_bucket_gets_what_is_fastest_for_it() -> None:
    proposal = planner(forecast(cpu=small, amx=large), "cpu", "amx").propose(static(), now(eager=True))
    assert proposal is not None
    assert backends_of(proposal.plans, "1") == {"cpu"}
    assert backends_of(proposal.plans, "257-512") == {"amx"}
    assert proposal.bring == {(i, "amx") for i in range(len(UNITS))}
    assert not proposal.drop
    assert "units to amx" in proposal.reason
    assert "less time expected" in proposal.reason


class Own(NullDevice):
    """It holds weights in memory of its own."""

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)


def with_own(times: WorkTimes) -> OnlinePlanner:
    backends: dict[str, Backend] = {"cpu": NullDevice("cpu"), "gpu": Own("gpu")}
    return OnlinePlanner(GRAPH, backends, times, PlannerInputs((1, 2), ("cpu", "gpu")))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_device_gets_as_many_copies_as_its_own_memory_holds(share: float) -> None:
    decide = with_own(forecast(cpu=large, gpu=faster))
    size, home = decide.sizes.own, sum(decide.nbytes[i, "cpu"] for i in range(len(UNITS)))
    room = int(share * sum(size.values()))
    before = replace(static(), devices={"gpu": {"limit": room + 7, "besides": 7}})
    # None of it comes out of the host's memory, in which there is no room.
    here = now(room=home, eager=True, own_room={"gpu": room})
    proposal = decide.propose(before, here)
    if not share:
        assert proposal is None
        return
    assert proposal is not None
    brought = sum(size[c] for c in proposal.bring)
    assert room - max(size.values()) < brought <= room
    assert {b for _, b in proposal.bring} == {"gpu"}
    assert proposal.plans.devices == {"gpu": {"limit": room + 7, "besides": 7, "copies": brought}}
    assert proposal.plans.memory["gpu itself"] == 0
    assert "copies for gpu" not in proposal.plans.memory
    # What it has stays, and takes nothing twice.
    after = replace(here, held=here.held | proposal.bring)
    again = decide.propose(proposal.plans, after)
    assert again is None or not again.bring | again.drop
    # A device that could not get any more gets none for what it has.
    assert decide.propose(proposal.plans, replace(after, own_room={"gpu": 0})) is None


def test_what_comes_to_lie_on_a_device_takes_time_as_well() -> None:
    times = forecast(cpu=small, gpu=large)
    times.learn_fact(RATE, "gpu", 1e3)
    decide = with_own(times)
    size = decide.sizes.own[0, "gpu"]
    assert decide.price(frozenset([(0, "gpu")]), now()) == size / 1e3


def test_buckets_that_stay_keep_their_plans_and_all_that_was_compiled_for_them() -> None:
    before = static()
    proposal = planner(forecast(cpu=small, amx=large), "cpu", "amx").propose(before, now(eager=True))
    assert proposal is not None
    assert proposal.plans.plans["1"] is before.plans["1"]
    assert proposal.plans.plans["257-512"].stages is not before.plans["257-512"].stages


def test_nothing_is_brought_in_before_it_pays() -> None:
    times = forecast(cpu=small, amx=large)
    times.learn_fact(START, "amx", 1.0)
    times.learn_fact(RATE, "amx", 1e9)
    decide = planner(times, "cpu", "amx")
    assert decide.propose(static(), now()) is None
    # A pass of 512 tokens saves (0.512 - 0.0532) / 2 seconds in each of 8 units: 1.8 s.
    assert decide.propose(static(), now(waiting=100)) is None
    proposal = decide.propose(static(), now(waiting=1000))
    assert proposal is not None
    assert backends_of(proposal.plans, "257-512") == {"amx"}


def test_a_gain_that_is_too_small_changes_nothing() -> None:
    def hardly(kind: str, tokens: int, depth: float, threads: int) -> float:
        return 0.99 * small(kind, tokens, depth, threads)

    assert (
        planner(forecast(cpu=small, other=hardly), "cpu", "other").propose(static(), now(eager=True)) is None
    )


def test_what_ran_before_is_believed_to_be_as_wrong_as_it_was() -> None:
    """Units are measured at their best, what runs has the noise of real passes: no reason to change."""
    times = forecast(cpu=small, other=small)
    decide, moment = planner(times, "cpu", "other"), now()
    both = replace(moment, held=moment.held | {(i, "other") for i in range(len(UNITS))})

    def run(plans: PlanSet) -> None:
        for bucket, plan in plans.plans.items():
            tokens, depth = decide.point(bucket, plans.ubatch, both)
            for s in plan.segments:
                alone = decide.costs.summed(s, plan.threads, tokens, depth)
                assert alone is not None
                for _ in range(10):
                    times.learn(OpWork(form_of(s.ops), s.backend, plan.threads), tokens, depth, 1.2 * alone)

    run(static())
    other = decide.propose(static(), both)
    assert other is not None
    assert backends_of(other.plans, "1") == {"other"}
    run(other.plans)
    assert decide.propose(other.plans, both) is None


def test_what_to_bring_in_is_asked_only_when_eager_or_while_a_prompt_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def solve(demands: object, copies: object, candidates: object) -> None:
        asked.append(candidates)

    monkeypatch.setattr(residency, "_solve", solve)  # it finds nothing in time
    monkeypatch.setattr(residency, "MOST_ENUMERATED", 0)
    decide = planner(forecast(cpu=small, amx=large), "cpu", "amx")
    room = sum(decide.nbytes[i, "cpu"] for i in range(len(UNITS))) + 1  # of copies, none fits
    assert decide.propose(static(), now(room=room)) is None
    assert not asked
    for more in ({"eager": True}, {"waiting": 10_000}):
        assert decide.propose(static(), now(room=room, **more)) is None
        assert asked.pop()


@pytest.mark.parametrize(
    ("ran", "price_s", "brought"),
    [
        ({"257-512": 5120.0}, 0.5, True),
        ({"257-512": 5120.0}, 5.0, False),  # it costs more than was lost
        ({"257-512": 512.0}, 0.5, False),
        ({"257-512": 5120.0, "1": 9000.0}, 0.5, False),  # most of the time goes elsewhere
        ({"1": 3000.0}, 0.0, False),
    ],
)
def test_copies_come_once_passes_have_lost_more_without_them_than_they_cost(
    ran: dict[str, float], price_s: float, brought: bool
) -> None:
    """A pass of 512 tokens takes 0.21 s on one and half of that on the other; one of a token 8 ms."""

    def long(kind: str, tokens: int, depth: float, threads: int) -> float:
        return large(kind, tokens, depth, threads) / (2 if tokens > 16 else 0.5)

    times = forecast(cpu=large, amx=long)
    times.learn_fact(START, "amx", price_s)
    proposal = planner(times, "cpu", "amx").propose(static(), now(ran=ran))
    assert bool(proposal and proposal.bring) == brought


def test_units_that_are_in_memory_and_were_never_measured_stay_where_they_are() -> None:
    times = forecast(cpu=small, amx=large)
    times.measured(OpWork(UNITS[-1].form, "cpu", 1)).cells.clear()
    times.measured(OpWork(UNITS[-1].form, "cpu", 2)).cells.clear()
    assert planner(times, "cpu", "amx").propose(static(), now(eager=True)) is None


def test_a_clock_that_stands_still_is_no_reason_to_fail() -> None:
    def nothing(kind: str, tokens: int, depth: float, threads: int) -> float:
        return 0.0

    decide = planner(forecast(cpu=nothing, amx=nothing), "cpu", "amx")
    for more in (now(), now(eager=True), now(waiting=1000)):
        assert decide.propose(static(), more) is None


def test_what_was_never_measured_is_not_chosen_and_does_not_choose() -> None:
    times = forecast(cpu=small)
    assert planner(times, "cpu", "unknown").propose(static(), now(eager=True)) is None
    assert planner(WorkTimes(), "cpu").propose(static(), now(eager=True)) is None


def test_fewer_threads_where_they_are_faster() -> None:
    def crowded(kind: str, tokens: int, depth: float, threads: int) -> float:
        return small(kind, tokens, depth, 1) * (1 if threads == 1 or tokens > 16 else 3)

    proposal = planner(forecast(cpu=crowded), "cpu").propose(static(), now())
    assert proposal is not None
    assert [proposal.plans.plans[b].threads for b in ("1", "257-512")] == [1, 2]
    assert "1 thread instead of 2" in proposal.reason


def test_one_kind_of_unit_may_run_elsewhere() -> None:
    def good_at_ffn(kind: str, tokens: int, depth: float, threads: int) -> float:
        return small(kind, tokens, depth, threads) * (0.1 if kind == "ffn" else 3)

    proposal = planner(forecast(cpu=small, other=good_at_ffn), "cpu", "other").propose(
        static(), now(eager=True)
    )
    assert proposal is not None
    plan = proposal.plans.plans["257-512"]
    where = {op.scope: s.backend for s in plan.segments for op in s.ops}
    assert {where[s] for s in where if ".ffn" in s and "blk.2" not in s} == {"other"}
    assert where["blk.2.ffn.down"] == "cpu", "of its rows only one is wanted"
    assert {where[s] for s in where if ".attn" in s} == {"cpu"}
    assert any("on cpu" in p.why or "on other" in p.why for p in plan.placements)


class Rounding(NullDevice):
    """A device whose products are not exact."""

    def __init__(self, name: str, error: float) -> None:
        super().__init__(name)
        self._error = error

    def rounding(self, op: Op) -> float:
        return self._error if op.weights else 0.0


def with_a_coarse_home(precision: Precision, slower: float) -> OnlinePlanner:
    """One backend is fast for one unit and rounds; the other is exact, fast otherwise, and slower there."""

    def home(kind: str, tokens: int, depth: float, threads: int) -> float:
        return small(kind, tokens, depth, threads) * (0.1 if kind == "embed" else 3)

    def close(kind: str, tokens: int, depth: float, threads: int) -> float:
        return small(kind, tokens, depth, threads) * (slower if kind == "embed" else 1)

    backends: dict[str, Backend] = {"cpu": Rounding("cpu", 6e-3), "close": Rounding("close", 3e-3)}
    return OnlinePlanner(
        GRAPH, backends, forecast(cpu=home, close=close), PlannerInputs((1, 2), ("cpu", "close"), precision)
    )


def test_exact_gives_a_little_time_for_closer_results_and_says_so() -> None:
    # Five units at 1, and one at 0.1 or 0.5: 8 % of a pass more. The last two are one row.
    proposal = with_a_coarse_home("exact", 0.5).propose(static(), now(eager=True))
    assert proposal is not None
    assert backends_of(proposal.plans, "257-512") == {"close"}
    assert "of them for closer results" in proposal.plans.plans["257-512"].placements[0].why


def test_exact_does_not_give_much_time_and_fast_gives_none() -> None:
    for precision, slower in (("exact", 2.0), ("fast", 0.5)):
        decide = with_a_coarse_home(precision, slower)  # type: ignore[arg-type]
        proposal = decide.propose(static(), now(eager=True))
        assert proposal is not None
        assert backends_of(proposal.plans, "257-512") == {"cpu", "close"}


def test_closer_results_are_no_reason_for_more_memory_than_there_is() -> None:
    decide = with_a_coarse_home("exact", 0.5)
    home = sum(decide.nbytes[i, "cpu"] for i in range(len(UNITS)))
    copies = sum(decide.nbytes[i, "close"] for i in range(len(UNITS)))
    proposal = decide.propose(static(), now(room=home + copies - 1, eager=True))
    assert proposal is not None
    assert backends_of(proposal.plans, "257-512") == {"cpu", "close"}


def test_backends_do_not_take_turns_for_a_small_gain() -> None:
    def better_at_ffn(kind: str, tokens: int, depth: float, threads: int) -> float:
        return small(kind, tokens, depth, threads) * (0.6 if kind == "ffn" else 3)

    times = forecast(cpu=small, other=better_at_ffn)
    assert planner(times, "cpu", "other").propose(static(), now(eager=True)) is not None
    for tokens in (1, 512):
        times.learn_fact(turn(tokens), "other", 0.06)  # twice for a unit that saves 0.1
    assert planner(times, "cpu", "other").propose(static(), now(eager=True)) is None


@pytest.mark.parametrize("part", [0.0, 0.4, 0.7])
def test_copies_stay_within_the_room(part: float) -> None:
    decide = planner(forecast(cpu=small, amx=large), "cpu", "amx")
    home = sum(decide.nbytes[i, "cpu"] for i in range(len(UNITS)))
    room = home + int(part * sum(decide.nbytes[i, "amx"] for i in range(len(UNITS))))
    proposal = decide.propose(static(), now(room=room, eager=True))
    brought = proposal.bring if proposal else frozenset()
    assert home + sum(decide.nbytes[c] for c in brought) <= room
    assert bool(brought) == bool(part)


def test_a_backend_holds_memory_besides_its_weights() -> None:
    times = forecast(cpu=small, amx=large)
    times.learn_fact(HOLDS, "amx", 1 << 30)
    decide = planner(times, "cpu", "amx")
    both = sum(decide.nbytes.values())
    assert decide.propose(static(), now(room=both + (1 << 29), eager=True)) is None
    proposal = decide.propose(static(), now(room=both + (1 << 30), eager=True))
    assert proposal is not None
    assert proposal.plans.memory["amx itself"] == 1 << 30


def test_unused_copies_go_when_memory_is_tight() -> None:
    decide = planner(forecast(cpu=small, amx=small), "cpu", "amx")
    held = frozenset((i, b) for i in range(len(UNITS)) for b in ("cpu", "amx"))
    home = sum(decide.nbytes[i, "cpu"] for i in range(len(UNITS)))
    proposal = decide.propose(
        static(),
        PlanConditions(home, frozenset((i, "cpu") for i in range(len(UNITS))), held, frozenset(), {}, {}),
    )
    assert proposal is not None
    assert {b for _, b in proposal.drop} == {"amx"}


def test_predictions_are_part_of_the_plan_and_of_its_json() -> None:
    decide = planner(forecast(cpu=small), "cpu")
    plans = decide.annotate(static(), now())
    expected = plans.expected["257-512"]
    assert expected.tokens == 512
    predicted, measured = expected.segments["model"]
    assert predicted == pytest.approx((len(UNITS) - 2) * 0.256 + 2 * 0.0005, rel=0.02)
    assert measured is None
    decide.costs.form(plans.plans["1"].segments[0])
    facts = plans.to_json()["plans"][-1]
    assert facts["expected"]["predicted_s"] == pytest.approx(predicted)
    assert facts["stages"][0][0]["measured_s"] is None


def test_runs_of_a_whole_segment_correct_the_sum_of_its_units() -> None:
    times = forecast(cpu=small)
    for _ in range(5):
        times.learn(OpWork(form_of(GRAPH.ops), "cpu", 2), 512, 256.0, 1.0)
    decide = planner(times, "cpu")
    plans = decide.annotate(static(), now())
    predicted, measured = plans.expected["257-512"].segments["model"]
    assert predicted == pytest.approx(1.0, rel=0.02)
    assert measured == predicted
    far, none = plans.expected["1"].segments["model"]
    assert far == pytest.approx(len(UNITS) * 0.0005, rel=0.2)
    assert none is None
