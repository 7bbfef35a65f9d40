"""The static planner: order, fallbacks, saved plans, sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetrun.backend import Backend
from hetrun.errors import OptionError
from hetrun.graph import Op
from hetrun.planner.options import PlannerMachine, Wishes, this_machine
from hetrun.planner.plan import BUCKETS, PlanSet
from hetrun.planner.static import StaticPlanner
from tests.models.cases import GQA
from tests.support.nulldevice import NullDevice
from tests.support.rig import ThreadedDevice, graph_of, plan_set

GRAPH = graph_of(GQA)
MACHINE = PlannerMachine(cores=3)


class Without(NullDevice):
    """Cannot do some kinds."""

    def __init__(self, name: str, *missing: str) -> None:
        super().__init__(name)
        self._missing = missing

    def supports(self, op: Op) -> bool:
        return op.kind not in self._missing


def plan(*backends: Backend, wishes: Wishes | None = None) -> PlanSet:
    known = {b.name: b for b in backends}
    return StaticPlanner(known, list(known)).plan(GRAPH, MACHINE, wishes or Wishes())


def test_the_first_backend_does_all_it_can() -> None:
    plans = plan(NullDevice("fast"), NullDevice("slow"))
    assert list(plans.plans) == list(BUCKETS)
    assert [(s.name, s.backend, s.why) for s in plans.plan(1).segments] == [
        ("model", "fast", "first in the fixed order fast > slow")
    ]
    assert {p.threads for p in plans.plans.values()} == {3}
    assert len({id(p.stages) for p in plans.plans.values()}) == 1


def test_the_only_backend_says_so() -> None:
    assert plan(NullDevice("fast")).plan(1).segments[0].why == "the only backend allowed"


def test_what_it_cannot_do_goes_to_the_next_that_can() -> None:
    plans = plan(Without("fast", "swiglu"), Without("middle", "swiglu"), NullDevice("slow"))
    placed = {p.scope: (p.backend, p.why) for p in plans.plan(1).placements}
    assert placed == {
        "": ("fast", "first in the fixed order fast > middle > slow"),
        "blk.0.ffn.up": ("slow", "fast has no swiglu for this"),
        "blk.1.ffn.up": ("slow", "fast has no swiglu for this"),
    }
    assert {s.backend for s in plans.plan(1).segments} == {"fast", "slow"}


def test_a_backend_that_gets_a_scope_can_do_all_of_it() -> None:
    """The middle one has the missing kind, but not the product in the same scope."""
    plans = plan(Without("fast", "rope"), Without("middle", "linear"), NullDevice("slow"))
    assert {p.backend for p in plans.plan(1).placements} == {"fast", "slow"}


def test_a_saved_plan_for_a_backend_that_cannot_do_its_part(saved: Path) -> None:
    with pytest.raises(
        OptionError, match=r"^the plan places output\.head on slow, which has no head for it$"
    ):
        plan(NullDevice("fast"), Without("slow", "head"), wishes=Wishes(plan=saved))


def test_an_op_that_no_backend_can_do() -> None:
    with pytest.raises(
        OptionError, match=r"^none of the backends fast, slow can run rope in blk\.0\.attn\.q"
    ):
        plan(Without("fast", "rope"), Without("slow", "rope"))


def test_threads_and_ubatch_as_asked_for() -> None:
    plans = plan(NullDevice(), wishes=Wishes(threads=7, ubatch=20))
    assert {p.threads for p in plans.plans.values()} == {7}
    assert (plans.ubatch, plans.ubatch_why) == (20, "as asked for")


def test_a_small_model_needs_no_small_steps() -> None:
    plans = plan(NullDevice())
    assert (plans.ubatch, plans.ubatch_why) == (512, "larger passes are no faster")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_set(GRAPH, {"": "fast", "output": "slow"}, ubatch=96).to_json()))
    return path


def test_a_saved_plan_is_what_runs(saved: Path) -> None:
    plans = plan(NullDevice("fast"), NullDevice("slow"), wishes=Wishes(plan=saved))
    assert [(s.name, s.backend) for s in plans.plan(9).segments][-1] == ("output", "slow")
    assert {p.threads for p in plans.plans.values()} == {1}
    assert (plans.ubatch, plans.ubatch_why) == (96, "as saved in plan.json")
    again = plans.to_json() | {"ubatch_why": "a test"}
    assert again == json.loads(saved.read_text())


def test_what_is_asked_for_goes_before_what_was_saved(saved: Path) -> None:
    backends = NullDevice("fast"), NullDevice("slow")
    plans = plan(*backends, wishes=Wishes(plan=saved, threads=2, ubatch=8))
    assert {p.threads for p in plans.plans.values()} == {2}
    assert plans.ubatch == 8


def test_a_saved_plan_for_a_backend_that_is_not_here(saved: Path) -> None:
    with pytest.raises(OptionError, match=r"^the plan places output on slow, which cannot work here$"):
        plan(NullDevice("fast"), wishes=Wishes(plan=saved))


def test_independent_work_runs_beside_a_device_that_works_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_set(GRAPH, {"": "fast", "blk.0.attn.q": "slow"}).to_json()))
    second = ThreadedDevice(NullDevice("slow"))
    beside = plan(NullDevice("fast"), second, wishes=Wishes(plan=path)).plan(1)
    second.close()
    assert [len(stage) for stage in beside.stages] == [1, 2, 1]
    alone = plan(NullDevice("fast"), NullDevice("slow"), wishes=Wishes(plan=path)).plan(1)
    assert [len(stage) for stage in alone.stages] == [1, 1, 1]


def test_this_machine_has_cores() -> None:
    assert this_machine().cores >= 1
