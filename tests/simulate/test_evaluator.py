"""The clock: small cases by hand, and paths against every combination there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.tools.simulate.evaluator import StepCosts, predict
from hetrun.tools.simulate.layer_paths import PartCost, Path, best, moves, paths
from hetrun.tools.simulate.machine import SimulatedLink
from hetrun.tools.simulate.policies.common import every
from hetrun.tools.simulate.policies.flexgen import streamed
from hetrun.tools.simulate.policies.layer_split import on_processor
from hetrun.tools.simulate.types import Band, ComputeShares, PolicyPlacement, SimulatedSetting
from tests.simulate.questions import GB, clock, machine, model

LINK = SimulatedLink(10.0, 0.0)
# Bytes are ones, and the link takes a second for ten of them.
PART = PartCost(
    10.0, 1.0, (0.0, 0.0), stream=40.0, takes=5.0, gives=5.0, fresh=0.0, fresh_home=0.0, there=0.0
)


def test_a_part_in_place_streamed_and_split() -> None:
    (in_place,) = paths([PART], [[0.0]], LINK)
    assert (in_place.chain, in_place.copies) == (10.0, 0.0)
    (streamed,) = paths([PART], [[1.0]], LINK)
    assert (streamed.chain, streamed.copies) == (1.0, 4.0)
    (split,) = paths([PART], [[0.5]], LINK)  # half of it beside half, values there and half of them back
    assert (split.chain, split.copies) == (5.0 + 0.5 + 0.25, 2.0)
    resident = replace(PART, there=0.5)
    (half,) = paths([resident], [[0.5]], LINK)
    assert half.copies == 0.0


def test_values_that_change_sides_are_waited_for() -> None:
    found = paths([PART, PART], [[1.0], [0.0]], LINK)
    assert [p.chain for p in found] == [11.0 + 2 * 0.5]  # to the GPU, and back for the second


def test_new_keys_go_home_over_the_link() -> None:
    maker = replace(PART, stream=0.0, fresh=20.0, fresh_home=1.0)
    assert [p.copies for p in paths([maker], [[0.0]], LINK)] == [2.0]
    assert [p.copies for p in paths([maker], [[1.0]], LINK)] == [0.0]


def seconds(least: float = 0.0) -> st.SearchStrategy[float]:
    return st.floats(least, 100.0, allow_subnormal=False)


costs = st.builds(
    PartCost,
    cpu=seconds(),
    gpu=seconds(),
    launches=st.tuples(seconds(), seconds()),
    stream=seconds(),
    takes=seconds(),
    gives=seconds(),
    fresh=seconds(),
    fresh_home=st.sampled_from([0.0, 1.0]),
    there=st.just(0.0),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(costs, min_size=1, max_size=3), st.sampled_from([(0.0, 1.0), (0.0, 0.5, 1.0)]))
def test_paths_are_all_that_nothing_beats(parts: list[PartCost], shares: tuple[float, ...]) -> None:
    link = SimulatedLink(3.0, 0.5)
    everything: list[Path] = []
    for start in (0, 1):
        for chosen in product(shares, repeat=len(parts)):
            reached = [(start, 0.0, 0.0)]
            for part, share in zip(parts, chosen, strict=True):
                reached = [
                    (end, a + chain, b + copies)
                    for side, a, b in reached
                    for end, chain, copies in moves(part, share, side, link)
                ]
            everything += [Path(a, b, chosen) for end, a, b in reached if end == start]
    expected = [(p.chain, p.copies) for p in best(everything)]
    found = [(p.chain, p.copies) for p in paths(parts, [shares] * len(parts), link)]
    assert min(map(max, found)) == pytest.approx(min(map(max, expected)))
    assert {p for p in found} <= {(p.chain, p.copies) for p in everything}
    bound = min(map(max, found)) * (1 + 1e-9)
    assert min(max(p.chain, p.copies) for p in paths(parts, [shares] * len(parts), link, bound)) <= bound


def test_what_everything_on_the_processor_takes() -> None:
    asked = clock("opt-30b", generate=1)
    found = predict(asked, on_processor(asked))
    s = asked.setting
    each = sum(
        w.seconds(s.machine.cpu) for layer in s.model.layers for w in (asked.work(p, s.decode) for p in layer)
    )
    outside = sum(asked.work(p, s.decode).seconds(s.machine.cpu) for p in (s.model.before, s.model.after))
    assert found.decode.seconds == pytest.approx(each + outside)
    assert found.decode.copied == 0
    assert found.seconds == found.prefill.seconds  # the first token comes with the prompt
    assert sum(found.bill.gpu.values()) == 0
    assert found.bill.cpu["weights"] == s.model.weight_bytes
    assert found.bill.cpu["kv"] == pytest.approx(48 * 2 * 7168 * 2 * 65, rel=1e-9)


def test_streaming_everything_takes_what_the_link_takes() -> None:
    asked = clock("opt-30b", machine(bandwidth=1e15, bf16=1e18))
    found = predict(asked, streamed(asked, 1, 0.0, 0.0, True))
    layers = sum(p.weight_bytes for layer in asked.model.layers for p in layer)
    assert found.decode.seconds == pytest.approx((layers + asked.model.after.weight_bytes) / 10e9, rel=0.01)
    assert found.decode.copied == pytest.approx(layers, rel=0.01)


def test_weights_that_no_memory_holds_come_from_disk() -> None:
    small = machine()
    small = replace(small, cpu=replace(small.cpu, memory=40 * GB))
    asked = StepCosts(SimulatedSetting(small, model("opt-30b"), 1, 64, 16))
    found = predict(asked, on_processor(asked))
    over = sum(found.bill.cpu.values()) - small.cpu.usable
    assert found.bill.disk == pytest.approx(over, abs=10)
    assert found.decode.seconds == pytest.approx(found.bill.disk / 2e9)
    careless = predict(asked, replace(on_processor(asked), rereads=True))
    assert careless.decode.seconds > asked.model.weight_bytes / 2e9
    bare = StepCosts(SimulatedSetting(replace(small, disk=None), model("opt-30b"), 1, 64, 16))
    assert "weights" in bare.bill(on_processor(bare)).problem


def test_keys_and_values_cannot_go_to_disk() -> None:
    asked = clock("opt-30b", batch=64, prompt=8000)
    assert "keys and values" in asked.bill(on_processor(asked)).problem


def test_no_side_computes_what_the_other_holds() -> None:
    asked = clock("opt-30b")
    all_of, none_of = every(asked, 1.0), every(asked, 0.0)
    wrong = PolicyPlacement(
        "wrong", (Band(48, all_of),), False, ComputeShares((none_of,)), ComputeShares((none_of,))
    )
    with pytest.raises(ValueError, match="only the GPU holds"):
        predict(asked, wrong)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.0, 1.0), st.sampled_from(["opt-30b", "llama-70b"]), st.floats(1.0, 10.0))
def test_faster_parts_never_make_a_placement_slower(weights: float, name: str, factor: float) -> None:
    slow = machine()
    placing = streamed(clock(name, slow), 1, weights, 0.5, False)
    before = predict(clock(name, slow), placing)
    assert slow.gpu is not None
    assert slow.link is not None
    for faster in (
        replace(slow, cpu=replace(slow.cpu, bandwidth=slow.cpu.bandwidth * factor)),
        replace(slow, gpu=replace(slow.gpu, bandwidth=slow.gpu.bandwidth * factor)),
        replace(slow, gpu=replace(slow.gpu, bf16=slow.gpu.bf16 * factor)),
        replace(slow, link=replace(slow.link, bandwidth=slow.link.bandwidth * factor)),
    ):
        after = predict(clock(name, faster), placing)
        assert after.decode.seconds <= before.decode.seconds * (1 + 1e-9)
        assert after.prefill.seconds <= before.prefill.seconds * (1 + 1e-9)
