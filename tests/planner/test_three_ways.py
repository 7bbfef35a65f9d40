"""A GPU that holds some of the weights, the same GPU with weights that cross its link, and the host: plans
from times that a test makes up, against every placement that there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from hetrun.backend import Backend, WeightUse
from hetrun.graph.signature import Unit, units
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import PlanConditions, PlannerInputs
from hetrun.planner.plan import BUCKETS, Placement, Plan, PlanSet, make_plans
from hetrun.planner.segment_cost import CALL
from hetrun.planner.trials import LINK, alone
from hetrun.planner.two_device.balance import operations
from hetrun.planner.two_device.planner import ConcurrentPlanner
from tests.models.tiny import TinyLlama
from tests.planner.test_two_device_planner import learn
from tests.support.nulldevice import NullDevice
from tests.support.rig import graph_of
from tests.support.tiers import exhaustive

LAYERS = 4
GRAPH = graph_of(TinyLlama("three-ways", layers=LAYERS, ffn=192))
UNITS = units(GRAPH)
INSIDE = [i for i, unit in enumerate(UNITS) if unit.scope.startswith("blk.")]
HOST, GPU, CROSSING = "host", "gpu", "gpu-streamed"
CALL_S = 0.001


class Gpu(NullDevice):
    """Weights lie in its own memory."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(GPU)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)


class Crossing(NullDevice):
    """Weights cross."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(CROSSING)

    def streams(self, wanted: WeightUse) -> bool:
        return True


BACKENDS: dict[str, Backend] = {HOST: NullDevice(HOST), GPU: Gpu(), CROSSING: Crossing()}


def size(unit: Unit) -> int:
    return BACKENDS[GPU].device_bytes(BACKENDS[GPU].wants(unit.ops))


class Machine:
    """Rates of bytes a second; the GPU computes as fast as it reads its memory."""

    def __init__(self, dram: float, link: float, vram: float) -> None:
        self.rates = {HOST: dram, GPU: vram}
        self.link, self.vram = link, vram

    def seconds(self, backend: str, nbytes: int) -> float:
        """A unit or an operation in the chain."""
        return CALL_S * (backend != HOST) + nbytes / self.rates.get(backend, self.vram)

    def forecast(self, tokens_of_many: float) -> WorkTimes:
        """As if a probe had measured; on the host, many take `tokens_of_many` times what one token does."""
        found = WorkTimes()
        layers = [o for i in range(LAYERS) for o in operations(GRAPH, i)]
        works = {o.form: o.ops for o in layers} | {unit.form: unit.ops for unit in UNITS}
        for form, ops in works.items():
            nbytes = sum(op_weight.nbytes for op in ops for op_weight in op.weights)
            one = self.seconds(HOST, nbytes)
            learn(found, form, HOST, one, tokens_of_many * one)
            for name in (GPU, alone(GPU)):
                learn(found, form, name, self.seconds(GPU, nbytes), self.seconds(GPU, nbytes))
            crossing = CALL_S + nbytes / self.link
            for name in (CROSSING, alone(CROSSING)):
                learn(found, form, name, crossing, crossing + nbytes / self.vram)
        for name in (GPU, CROSSING):
            found.learn_fact(CALL, name, CALL_S)
            found.learn_fact(LINK, name, 1e15)
        return found

    def best(self, room: int) -> float:
        """Every placement of the layers' parts: the chain, or the link where that takes longer."""
        outside = sum(self.seconds(HOST, size(u)) for i, u in enumerate(UNITS) if i not in INSIDE)
        found = []
        for placed in product((HOST, GPU, CROSSING), repeat=len(INSIDE)):
            sizes = [(b, size(UNITS[i])) for b, i in zip(placed, INSIDE, strict=True)]
            if sum(n for b, n in sizes if b == GPU) <= room:
                chain = sum(self.seconds(b, n) for b, n in sizes)
                joined = sum(a == b != HOST for a, b in pairwise(placed))
                load = sum(n for b, n in sizes if b == CROSSING) / self.link
                found.append(outside + max(chain - CALL_S * joined, load))
        return min(found)


def planned(machine: Machine, room: int, many: float = 100.0) -> tuple[PlanSet, ConcurrentPlanner]:
    """What comes out from everything on the host, once and again."""
    planner = ConcurrentPlanner(
        GRAPH, BACKENDS, machine.forecast(many), PlannerInputs((1,), (HOST, GPU, CROSSING))
    )
    plans = PlanSet(make_plans(GRAPH, dict.fromkeys(BUCKETS, (1, (Placement("", HOST, "a test"),)))), 512, "")
    home = frozenset((i, HOST) for i in range(len(UNITS)))
    state = PlanConditions(1 << 40, home, home, frozenset(BACKENDS), {}, {}, eager=True, own_room={GPU: room})
    for _ in range(3):
        proposal = planner.propose(plans, state)
        if proposal is None:
            return plans, planner
        plans = proposal.plans
        held = (state.held | proposal.bring) - proposal.drop
        state = PlanConditions(
            *(1 << 40, home, held, frozenset(BACKENDS), {}, {}),
            eager=True,
            parts=proposal.parts,
            own_room={GPU: room},
        )
    pytest.fail("the planner does not come to an end")


def where(plan: Plan) -> dict[str, int]:
    """Bytes of layers by backend."""
    found = dict.fromkeys(BACKENDS, 0)
    for s in plan.segments:
        for op in (op for op in s.ops if op.scope.startswith("blk.")):
            found[s.backend] += sum(w.nbytes for w in op.weights)
    return found


TOTAL = sum(size(UNITS[i]) for i in INSIDE)
# Bytes a second: as on a server, on a desktop with a slow host, and with a link that is as fast as the host.
MACHINES = {"server": (3e5, 5e4, 4e6), "desktop": (5e4, 2.5e4, 1e6), "fast link": (1e5, 1e5, 1e6)}


PARTS = (0.25, 0.5, 0.75)
# Each machine and each part once.
CASES = [
    pytest.param(name, part, marks=() if i == j else exhaustive)
    for i, name in enumerate(MACHINES)
    for j, part in enumerate(PARTS)
]


@pytest.mark.parametrize(("name", "part"), CASES)
def test_one_token_is_as_fast_as_the_best_placement_of_all(name: str, part: float) -> None:
    machine, room = Machine(*MACHINES[name]), int(part * TOTAL)
    plans, planner = planned(machine, room)
    plan = plans.plans["1"]
    found = where(plan)
    assert found[GPU] <= room
    # The last gap is smaller than any part of a layer.
    assert found[GPU] > room - max(size(UNITS[i]) for i in INSIDE)
    now = PlanConditions(1 << 40, frozenset(), frozenset(), frozenset(), {}, {})
    tokens, depth = planner.point("1", 512, now)
    seconds = planner.pass_seconds(plan, tokens, depth)
    assert seconds
    best = machine.best(room)
    print(f"{1000 * seconds:.1f} ms; the best of all placements {1000 * best:.1f}; {found}")
    assert best >= 0.97 * seconds


def test_many_tokens_cross_what_does_not_stay() -> None:
    """Where computing takes far longer than crossing, nothing is left on the host."""
    room = TOTAL // 2
    plans, _ = planned(Machine(3e5, 5e4, 4e6), room)
    found = where(plans.plans["257-512"])
    assert found[HOST] == 0
    assert found[GPU] > room - max(size(UNITS[i]) for i in INSIDE)
    assert found[CROSSING] == TOTAL - found[GPU]


def test_the_bill_has_what_stays_there_and_what_crosses_from_here() -> None:
    room = TOTAL // 2
    plans, _ = planned(Machine(5e4, 2.5e4, 1e6), room)
    lines = {name: n for name, n in plans.memory.items() if CROSSING in name}
    assert sum(lines.values()) > 0
    used = {s.backend for plan in plans.plans.values() for s in plan.segments}
    assert used == set(BACKENDS)
