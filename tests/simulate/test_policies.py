"""The policies: the papers' own numbers, and every choice of theirs against all choices there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.tools.simulate.costs import LayerPart, decode, parts_of, prefill
from hetrun.tools.simulate.evaluator import StepCosts, fits, predict
from hetrun.tools.simulate.machine import SimulatedMachine
from hetrun.tools.simulate.machine_files import open_machine
from hetrun.tools.simulate.policies import compare
from hetrun.tools.simulate.policies.flexgen import streamed, streaming
from hetrun.tools.simulate.policies.hetrun import with_best_ways
from hetrun.tools.simulate.policies.layer_split import layer_split
from hetrun.tools.simulate.policies.lia import Policy, best_policy, seconds, sublayers
from hetrun.tools.simulate.policies.twinpilots import SEVEN, balanced, table, twinpilots
from hetrun.tools.simulate.types import PolicyPlacement, SimulatedSetting
from tests.simulate.questions import GB, clock, machine, model

# --- TwinPilots

# Read off the paper's Figure 6a, milliseconds: OPT-30B, prompt 896, 128 generated.
ON_CPU = {"q": 4.7, "k": 4.7, "v": 4.7, "score": 3.5, "out": 4.7, "mlp1": 18, "mlp2": 18}
ON_GPU = {"q": 8, "k": 8, "v": 8, "score": 11.5, "out": 8, "mlp1": 31, "mlp2": 31}


def test_twinpilots_own_times() -> None:
    on_gpu, makespan = balanced(ON_CPU, ON_GPU)
    assert sum(ON_GPU.values()) == pytest.approx(105, abs=1)
    assert sum(ON_CPU.values()) == pytest.approx(58, abs=1)
    assert makespan == pytest.approx(39, abs=0.5)
    assert makespan == max(
        sum(ON_GPU[n] for n in ON_GPU if on_gpu[n]), sum(ON_CPU[n] for n in ON_CPU if not on_gpu[n])
    )


def test_loads_of_the_papers_figure_come_out_of_the_file() -> None:
    """The bars of Figure 6a that the link decides; a batch of 5 and 1024 tokens explain its SCORE."""
    asked = StepCosts(SimulatedSetting(open_machine("twinpilots-a10g"), model("opt-30b"), 5, 896, 128))
    seven = twinpilots_parts(asked)
    found = {op.name: (asked.work(op, decode(5, 1024))) for op in seven}
    loads = {name: 1000 * (w.weights + w.past) / 12.8e9 for name, w in found.items()}
    assert loads == pytest.approx(ON_GPU, rel=0.05)


def twinpilots_parts(asked: StepCosts) -> tuple[LayerPart, ...]:
    return parts_of([op for part in asked.model.layers[0] for op in part.ops], SEVEN)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=7))
def test_the_balance_is_the_best_of_all_assignments(times: list[tuple[float, float]]) -> None:
    cpu = {str(i): c for i, (c, _) in enumerate(times)}
    gpu = {str(i): g for i, (_, g) in enumerate(times)}
    on_gpu, makespan = balanced(cpu, gpu)
    totals = []
    for chosen in product((False, True), repeat=len(times)):
        picked = dict(zip(cpu, chosen, strict=True))
        totals.append(max(sum(gpu[n] for n in gpu if picked[n]), sum(cpu[n] for n in cpu if not picked[n])))
    assert makespan == pytest.approx(min(totals))
    assert set(on_gpu) == set(cpu)


def test_the_seven_operations_cover_a_layer() -> None:
    for name in ("opt-30b", "llama-70b", "mixture"):
        asked = clock(name)
        seven = twinpilots_parts(asked)
        cpu, gpu = table(asked, seven, asked.setting.decode)
        assert len(cpu) == len(gpu) == 7
        assert twinpilots(asked) is not None


# --- LIA


def border(asked: StepCosts, make: str, last: int) -> dict[Policy, int]:
    """The least number of tokens from which each policy is the best."""
    found: dict[Policy, int] = {}
    for n in range(20, last, 20):
        case = prefill(1, n) if make == "prefill" else decode(n, 512)
        found.setdefault(best_policy(asked, asked.model.layers[0], case), n)
    return found


FULL_CPU, FULL_GPU = (True,) * 6, (False,) * 6
PARTIAL = (False, True, True, False, False, False)


def test_lias_borders() -> None:
    """OPT-175B: prefill on the processor below B*L of about 850, decode below B of about 858, then partial.

    The file has the paper's measured 20 TFLOP/s of AMX, and four fifths of nominal bandwidths: 246 GB/s of
    DDR5 and 25.2 GB/s of PCIe 4.0. Nothing was fitted to the borders.
    """
    asked = StepCosts(SimulatedSetting(open_machine("lia-spr-a100"), model("opt-175b"), 1, 512, 32))
    first = border(asked, "prefill", 2000)
    assert set(first) == {FULL_CPU, FULL_GPU}
    assert first[FULL_GPU] == pytest.approx(850, rel=0.1)  # 780
    then = border(asked, "decode", 2000)
    assert next(iter(then)) == FULL_CPU
    assert list(then)[-1] == PARTIAL
    assert then[PARTIAL] == pytest.approx(
        858, rel=0.1
    )  # 840; from 800 on the model also splits FC from the rest
    assert len(then) <= 3


def test_lias_decode_does_not_depend_on_the_length() -> None:
    asked = StepCosts(SimulatedSetting(open_machine("lia-spr-a100"), model("opt-175b"), 1, 512, 32))
    layer = asked.model.layers[0]
    for batch in (1, 64, 700, 900):
        assert len({best_policy(asked, layer, decode(batch, n)) for n in (32, 512, 2016)}) == 1


def test_lias_sum_by_hand() -> None:
    asked = clock("opt-30b", machine())
    layer, case, d = asked.model.layers[0], decode(2, 100), 7168
    subs = sublayers(asked, layer, case)
    assert [s.name for s in subs] == ["qkv", "qk", "sv", "out", "up", "down"]
    kv = 2 * 100 * d * 2  # of keys: batch, length, width, bytes
    assert subs[1].y == subs[2].y == kv
    all_cpu = seconds(asked, subs, 0.0, FULL_CPU)
    assert all_cpu == pytest.approx(sum(s.compute(asked.machine.cpu) for s in subs))
    assert asked.machine.gpu is not None
    on_gpu = sum(s.compute(asked.machine.gpu) for s in subs)
    weights = sum(part.weight_bytes for part in layer)
    past = 2 * (100 - 1) * 2 * d * 2
    expected = on_gpu + (weights + past + 1000) / 10e9
    assert seconds(asked, subs, 1000.0, FULL_GPU) == pytest.approx(expected, rel=1e-3)
    pinned = seconds(asked, subs, 1000.0, FULL_GPU, pinned=True)
    assert pinned == pytest.approx(expected - weights / 10e9, rel=1e-3)


# --- all of them


def random_machine() -> st.SearchStrategy[SimulatedMachine]:
    def build(link: float, memory: int, speed: float, launch: float, latency: float) -> SimulatedMachine:
        made = machine(link, latency, memory=memory * GB, bandwidth=speed, launch=launch)
        return replace(made, cpu=replace(made.cpu, launch=launch))

    return st.builds(
        build,
        st.floats(1e9, 1e11),
        st.integers(2, 100),
        st.floats(2e11, 4e12),
        st.floats(0, 2e-5),
        st.floats(0, 1e-4),
    )


@settings(max_examples=8, deadline=None)
@given(random_machine(), st.sampled_from(["opt-6.7b", "llama-8b", "mixture"]), st.sampled_from([1, 8, 64]))
def test_ours_is_never_predicted_to_be_slower_and_everything_fits(
    on: SimulatedMachine, name: str, batch: int
) -> None:
    asked = clock(name, on, batch=batch)
    found = compare(asked)
    assert [p.placing.policy for p in found][-1] == "hetrun"
    for p in found:
        assert found[-1].seconds <= p.seconds * (1 + 1e-9)
        assert not p.bill.problem
        assert sum(p.bill.gpu.values()) <= (on.gpu.usable if on.gpu else 0)
        held = p.bill.gpu["weights"] + p.bill.cpu["weights"]
        twice = asked.model.shared * p.placing.after  # the table of words is the output, on either side
        assert held == pytest.approx(asked.model.weight_bytes + twice, rel=1e-6)


@settings(max_examples=5, deadline=None)
@given(random_machine(), st.sampled_from(["opt-6.7b", "llama-8b"]))
def test_a_faster_link_is_never_predicted_to_be_slower(on: SimulatedMachine, name: str) -> None:
    assert on.link is not None
    slow, fast = (compare(clock(name, m)) for m in (on, replace(on, link=replace(on.link, bandwidth=2e11))))
    # The search is over a grid that the machine moves: a little of that may show.
    assert fast[-1].seconds <= slow[-1].seconds * 1.01


def every_way(asked: StepCosts, placing: PolicyPlacement, shares: tuple[float, ...]) -> float:
    """The best decode step over all shares of all parts, found without the clock's search."""
    least = float("inf")
    layer = asked.model.layers[0]
    for chosen in product(shares, repeat=len(layer)):
        picked = dict(zip((p.name for p in layer), chosen, strict=True))
        way = replace(placing.decode, bands=(picked,))
        least = min(least, asked.step(placing, asked.setting.decode, way).seconds)
    return least


@settings(max_examples=5, deadline=None)
@given(random_machine(), st.sampled_from(["opt-6.7b", "mixture"]))
def test_the_ways_are_the_best_of_all_whole_choices(on: SimulatedMachine, name: str) -> None:
    asked = clock(name, on)
    placing = streamed(asked, 1, 0.0, 0.0, True)
    found = with_best_ways(asked, placing, stream=True)
    found = replace(found, decode=replace(found.decode, after=1.0))
    best = asked.step(found, asked.setting.decode, found.decode).seconds
    assert best <= every_way(asked, placing, (0.0, 1.0)) * (1 + 1e-3)


@settings(max_examples=3, deadline=None)
@given(random_machine())
def test_streaming_finds_what_a_finer_grid_finds(on: SimulatedMachine) -> None:
    asked = clock("opt-6.7b", on, batch=4)
    found = streaming(asked)
    assert found is not None
    for batches, weights, kv, attend in product((1, 2, 4), (0.0, 0.31, 0.77, 1.0), (0.0, 0.5, 1.0), (0, 1)):
        placing = streamed(asked, batches, weights, kv, bool(attend) or kv == 1)
        if fits(asked, placing):
            assert found.seconds <= predict(asked, placing).seconds * (1 + 1e-9)


def test_layer_split_by_hand() -> None:
    asked = clock("opt-30b", machine(), prompt=16)  # with 32 tokens it would keep room for copies
    found = layer_split(asked)
    assert found is not None
    cpu_layers, gpu_layers = (band.layers for band in found.placing.bands)
    assert cpu_layers + gpu_layers == 48
    layer_bytes = sum(p.weight_bytes for p in asked.model.layers[0])
    assert gpu_layers == pytest.approx(0.92 * 24e9 / layer_bytes, abs=1)
    all_cpu = predict(asked, compare(asked)[0].placing)
    per_layer = all_cpu.decode.seconds / 48
    assert found.decode.seconds == pytest.approx(per_layer * (cpu_layers + gpu_layers / 10), rel=0.05)


def test_a_model_that_fits_lies_on_the_gpu_whatever_the_policy() -> None:
    asked = clock("opt-6.7b", machine(memory=40 * GB))
    found = {p.placing.policy: p for p in compare(asked)}
    for name in ("streaming", "layer split", "TwinPilots", "hetrun"):
        assert found[name].decode.seconds == pytest.approx(found["hetrun"].decode.seconds, rel=0.01)
    assert found["hetrun"].placing.notes == ("32 layers on the GPU",)
