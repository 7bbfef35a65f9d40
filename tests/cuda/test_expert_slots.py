"""Experts that change places between the host and a GPU while a model runs: the same numbers, whatever lies
where, and whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Available, Backend, Descriptor, registry
from hetrun.backend.conformance.random_weights import random_weights
from hetrun.backends import reference
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.backend import CudaBackend
from hetrun.backends.cuda.weights import READ
from hetrun.backends.llamacpp import descriptor as llamacpp
from hetrun.backends.reference import descriptor
from hetrun.cli.run import in_slots
from hetrun.client.events import DeviceSlots
from hetrun.errors import ModelFileError
from hetrun.executor import device_experts
from hetrun.executor.device_experts import DeviceExperts
from hetrun.executor.interface import look
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.slot_rule import SlotRule
from hetrun.executor.steps import Chunk, Step
from hetrun.graph import Constant, Graph, Op, Weight
from hetrun.graph.ops import Moe, MoreWeight
from hetrun.graph.quant import by_name
from hetrun.graph.sharding import Share
from hetrun.loader.open_model import open_model
from hetrun.planner.online import PlannerInputs
from hetrun.planner.options import Options, Wishes
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, make_plans
from hetrun.planner.two_device.planner import ConcurrentPlanner
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.models import Wanted, made
from tests.cuda.survival import goes_on
from tests.cuda.test_backend import close, cuda, tokens
from tests.models.tiny import TinyLlama
from tests.planner import test_hot_experts as planned
from tests.support.rig import Rig, graph_of, plan_set, rig_of
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
LAYERS = 2
NARROW = TinyLlama("slots", layers=LAYERS, embd=64, ffn=64, heads=2, kv_heads=1, head_dim=32)
WIDE = TinyLlama("slots-wide", layers=LAYERS, embd=256, ffn=256, heads=4, kv_heads=2, head_dim=64)
EXPERTS, USED = 8, 3
PASSES = (1, 5, 1, 1, 2, 40, 1, 1, 3, 1, 1, 1)
GRANT = 24 << 20
BIASES: tuple[MoreWeight, ...] = ("router_bias", "gate_bias", "up_bias", "down_bias", "expert_scale")
Case = tuple[str, tuple[MoreWeight, ...]]
# Each type is a program of its own. What the others differ by, test_matmul.py tries of all of them.
EVERYDAY: list[Case] = [("Q4_K", ()), ("Q4_0", BIASES)]
OTHERS: list[Case] = [(quant, more) for quant in sorted(READ) for more in ((), BIASES)]
CASES = first([*EVERYDAY, *[case for case in OTHERS if case not in EVERYDAY]], len(EVERYDAY))


def dense(quant: str) -> TinyLlama:
    """As wide as a block of the type."""
    return WIDE if by_name(quant).block > NARROW.embd else NARROW


def mixture(like: Op, x: Op, quant: str, more: tuple[MoreWeight, ...]) -> Op:
    """In place of a layer's dense products, one that makes of `x` what `like` made."""
    width, n_ff, rng = (
        like.out.width,
        x.out.width,
        np.random.default_rng(len(like.scope) + ord(like.scope[4])),
    )

    def weight(name: str, quant: str, rows: int, cols: int) -> Weight:
        data = random_weights(rows, cols, by_name(quant), rng).tobytes()
        return Weight(f"{like.scope}.{name}", (rows, cols), by_name(quant), (Constant(data, rows),))

    inner = EXPERTS * n_ff, width
    sizes = {"router_bias": (EXPERTS, 1), "expert_scale": (EXPERTS, 1), "down_bias": (EXPERTS, width)}
    weights = (
        weight("router", "F32", EXPERTS, width),
        *(weight(name, quant, *inner) for name in ("gate", "up")),
        weight("down", quant, EXPERTS * width, n_ff),
        *(weight(name, "F32", *sizes.get(name, (EXPERTS, n_ff))) for name in more),
    )
    attrs = Moe(EXPERTS, USED, n_ff, normalise=True, more=more)
    return Op("moe", x.inputs[:1], like.out, weights, attrs, like.scope)


def with_mixtures(quant: str, more: tuple[MoreWeight, ...] = ()) -> Graph:
    graph, ops = graph_of(dense(quant)), list[Op]()
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


def shares(scope: str, experts: Sequence[int], host: str) -> list[Placement]:
    """These in slots at first, the others on the host."""
    others = sorted({*range(EXPERTS)} - {*experts})
    order, n = (*others, *experts), len(others)
    make = partial(Share, "experts", of=EXPERTS, order=order, moving=True)
    return [
        Placement(scope, host, "a test", make(a=0, b=n, whole=True)),
        Placement(scope, "cuda", "a test", make(a=n, b=EXPERTS)),
    ]


def plans_of(
    graph: Graph, rng: np.random.Generator, most: int = EXPERTS - 1, host: str = "reference"
) -> PlanSet:
    """Attention anywhere, of each mixture some experts in slots."""
    placed = [Placement("", host, "a test")]
    for op in (op for op in graph.ops if isinstance(op.attrs, Moe)):
        layer = op.scope.removesuffix(".ffn")
        placed.append(Placement(f"{layer}.attn", str(rng.choice(["cuda", host])), "a test"))
        placed += shares(op.scope, rng.permutation(EXPERTS)[: rng.integers(1, most + 1)].tolist(), host)
    return PlanSet(make_plans(graph, dict.fromkeys(BUCKETS, (1, tuple(placed))), ["cuda"]), 64, "a test")


def both(
    graph: Graph, plans: PlanSet, driver: EmulatedDriver, host: Backend | None = None
) -> tuple[Rig, Rig]:
    """With slots, beside a host that has all weights; and on the reference alone."""
    host = host or descriptor.create()
    backends: dict[str, Backend] = {"cuda": emulated(driver, GRANT, "cuda"), host.name: host}
    mine = rig_of(graph, backends, plans=plans, context=512)
    mine.executor._store.load({host.name: host.wants(graph.ops)})
    return mine, rig_of(graph, {"reference": descriptor.create()}, context=512)


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
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{' with more' * bool(case[1])}")
def test_experts_change_places_and_answers_stay_what_they_are(case: Case) -> None:
    """Sizes take turns, so that recorded work finds other experts in its slots each time."""
    quant, more = case
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
    assert counts.came >= 3
    assert 0 < counts.found < counts.chosen
    assert driver.most_allocated + CONTEXT <= GRANT
    mine.close()
    right.close()
    assert driver.closed


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", first(range(40), 2))
def test_in_any_order_of_streams_and_reading_no_pass_finds_half_an_expert(seed: int) -> None:
    """No pass waits for what is read; one slot of a mixture is as good as seven."""
    rng = np.random.default_rng(seed)
    graph, driver = with_mixtures("Q4_0"), EmulatedDriver(seed=seed)
    mine, right = both(graph, plans_of(graph, rng, most=1 + seed % (EXPERTS - 1)), driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    if seed % 2:  # as over a slow link
        driver.late = cuda(mine).gpu.memory.bringing
    for i, n in enumerate(rng.choice([1, 1, 1, 2, 8, 40], 14).tolist()):
        if rng.random() < 0.5:
            read(mine)
        text = tokens(n, seed=i)
        close(mine.logits(a, text), right.logits(b, text), 5e-4)
        consistent(mine)
    mine.close()
    right.close()
    assert driver.closed


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("quant", ["Q4_0", "F16"])  # in our own layout, and as ggml has it
def test_llamacpp_leaves_to_slots_what_lies_there(quant: str) -> None:
    """It rounds inputs to 8 bits; an expert that is computed twice, or not at all, is far more."""
    graph, driver, host = with_mixtures(quant, BIASES), EmulatedDriver(seed=1), llamacpp.create()
    mine, right = both(graph, plans_of(graph, np.random.default_rng(9), 4, host.name), driver, host)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i, n in enumerate(PASSES):
        close(mine.logits(a, tokens(n, i)), right.logits(b, tokens(n, i)), 7e-3)
        read(mine)
        consistent(mine)
    counts = followed(mine).report
    assert counts
    assert counts.came >= 3
    assert 0 < counts.found < counts.chosen
    mine.close()
    right.close()
    assert driver.closed


@pytest.mark.usefixtures("eager")
def test_a_long_prompt_changes_nothing() -> None:
    graph, driver = with_mixtures("Q4_0"), EmulatedDriver()
    mine, _ = both(graph, plans_of(graph, np.random.default_rng(3)), driver)
    seq = mine.kv.alloc()
    for i in range(4):
        mine.logits(seq, tokens(1, i))
        read(mine)
    mine.logits(seq, tokens(1, 9))  # what was read is sent
    for _ in range(3):  # and there
        mine.step((seq, tokens(17, 9), [16]))
        read(mine)
    before = {key: known.slots.copy() for key, known in followed(mine)._known.items()}
    counts = followed(mine).report
    assert counts
    assert counts.came
    for i in range(3):
        mine.step((seq, tokens(20, i), [19]))
        read(mine)
    assert followed(mine).report == counts
    assert all((known.slots == before[key]).all() for key, known in followed(mine)._known.items())
    mine.close()


@pytest.mark.usefixtures("eager")
def test_while_a_pass_stands_still_experts_stay_where_they_are() -> None:
    graph, driver = with_mixtures("Q4_0"), EmulatedDriver(seed=5)
    mine, right = both(graph, plans_of(graph, np.random.default_rng(4)), driver)
    seqs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    for i in range(3):
        for a, b in seqs:
            close(mine.logits(a, tokens(1, i)), right.logits(b, tokens(1, i)), 5e-4)
    experts, i = followed(mine), 3
    driver.late = cuda(mine).gpu.memory.bringing
    while not experts._line.read:  # an expert that is sent when the next pass begins
        close(mine.logits(seqs[1][0], tokens(1, i)), right.logits(seqs[1][1], tokens(1, i)), 5e-4)
        read(mine)
        i += 1
    inside = list[np.ndarray]()

    def between() -> None:
        if len(inside) < 6:
            assert experts._sent
            before = {key: known.slots.copy() for key, known in experts._known.items()}
            inside.append(mine.logits(seqs[1][0], tokens(1, 10 + len(inside))))
            assert all((known.slots == before[key]).all() for key, known in experts._known.items())

    found = mine.step((seqs[0][0], tokens(3, 7), range(3)), between=between)
    close(found, right.logits(seqs[0][1], tokens(3, 7)), 5e-4)
    for i, each in enumerate(inside):
        close(each, right.logits(seqs[1][1], tokens(1, 10 + i)), 5e-4)
    assert len(inside) == 6
    mine.close()
    right.close()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", first(range(60), 2))
def test_when_the_gpu_is_lost_the_text_goes_on_without_it(seed: int) -> None:
    rng, driver = np.random.default_rng(seed), EmulatedDriver(seed=seed)
    graph = with_mixtures("Q4_0")
    mine, right = both(graph, plans_of(graph, rng), driver)
    driver.breaks_at = driver.calls + int(rng.integers(1, 250))
    goes_on(mine, right, driver, PASSES, partial(close, error=5e-4), lambda: read(mine))


@pytest.mark.usefixtures("eager")
def test_when_an_expert_cannot_be_read_all_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where their memory is given back and comes again, with what lies there at first."""
    graph, driver = with_mixtures("Q4_0"), EmulatedDriver()
    mine, right = both(graph, plans_of(graph, np.random.default_rng(6)), driver)
    a, b, plans = mine.kv.alloc(), right.kv.alloc(), mine.executor.plans

    def passes(first: int) -> DeviceSlots:
        for i in range(first, first + 6):
            close(mine.logits(a, tokens(1, i)), right.logits(b, tokens(1, i)), 5e-4)
            read(mine)
        found = followed(mine).report
        assert found
        return found

    def changed(*given: object) -> None:
        raise ModelFileError("model.gguf", "was changed while in use; open it again")

    assert passes(0).came
    ops = [op for s in plans.plan(1).segments if s.backend == "cuda" for op in s.ops]
    uses = mine.backends["cuda"].wants(ops)
    with monkeypatch.context() as broken:
        broken.setattr("hetrun.executor.device_experts.FileReader.read", changed)
        before = passes(10)
        assert passes(20).came == before.came
        assert len([r for r in caplog.records if "experts stay where they are" in r.message]) == 1
    mine.executor.adopt(plan_set(graph, {"": "reference"}, 64))
    mine.executor._store.drop("cuda", uses)
    mine.executor._store.load({"cuda": uses})
    mine.executor.adopt(plans)
    passes(30)
    mine.close()
    right.close()
    assert driver.closed


@pytest.mark.usefixtures("eager")
def test_slots_are_in_the_bill_and_given_back() -> None:
    graph, driver = with_mixtures("Q4_K", BIASES), EmulatedDriver()
    mine, _ = both(graph, plans_of(graph, np.random.default_rng(7)), driver)
    backend = mine.backends["cuda"]
    assert isinstance(backend, CudaBackend)
    ops = [op for s in mine.executor.plans.plan(1).segments if s.backend == "cuda" for op in s.ops]
    uses, slots = backend.wants(ops), backend.gpu.slots
    mine.logits(mine.kv.alloc(), tokens(1))
    assert len(slots.mixtures) == LAYERS
    slotted_uses = [use for use in uses if use.slots]
    expected = sum(in_arena(use.weight.nbytes // EXPERTS * len(use.slots)) for use in slotted_uses)
    assert backend.device_bytes(slotted_uses) == expected
    mine.executor.adopt(plan_set(graph, {"": "reference"}, 64))
    driver.late = backend.gpu.memory.bringing
    while not slots._sent:
        mine.logits(mine.kv.alloc(), tokens(1, mine.kv.length(0)))
        read(mine)
    used, slotted_bytes = backend.gpu.memory.arena.used, backend.device_bytes(slotted_uses)
    mine.executor._store.drop("cuda", slotted_uses)
    assert not slots.mixtures
    assert all(driver.happened(event) for event in slots._sent.values()), "what comes next lies there"
    assert backend.gpu.memory.arena.used == used - slotted_bytes - LAYERS * in_arena(4 * EXPERTS)
    mine.logits(mine.kv.alloc(), tokens(1))
    assert followed(mine).report is None
    mine.close()
    assert driver.closed


@pytest.fixture
def gpu() -> Iterator[EmulatedDriver]:
    """Among the backends."""
    driver = EmulatedDriver()
    make = partial(emulated, driver, name="cuda")
    undo = registry.register(
        Descriptor("cuda", lambda: Available("a test"), make, preference=1000, own_memory=True)
    )
    yield driver
    undo()


@pytest.mark.usefixtures("eager")
def test_a_plan_from_a_file_has_slots_and_what_was_found_there_is_told(
    gpu: EmulatedDriver, tmp_path: Path
) -> None:
    path, vram = made(tmp_path, Wanted("moe-tiny", "Q4_K_M")), 20 << 20
    placed = [{"scope": "", "backend": "reference", "why": "a test"}]
    for layer in range(2):
        share = {"kind": "experts", "of": 8, "order": [*range(8)], "moving": True}
        parts = {"reference": {"a": 0, "b": 5, "whole": True}, "cuda": {"a": 5, "b": 8}}
        for name, part in parts.items():
            scope = f"blk.{layer}.ffn"
            placed.append({"scope": scope, "backend": name, "why": "a test", "share": share | part})  # type: ignore[dict-item]
    plans = [{"bucket": bucket, "threads": 1, "placements": placed} for bucket in BUCKETS]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": 1, "plans": plans, "ubatch": 64}))
    options = Options(Wishes(plan=file), ("cuda", "reference"), ctx=256, vram=vram, planner="static")
    model = PlannedModel(open_model(path), options)
    seq = model.alloc()
    for i in range(14):
        model.step(Step((Chunk(seq, np.array(tokens(4, i)), np.array([3])),)))
    found = look(model).device_slots
    assert found
    assert (found.slots, found.experts) == (6, 16)
    # All but the first pass, in which the slots came to be known; the last layer computes what is wanted.
    assert found.chosen == 13 * (2 * 4 + 2 * 1)
    assert found.came
    assert in_slots(found).startswith(
        f"[6 of 16 experts have a slot on a device, where {found.found / found.chosen:.0%}"
    )
    slots = sum(w.nbytes for op in model.graph.ops if op.kind == "moe" for w in op.weights[1:4]) * 3 // 8
    assert slots <= model.plans.devices["cuda"]["weights"] < slots + (64 << 10)
    assert gpu.most_allocated + CONTEXT <= vram
    model.close()
    assert gpu.closed


def test_what_the_planner_decides_runs_within_the_room_that_it_was_given() -> None:
    """By times that a test makes up; the weights are zeros, so what is compared is who computes what."""
    far, room = emulated(EmulatedDriver(), GRANT, planned.FAR), 14 * planned.EACH
    backends: dict[str, Backend] = {planned.HOST: reference.create(planned.HOST), planned.FAR: far}
    decide = ConcurrentPlanner(
        planned.GRAPH, backends, planned.measured(), PlannerInputs((1,), (planned.HOST, planned.FAR))
    )
    decide.listen(planned.Taste(dict(planned.BOTH)).likely)
    proposal = decide.propose(planned.on_the_host(), planned.now(room))
    assert proposal
    assert 0.8 * room < proposal.plans.devices[planned.FAR]["parts"] <= room
    mine = rig_of(planned.GRAPH, backends, plans=proposal.plans, context=64)
    mine.executor._store.load({planned.HOST: backends[planned.HOST].wants(planned.GRAPH.ops)})
    seq = mine.kv.alloc()
    for i in range(3):
        mine.logits(seq, tokens(2, i))
        read(mine)
    found = followed(mine).report
    assert found
    assert found.slots == sum(map(len, planned.experts(proposal.plans).values()))
    assert 0 < found.found < found.chosen
    mine.close()
