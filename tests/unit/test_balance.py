"""The programme for two devices: its optimum against every assignment, its records, and what moving costs."""

from __future__ import annotations

import logging
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.errors import OptionError
from hetrun.forecast import Forecast
from hetrun.planner import balance as module
from hetrun.planner.balance import (
    Balance,
    Balancer,
    Link,
    Migration,
    Operation,
    Times,
    balance,
    makespan,
    operations,
    placements,
    work,
)
from tests.models import cases, cases_hf
from tests.rig import Case, graph_of

# OPT-30B on an A10G, prompt 896 and 128 more, off the paper's figure 6a: q, k, v, score, out, mlp1, mlp2.
CPU = (4.7, 4.7, 4.7, 3.5, 4.7, 18.0, 18.0)
GPU = (8.0, 8.0, 8.0, 11.5, 8.0, 31.0, 31.0)


def by_brute_force(host: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The least makespan of all assignments, one by one."""
    best = float("inf")
    for here in product((False, True), repeat=len(host)):
        mine = rest = 0.0
        for h, o, on_host in zip(host, other, here, strict=True):
            if on_host:
                mine += h
            else:
                rest += o
        best = min(best, max(mine, rest))
    return best


def test_the_papers_times_give_the_papers_layer() -> None:
    found = balance(CPU, GPU)
    assert found.seconds == pytest.approx(39, abs=0.5)
    assert makespan((False,) * 7, CPU, GPU) == pytest.approx(105, abs=0.6)
    assert makespan((True,) * 7, CPU, GPU) == pytest.approx(58, abs=0.5)
    assert found.seconds == makespan(found.on_host, CPU, GPU)


TIMES = st.floats(0, 100, allow_nan=False) | st.sampled_from((0.0, 1.0, 2.0, 1e-9))


@given(st.integers(0, 7).flatmap(lambda n: st.tuples(*[st.tuples(*[TIMES] * n)] * 2)))
@settings(max_examples=100)
def test_the_optimum_is_that_of_every_assignment(times: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    host, other = times
    found = balance(host, other)
    assert found.seconds == pytest.approx(by_brute_force(host, other), rel=1e-9)
    assert len(found.on_host) == len(host)


@given(st.integers(1, 10).flatmap(lambda n: st.tuples(*[st.tuples(*[TIMES] * n)] * 2)))
@settings(max_examples=25)
def test_highs_finds_the_same_optimum(times: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    pytest.importorskip("scipy")
    host, other = times
    found = makespan(module._solve(host, other), host, other)
    assert found == pytest.approx(by_brute_force(host, other), rel=1e-5, abs=1e-5)


def test_more_operations_than_can_be_enumerated() -> None:
    """Four layers: four times the optimum of one is an upper bound, cut operations are a lower one."""
    pytest.importorskip("scipy")
    host, other = CPU * 4, GPU * 4
    found = balance(host, other)
    assert len(host) > module.ENUMERATED
    assert cut_to_measure(host, other) <= found.seconds <= 4 * balance(CPU, GPU).seconds * (1 + 1e-6)


def cut_to_measure(host: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The makespan if an operation may be cut: who gains most by the host goes there."""
    mine, rest = 0.0, sum(other)
    for h, o in sorted(zip(host, other, strict=True), key=lambda t: t[0] / t[1]):
        part = min(1.0, (rest - mine) / (h + o))
        mine, rest = mine + part * h, rest - part * o
        if part < 1:
            break
    return max(mine, rest)


def test_of_equally_good_assignments_the_one_with_less_work() -> None:
    assert balance((1.0, 5.0), (1.0, 5.0)).seconds == 5.0
    # Only the long operation decides; the short one goes where it costs less.
    assert balance((2.0, 9.0), (1.0, 100.0)).on_host == (False, True)


@pytest.mark.parametrize("host", [(float("nan"),), (float("inf"),), (-1.0,)])
def test_times_that_are_none(host: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="times must be numbers of 0 or more"):
        balance(host, (1.0,))
    with pytest.raises(ValueError, match="1 times on the host and 2"):
        balance((1.0,), (1.0, 2.0))


# --- operations


@pytest.mark.parametrize("case", [cases.GQA, cases_hf.QWEN3[3], *cases_hf.EACH], ids=str)
def test_every_op_of_a_layer_belongs_to_one_operation(case: Case) -> None:
    graph = graph_of(case)
    found = operations(graph, 0)
    mine = [op for op in graph.ops if op.scope.startswith("blk.0.")]
    assert sorted(op.out.name for o in found for op in o.ops) == sorted(op.out.name for op in mine)
    scopes = [scope for o in found for scope in o.scopes]
    assert len(scopes) == len(set(scopes))
    names = [o.name for o in found]
    assert names[:5] == ["q", "k", "v", "score", "out"]
    assert names[5:] in (["mlp1", "mlp2"], ["mlp2"])


def test_layers_of_one_shape_share_their_records() -> None:
    graph = graph_of(cases.LLAMA[0])
    assert [o.form for o in operations(graph, 0)] == [o.form for o in operations(graph, 1)]
    with pytest.raises(OptionError, match=r"^blk\.9 is no part"):
        operations(graph, 9)


def test_a_layer_as_it_was_balanced() -> None:
    of = operations(graph_of(cases.GQA), 0)
    placed = placements(Balance((True, False, False, True, True, False, True), 0.039), of, "here", "there")
    assert {p.scope: p.backend for p in placed} == {
        "blk.0.attn.q": "here", "blk.0.attn.norm": "there", "blk.0.attn.k": "there", "blk.0.attn.v": "there",
        "blk.0.attn.score": "here", "blk.0.attn.out": "here", "blk.0.ffn.norm": "there",
        "blk.0.ffn.gate": "there", "blk.0.ffn.up": "there", "blk.0.ffn.down": "here",
    }  # fmt: skip
    assert {p.why for p in placed} == {"balanced: both devices are busy for 39 ms in this layer"}


# --- records


LAYER = operations(graph_of(cases.GQA), 0)


def measured(layer: tuple[Operation, ...] = LAYER, scale: float = 1.0) -> Forecast:
    """The paper's times at batch 4 and 512 tokens: on the host linear in the batch, and score in b * s; on
    the other device the loading, which grows for score only."""
    forecast = Forecast()
    for b, s in ((2, 128), (2, 512), (4, 128), (4, 512), (8, 512)):
        for o, h, g in zip(layer, CPU, GPU, strict=True):
            part = b / 4 * (s / 512 if o.name == "score" else 1)
            loading = part if o.name == "score" else 1
            for _ in range(12):
                forecast.learn(work(o, "host", b), b, s, scale * h / 1000 * part)
                forecast.learn(work(o, "device", b), b, s, g / 1000 * loading)
    return forecast


def test_records_are_asked_for_any_batch_and_length() -> None:
    chooser = Balancer(LAYER, "host", "device", measured())
    assert chooser.choose(4, 512).seconds == pytest.approx(0.039, rel=0.05)
    times = chooser.times(6, 256)
    score = [o.name for o in LAYER].index("score")
    assert times.host[score] == pytest.approx(3.5e-3 * 6 / 4 * 256 / 512, rel=0.15)
    assert times.host[-1] == pytest.approx(18e-3 * 6 / 4, rel=0.1)
    assert times.other[-1] == pytest.approx(31e-3, rel=0.05)
    # Loading costs the same for every batch: with more tokens the other device takes more.
    few, many = (sum(chooser.choose(b, 512).on_host) for b in (2, 16))
    assert few > many


def test_a_plan_is_kept_until_a_time_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    forecast = measured()
    chooser = Balancer(LAYER, "host", "device", forecast)
    first = chooser.choose(4, 512)
    assert chooser.choose(4, 600) is first  # the same bucket of lengths
    assert [r.reason for r in chooser.replans] == ["this batch and length are new"]
    for o, h in zip(LAYER, CPU, strict=True):
        for _ in range(60):
            forecast.learn(work(o, "host", 4), 4, 512, 3 * h / 1000)
    second = chooser.choose(4, 512)
    assert sum(second.on_host) < sum(first.on_host)
    assert "a time changed by" in chooser.replans[1].reason
    assert [r.message for r in caplog.records if r.name == module.__name__][1].startswith(
        "balanced for batch 4 and 512 tokens (a time changed by"
    )


def test_what_was_never_measured() -> None:
    with pytest.raises(OptionError, match="q was never measured on host; run it there"):
        Balancer(LAYER, "host", "device", Forecast()).choose(1, 16)


def test_resident_weights_cost_no_loading() -> None:
    forecast = measured()
    for _ in range(12):
        for o in LAYER[-2:]:
            forecast.learn(work(o, "device", 4, resident=True), 4, 512, 1e-3)
    resident = {"mlp1": True, "mlp2": True}
    chooser = Balancer(LAYER, "host", "device", forecast, resident)
    found = chooser.choose(4, 512)
    assert found.on_host[-2:] == (False, False)
    assert found.seconds < 0.5 * balance(CPU, GPU).seconds / 1000


# --- moving keys and values


def test_moving_keys_and_values_has_a_price() -> None:
    """Score is a little faster on the other device: worth it only if the plan stays for long enough."""
    layer = (LAYER[3],)
    forecast = Forecast()
    for _ in range(12):
        forecast.learn(work(layer[0], "host", 1), 1, 512, 4e-3)
        forecast.learn(work(layer[0], "device", 1), 1, 512, 6e-3)
    link = Link(1e9, latency=1e-4)
    assert link.seconds(10_000_000) == pytest.approx(0.0101)
    chooser = Balancer(layer, "host", "device", forecast)
    assert chooser.choose(1, 512).on_host == (True,)
    for _ in range(60):
        forecast.learn(work(layer[0], "device", 1), 1, 512, 3.5e-3)
    assert chooser.choose(1, 512, Migration(10_000_000, link, steps=10)).on_host == (True,)
    for _ in range(60):
        forecast.learn(work(layer[0], "device", 1), 1, 512, 3.0e-3)
    assert chooser.choose(1, 512, Migration(10_000_000, link, steps=1000)).on_host == (False,)


@given(st.tuples(*[st.floats(0.001, 1)] * 7), st.tuples(*[st.floats(0.001, 1)] * 7), st.booleans())
@settings(max_examples=60)
def test_a_score_that_stays_pays_nothing(
    host: tuple[float, ...], other: tuple[float, ...], on_host: bool
) -> None:
    times, price = Times(host, other), Migration(1 << 20, Link(1e6), 1)
    moved = times.moved(3, on_host, price)
    changed = [a != b for a, b in zip((*host, *other), (*moved.host, *moved.other), strict=True)]
    assert changed == [i == (10 if on_host else 3) for i in range(14)]
    free, paid = balance(host, other), balance(moved.host, moved.other)
    assert free.seconds <= paid.seconds + 1e-12
    if paid.on_host[3] != on_host:
        assert paid.seconds >= price.seconds
