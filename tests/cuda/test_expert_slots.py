"""Experts that change places between the host and a GPU while a model runs: the same numbers, whatever lies
where, and whatever goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hetrun.backend import Backend
from hetrun.backend.conformance.random_weights import random_weights
from hetrun.backends.cuda.weights import READ
from hetrun.backends.reference import descriptor
from hetrun.executor import device_experts
from hetrun.executor.device_experts import DeviceExperts
from hetrun.executor.slot_rule import SlotRule
from hetrun.graph import Constant, Graph, Op, Weight
from hetrun.graph.ops import Moe, MoreWeight
from hetrun.graph.quant import by_name
from hetrun.graph.sharding import Share
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.test_backend import close, tokens
from tests.models.tiny import TinyLlama
from tests.support.rig import Rig, graph_of, rig_of
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
DENSE = TinyLlama("slots", layers=3, embd=256, ffn=256, heads=4, kv_heads=2, head_dim=64)
EXPERTS, USED, N_FF = 8, 3, 256
EVERYDAY = ["Q4_K", "Q4_0"]
QUANTS = first([*EVERYDAY, *sorted(set(READ) - set(EVERYDAY))], len(EVERYDAY))
PASSES = (1, 5, 1, 1, 2, 40, 1, 1, 3, 1, 1, 1)
GRANT = 24 << 20
BIASES: tuple[MoreWeight, ...] = ("router_bias", "gate_bias", "up_bias", "down_bias", "expert_scale")


def mixture(like: Op, x: Op, quant: str, more: tuple[MoreWeight, ...]) -> Op:
    """In place of a layer's dense products, one that makes of `x` what `like` made."""
    width, rng = like.out.width, np.random.default_rng(len(like.scope) + ord(like.scope[4]))

    def weight(name: str, quant: str, rows: int, cols: int) -> Weight:
        data = random_weights(rows, cols, by_name(quant), rng).tobytes()
        return Weight(f"{like.scope}.{name}", (rows, cols), by_name(quant), (Constant(data, rows),))

    inner = EXPERTS * N_FF, width
    sizes = {"router_bias": (EXPERTS, 1), "expert_scale": (EXPERTS, 1), "down_bias": (EXPERTS, width)}
    weights = (
        weight("router", "F32", EXPERTS, width),
        *(weight(name, quant, *inner) for name in ("gate", "up")),
        weight("down", quant, EXPERTS * width, N_FF),
        *(weight(name, "F32", *sizes.get(name, (EXPERTS, N_FF))) for name in more),
    )
    attrs = Moe(EXPERTS, USED, N_FF, normalise=True, more=more)
    return Op("moe", x.inputs[:1], like.out, weights, attrs, like.scope)


def with_mixtures(quant: str, more: tuple[MoreWeight, ...] = ()) -> Graph:
    graph, ops = graph_of(DENSE), list[Op]()
    gates = {op.scope.removesuffix(".gate"): op for op in graph.ops if op.scope.endswith("ffn.gate")}
    for op in graph.ops:
        if op.kind == "linear" and op.scope.endswith("ffn.down"):
            layer = op.scope.removesuffix(".down")
            ops.append(mixture(replace(op, scope=layer), gates[layer], quant, more))
        elif not (op.kind == "swiglu" or op in gates.values() or op.scope.endswith("ffn.up")):
            ops.append(op)
    made = replace(graph, ops=tuple(ops))
    made.validate()
    return made


def shares(scope: str, experts: Sequence[int]) -> list[Placement]:
    """These in slots at first, the others on the host."""
    others = sorted({*range(EXPERTS)} - {*experts})
    order, n = (*others, *experts), len(others)
    make = partial(Share, "experts", of=EXPERTS, order=order, moving=True)
    return [
        Placement(scope, "reference", "a test", make(a=0, b=n, whole=True)),
        Placement(scope, "cuda", "a test", make(a=n, b=EXPERTS)),
    ]


def plans_of(graph: Graph, rng: np.random.Generator, most: int = EXPERTS - 1) -> PlanSet:
    """Attention anywhere, of each mixture some experts in slots."""
    placed = [Placement("", "reference", "a test")]
    for op in (op for op in graph.ops if isinstance(op.attrs, Moe)):
        layer = op.scope.removesuffix(".ffn")
        placed.append(Placement(f"{layer}.attn", str(rng.choice(["cuda", "reference"])), "a test"))
        placed += shares(op.scope, rng.permutation(EXPERTS)[: rng.integers(1, most + 1)].tolist())
    return PlanSet(make_plans(graph, dict.fromkeys(BUCKETS, (1, tuple(placed))), ["cuda"]), 64, "a test")


def both(graph: Graph, plans: PlanSet, driver: EmulatedDriver) -> tuple[Rig, Rig]:
    """With slots, and on the reference alone."""
    backends: dict[str, Backend] = {
        "cuda": emulated(driver, GRANT, "cuda"),
        "reference": descriptor.create(),
    }
    mine = rig_of(graph, backends, plans=plans, context=128)
    host = mine.backends["reference"]
    mine.executor._store.load({"reference": host.wants(graph.ops)})
    return mine, rig_of(graph, {"reference": descriptor.create()}, context=128)


def followed(r: Rig) -> DeviceExperts:
    (found,) = r.executor.experts
    return found


def read(r: Rig) -> None:
    """All that was asked for has been read."""
    followed(r).close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was chosen a little more lately comes."""
    monkeypatch.setattr(device_experts, "SlotRule", partial(SlotRule, half_life=2.0, margin=0.0))


def consistent(r: Rig) -> None:
    """Each slot has one expert, or is on its way to have one."""
    experts = followed(r)
    for (_, at_first), known in experts._known.items():
        lies = known.slots[known.slots >= 0]
        assert len(set(lies.tolist())) == len(lies)
        coming = sum(len([m for m in moves if m.residents is known]) for _, moves in experts._sent)
        assert len(lies) + coming == len(at_first)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("more", [(), BIASES], ids=["plain", "with all that mixtures have"])
@pytest.mark.parametrize("quant", QUANTS)
def test_experts_change_places_and_answers_stay_what_they_are(
    quant: str, more: tuple[MoreWeight, ...]
) -> None:
    """Sizes take turns, so that recorded work finds other experts in its slots each time."""
    graph, driver = with_mixtures(quant, more), EmulatedDriver(seed=len(more))
    mine, right = both(graph, plans_of(graph, np.random.default_rng(len(quant))), driver)
    seqs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    for i, n in enumerate(PASSES):
        text = tokens(n, seed=i)
        mine_steps = [(a, text, range(n)) for a, _ in seqs[: 1 + i % 2]]
        right_steps = [(b, text, range(n)) for _, b in seqs[: 1 + i % 2]]
        close(mine.step(*mine_steps), right.step(*right_steps), 5e-4)
        read(mine)
        consistent(mine)
    assert driver.replays
    counts = followed(mine).report
    assert counts
    assert counts.came >= 10
    assert 0 < counts.found < counts.chosen
    assert driver.most_allocated + CONTEXT <= GRANT
    mine.close()
    right.close()
    assert driver.closed
