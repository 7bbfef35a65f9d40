"""The programme for two devices: its optimum against every assignment, and what moving costs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.errors import OptionError
from hetrun.graph.ops import DeltaNet
from hetrun.planner.two_device import balance as module
from hetrun.planner.two_device.balance import (
    Balance,
    HostLink,
    Migration,
    balance,
    makespan,
    operations,
    placements,
)
from tests.models import cases, cases_hf
from tests.support.rig import Case, graph_of

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
    pytest.importorskip("highspy")
    host, other = times
    found = makespan(module._solve(host, other, [0.0] * len(host), 0.0), host, other)
    assert found == pytest.approx(by_brute_force(host, other), rel=1e-5, abs=1e-5)


def test_more_operations_than_can_be_enumerated() -> None:
    """Four layers: four times the optimum of one is an upper bound, cut operations are a lower one."""
    pytest.importorskip("highspy")
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
    latent = "per_head" in {op.kind for op in mine}  # keys are the values as well
    # One product makes x, B and C of a scan.
    scanned = any(
        isinstance(op.attrs, DeltaNet) and op.attrs.mamba for op in mine
    )  # one product makes x, B and C
    usual = ["q", "k", "score", "out"] if latent or scanned else ["q", "k", "v", "score", "out"]
    assert names[: len(usual)] == usual
    assert names[len(usual) :] in (["mlp1", "mlp2"], ["mlp2"])


def test_layers_of_one_shape_share_their_records() -> None:
    graph = graph_of(cases.LLAMA[0])
    assert [o.form for o in operations(graph, 0)] == [o.form for o in operations(graph, 1)]
    with pytest.raises(OptionError, match=r"^blk\.9 is not one of the seven operations"):
        operations(graph, 9)


def test_a_layer_as_it_was_balanced() -> None:
    of = operations(graph_of(cases.GQA), 0)
    placed = placements(Balance((True, False, False, True, True, False, True), 0.039), of, "here", "there")
    assert {p.scope: p.backend for p in placed} == {
        "blk.0.attn.q": "here", "blk.0.attn.norm": "there", "blk.0.attn.k": "there", "blk.0.attn.v": "there",
        "blk.0.attn.score": "here", "blk.0.attn.out": "here", "blk.0.ffn.norm": "there",
        "blk.0.ffn.gate": "there", "blk.0.ffn.up": "there", "blk.0.ffn.down": "here",
    }  # fmt: skip
    assert {p.why for p in placed} == {"balanced: this layer takes 39 ms on both devices together"}


# --- what the host waits for, and what it does besides


SOME = st.floats(0.001, 1)


@given(st.tuples(*[st.tuples(*[SOME] * 4)] * 3), SOME)
@settings(max_examples=60)
def test_what_the_host_waits_for_counts_beside_its_own_work(
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]], rest: float
) -> None:
    host, other, between = times
    found = balance(host, other, between, rest)
    every = product((False, True), repeat=len(host))
    best = min(
        max(
            rest + sum(h if on_host else w for h, w, on_host in zip(host, between, here, strict=True)),
            sum(o for o, on_host in zip(other, here, strict=True) if not on_host),
        )
        for here in every
    )
    assert found.seconds == pytest.approx(best, rel=1e-9)
    pytest.importorskip("highspy")
    solved = module._solve(host, other, between, rest)
    assert makespan(solved, host, other, between, rest) == pytest.approx(best, rel=1e-5)


def test_what_crosses_once_is_divided_by_the_steps_that_pay_for_it() -> None:
    link = HostLink(1e9, latency=1e-4)
    assert link.seconds(10_000_000) == pytest.approx(0.0101)
    assert Migration(10_000_000, link, steps=10).seconds == pytest.approx(0.00101)
    assert Migration(0, link, steps=10).seconds == 0
