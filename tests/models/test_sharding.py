"""Shares: a scope cut by rows, heads or experts gives what it gives as a whole, wherever the parts run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun import LLM
from hetrun.backend import Backend, Segment
from hetrun.backends import reference
from hetrun.errors import OptionError
from hetrun.graph import Graph, kv_shapes
from hetrun.graph.ops import Attention, Moe
from hetrun.graph.signature import form_of
from hetrun.planner.plan import BUCKETS, Placement, PlanSet, cut, make_plans, share_out
from hetrun.planner.plan_file import load_plan
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.kernels import needs_compiler
from tests.models import cases, cases_hf, tiny
from tests.models.test_placement import devices, devices_side_by_side, teacher_forced
from tests.support.closeness import assert_close, kl_of_each, limit
from tests.support.part_backends import backends, rounding
from tests.support.rig import Case, Rig, ThreadedDevice, graph_of, model_file, rig
from tests.support.shares import everywhere, shareable, shared

GQA = graph_of(cases.GQA)
MIXTURE = cases_hf.MIXTRAL[0]
QK_NORM = cases_hf.QWEN3[3]
EACH = [param.values[0] for param in cases_hf.EACH]
TOKENS = tiny.random_tokens(40, seed=7)


def ordered(parts: Sequence[Placement], order: Sequence[int], whole: int = -1) -> tuple[Placement, ...]:
    """Shares in an order; the one with this number has all weights."""
    shares = [p.share for p in parts]
    return tuple(
        replace(p, share=replace(s, order=tuple(order), whole=i == whole))
        for i, (p, s) in enumerate(zip(parts, shares, strict=True))
        if s
    )


def plans(graph: Graph, placements: tuple[Placement, ...], alone: Sequence[str] = ()) -> PlanSet:
    return PlanSet(make_plans(graph, dict.fromkeys(BUCKETS, (1, placements)), alone), 512, "a test")


def shared_rig(
    case: Case, devs: Mapping[str, Backend], placements: tuple[Placement, ...], kv: str = "F32"
) -> Rig:
    alone = [name for name, d in devs.items() if d.asynchronous]
    return rig(case, devs, plans=plans(graph_of(case), placements, alone), kv_type=kv)


def said(
    made: Rig, pieces: tuple[int, ...], tokens: Sequence[int] = TOKENS, *, close: bool = True
) -> np.ndarray:
    """All logits of a text. What ran them is closed: compiled graphs that are not closed stay in memory, and
    there are hundreds here. Without `close` the devices stay open, for another rig."""
    try:
        return teacher_forced(made, pieces, tokens)
    finally:
        if close:
            made.close()
        else:
            made.executor.close()


# --- what can be shared out


@st.composite
def sharings(draw: st.DrawFn, graph: Graph, names: Sequence[str], step: int = 1) -> tuple[Placement, ...]:
    """Some scopes shared out among backends, at random borders; none within another."""
    out = [Placement("", draw(st.sampled_from(names)), "a test")]
    for scope, kind, of, unit in draw(
        st.lists(st.sampled_from(shareable(graph, step)), min_size=1, max_size=4)
    ):
        taken = [p.scope for p in out if p.share]
        if any(f"{scope}.".startswith(f"{t}.") or f"{t}.".startswith(f"{scope}.") for t in taken):
            continue
        inner = draw(st.sets(st.integers(1, of // unit - 1), min_size=1, max_size=3))
        borders = [0, *(unit * n for n in sorted(inner)), of]
        backends = draw(st.lists(st.sampled_from(names), min_size=len(borders), max_size=len(borders)))
        some = shared(scope, kind, borders, backends)
        out += draw(in_order(some)) if kind == "experts" and draw(st.booleans()) else some
    return tuple(out)


@st.composite
def in_order(draw: st.DrawFn, parts: Sequence[Placement]) -> list[Placement]:
    """Shares of experts in any order, some of them with the weights of all."""
    share = parts[0].share
    assert share
    return list(ordered(parts, draw(st.permutations(range(share.of))), draw(st.integers(0, len(parts)))))


OWN = [pytest.param(case, id=str(case)) for case in (cases.GQA, cases.LLAMA[6], MIXTURE, QK_NORM)]


@pytest.mark.parametrize("case", [*OWN, *cases_hf.only(cases_hf.FEW, cases_hf.EACH)])
def test_any_shares_on_any_backends_are_close_to_the_whole(case: Case) -> None:
    """Biases, norms of heads, windows, experts, the last product; one after the other or side by side."""
    names = backends()
    expected = said(rig(case, devices(["reference"])), (40,))
    in_turn, together = devices(names), devices_side_by_side(names)
    close = max(limit(case) if case in EACH else 1e-4, 1e-4 * np.abs(expected).max())

    @given(sharings(graph_of(case), names), st.sampled_from([(40,), (7, 1, 1, 31)]), st.booleans())
    @settings(max_examples=8 if case in EACH else 25)
    def check(placements: tuple[Placement, ...], pieces: tuple[int, ...], beside: bool) -> None:
        found = said(shared_rig(case, together if beside else in_turn, placements), pieces, close=False)
        assert np.abs(expected - found).max() < close

    check()
    for device in (*in_turn.values(), *together.values()):
        device.close()


@pytest.mark.parametrize("name", [n for n in backends() if n != "reference"])
@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_k"])
def test_rows_of_quantised_products_are_the_same_rows(quant: str, name: str) -> None:
    """On one backend, at borders of its interleaving. numpy's sums depend on the size of a product."""
    case = next(c for c in cases.QUANTISED if c.name == quant)
    expected = said(rig(case, devices([name])), (30, 1, 1, 8))

    # A gate inside of llamacpp's own products rounds otherwise than ggml's, which joins shares of halves.
    graph = rows_only(graph_of(case), gated=name != "llamacpp")

    @given(sharings(graph, [name], step=64))
    @settings(max_examples=6)
    def check(placements: tuple[Placement, ...]) -> None:
        found = said(shared_rig(case, devices([name]), placements), (30, 1, 1, 8))
        assert (found == expected).all()

    check()


def rows_only(graph: Graph, gated: bool = True) -> Graph:
    """Without what can be shared out in another way, and with or without the two halves that a gate joins."""
    halves = {v for op in graph.ops if op.kind in ("swiglu", "geglu") for v in op.inputs}
    kept = tuple(op for op in graph.ops if op.kind == "linear" and (gated or op.out not in halves))
    return Graph(kept, graph.hidden, graph.logits)


@pytest.mark.parametrize("kv_type", ["F16", "Q8_0"])
def test_shares_of_quantised_heads_stay_close(kv_type: str) -> None:
    """Each writes and reads its own columns of rows that the others write and read too."""
    case = next(c for c in cases.QUANTISED if c.name == "q8_0")
    names = backends()
    expected = said(rig(case, devices(["reference"]), kv_type=kv_type), (40,))
    heads = shared("blk.0.attn", "heads", [0, 1, 2], [names[0], names[-1]])
    more = shared("blk.1.attn", "heads", [0, 1, 2], [names[-1], names[0]])
    for first in names:
        placements = everywhere(first, *heads, *more)
        found = said(shared_rig(case, devices(names), placements, kv_type), (20, 1, 19))
        assert_close(expected, found, kl=0.02)


@pytest.mark.parametrize(
    ("case", "name"),
    cases_hf.crossed(
        [str(case.id) for case in OWN], [OWN[0], *OWN[2:]], sorted(rounding(), key="amx-lean".__ne__)
    ),
)
def test_shares_of_a_backend_that_rounds_stay_as_close_as_it_is(case: Case, name: str) -> None:
    graph = graph_of(case)
    expected = said(rig(case, devices(["reference"])), (40,))
    pieces = (20, 1, 1, 18)

    def distance(made: Rig) -> float:
        # Of a mean, one token whose rounding sends it to another expert makes most.
        return float(np.median(kl_of_each(expected, said(made, pieces))))

    whole = distance(rig(case, devices([name])))
    both = [name, "reference"]
    attention = [p for i in (0, 1) for p in shared(f"blk.{i}.attn", "heads", [0, 1, 2], both[:: 1 - 2 * i])]
    others = [
        p for scope, kind, of, _ in shareable(graph) for p in shared(scope, kind, [0, of // 2, of], both)
    ]
    rest = [p for p in others if ".attn" not in p.scope]
    for placements in (attention, rest, [*attention, *rest]):
        assert distance(shared_rig(case, devices(both), everywhere(name, *placements))) <= 1.5 * whole


def test_shares_are_in_flight_at_once() -> None:
    """Each device waits in its share until the other one is in its own: only together they come through."""
    meeting = threading.Barrier(2, timeout=30)
    met: list[str] = []

    def before(segment: Segment) -> None:
        if any(".heads" in op.scope or ".rows" in op.scope for op in segment.ops):
            meeting.wait()
            met.append(segment.backend)

    devs: dict[str, Backend] = {n: ThreadedDevice(reference.create(n), before) for n in ("one", "two")}
    both = ["one", "two"]
    placements = everywhere(
        "one",
        *shared("blk.0.attn", "heads", [0, 1, 2], both),
        *shared("blk.1.ffn.up", "rows", [0, 64, 192], both),
    )
    made = shared_rig(cases.GQA, devs, placements)
    found = said(made, (40,))
    expected = said(rig(cases.GQA, devices(["reference"])), (40,))
    assert np.abs(expected - found).max() < 1e-4
    assert sorted(met) == ["one", "one", "two", "two"]


# --- plans


def test_a_share_is_a_scope_with_its_part_of_the_weights() -> None:
    placements = everywhere("a", *shared("blk.0.attn", "heads", [0, 1, 2], ["a", "b"]))
    graph, placed = share_out(GQA, placements)
    assert [p.scope for p in placed] == ["", "blk.0.attn.heads0-1", "blk.0.attn.heads1-2"]
    mine = [op for op in graph.ops if op.scope.startswith("blk.0.attn.heads1-2.")]
    shapes = {op.scope.split(".")[-1]: op.weights[0].shape for op in mine if op.kind == "linear"}
    assert shapes == {"q": (64, 128), "k": (32, 128), "v": (32, 128), "out": (128, 64)}
    (attention,) = (op.attrs for op in mine if isinstance(op.attrs, Attention))
    assert (attention.first, attention.n_kv_heads, attention.n_heads) == (1, 1, 2)
    assert kv_shapes(graph) == kv_shapes(GQA)
    assert graph.outputs == GQA.outputs
    assert {s.backend for stage in cut(GQA, placements, ["b"]) for s in stage} == {"a", "b"}
    together = [stage for stage in cut(GQA, placements, ["b"]) if len(stage) == 2]
    assert [{s.backend for s in stage} for stage in together] == [{"a", "b"}]


def test_a_bias_counts_once() -> None:
    graph, _ = share_out(
        graph_of(cases.LLAMA[6]), everywhere("a", *shared("blk.0.attn", "heads", [0, 1, 2], ["a", "b"]))
    )
    out = [op for op in graph.ops if op.kind == "linear" and op.scope.endswith("out")]
    assert [len(op.weights) for op in out] == [2, 1, 2]


def test_experts_in_an_order_get_other_numbers_and_a_share_with_all_needs_no_more() -> None:
    graph = graph_of(MIXTURE)
    cold, hot = ordered(shared("blk.0.ffn.exp", "experts", [0, 4, 6], "ab"), [1, 2, 3, 5, 4, 0], whole=0)
    divided, _ = share_out(graph, everywhere("a", cold, hot))
    whole = next(op for op in graph.ops if op.scope == "blk.0.ffn.exp")
    here, there = (op for op in divided.ops if op.scope.startswith("blk.0.ffn.exp.experts"))
    assert here.weights == whole.weights
    assert isinstance(here.attrs, Moe)
    assert isinstance(there.attrs, Moe)
    assert here.attrs.without == (0, 4)
    assert (there.attrs.first, there.attrs.held, there.attrs.without) == (0, 2, ())
    assert (here.attrs.computed, there.attrs.computed) == ([1, 2, 3, 5], [0, 4])
    router, gate, _, _ = there.weights
    n = whole.attrs.n_ff if isinstance(whole.attrs, Moe) else 0
    assert router.name == "blk.0.ffn_gate_inp.weight[experts 4, 0-3, 5]"
    assert gate.name == "blk.0.ffn_gate_exps.weight[experts 4, 0]"
    assert gate.parts == (*whole.weights[1].blocks([4], n, "").parts, *whole.weights[1].rows(0, n).parts)
    assert form_of([here]) == form_of([replace(here, attrs=replace(here.attrs, without=(1, 5)))])
    assert form_of([here]) != form_of([whole])


WRONG = [
    (
        shared("blk.0.ffn.up", "rows", [0, 64, 192], "ab")[:1],
        "rows of blk.0.ffn.up as 0-64; each must be in one",
    ),
    (shared("blk.0.ffn.up", "rows", [0, 64, 192], "ab")[1:], "as 64-192; each must be in one share"),
    (
        (*shared("blk.0.ffn.up", "rows", [0, 64, 192], "ab"), *shared("blk.0.ffn.up", "rows", [0, 192], "a")),
        "as 0-64, 0-192, 64-192; each must be in one share",
    ),
    (shared("blk.0.ffn.up", "rows", [0, 64, 64, 192], "aba"), "each must be in one share"),
    (
        shared("blk.0.ffn.up", "rows", [0, 64, 200], "ab"),
        "200 rows of blk.0.ffn.up, which has products of 192 rows",
    ),
    (
        shared("blk.0.ffn.norm", "rows", [0, 64, 128], "ab"),
        "128 rows of blk.0.ffn.norm, which has no product",
    ),
    (shared("blk.0.ffn", "heads", [0, 1, 2], "ab"), "2 heads of blk.0.ffn, which has no attention"),
    (shared("blk.0.attn", "heads", [0, 1, 4], "ab"), "which has an attention of 2 KV heads"),
    (shared("blk.0.attn.score", "heads", [0, 1, 2], "ab"), "that is not made head by head"),
    (shared("blk.0.ffn", "experts", [0, 1, 2], "ab"), "2 experts of blk.0.ffn, which has no mixture"),
    (
        (*shared("blk.0.ffn", "rows", [0, 192], "a"), *shared("blk.0.ffn", "experts", [0, 192], "a")),
        "shares out blk.0.ffn in several ways",
    ),
    (
        ordered(shared("blk.0.ffn.up", "rows", [0, 64, 192], "ab"), range(192)),
        "shares out rows of blk.0.ffn.up in an order; only experts have one",
    ),
    (
        ordered(shared("blk.0.ffn", "experts", [0, 1, 3], "ab"), [0, 1, 1]),
        "the order of the experts of blk.0.ffn must have each of 3 once",
    ),
    (
        (
            *shared("blk.0.attn", "heads", [0, 1, 2], "ab"),
            *shared("blk.0.attn.q", "rows", [0, 64, 128], "ab"),
        ),
        "128 rows of blk.0.attn.q, which has no product",
    ),
]


@pytest.mark.parametrize(("placements", "message"), WRONG)
def test_shares_that_cannot_be(placements: tuple[Placement, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cut(GQA, everywhere("a", *placements))


def test_a_border_inside_a_block_is_refused() -> None:
    case = next(c for c in cases.QUANTISED if c.name == "q4_k")
    with pytest.raises(OptionError, match=r"blk\.0\.attn where it cannot be cut: .* cut a block of 256 Q4_K"):
        cut(graph_of(case), everywhere("a", *shared("blk.0.attn", "heads", [0, 1, 2], "ab")))


@pytest.mark.parametrize("case", [cases.GQA, MIXTURE], ids=str)
def test_shares_through_the_file_of_a_plan(case: Case, tmp_path: Path) -> None:
    names, graph = backends(), graph_of(case)
    both = [names[0], names[-1]]
    placements = everywhere(names[0], *shared("blk.0.attn", "heads", [0, 1, 2], both))
    if case is MIXTURE:
        placements += shared("blk.1.ffn.exp", "experts", [0, 2, 6], both)
        some = shared("blk.0.ffn.exp", "experts", [0, 4, 6], both)
        placements += ordered(some, [5, 1, 0, 2, 4, 3], whole=0)
    placements += shared("output.head", "rows", [0, 100, tiny.VOCAB], both)
    made = plans(graph, placements)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(made.to_json()))
    assert load_plan(path, graph).buckets["1"] == (1, placements)
    with LLM(model_file(case), backends=["reference"], kv_type="f32") as llm:
        expected = llm.logits(TOKENS)
    with LLM(model_file(case), plan=path, kv_type="f32") as llm:
        assert llm.plan.plans["1"].stages == made.plans["1"].stages
        assert np.abs(expected - llm.logits(TOKENS)).max() < 1e-3


def spoiled(change: Callable[[dict[str, object]], None]) -> dict[str, object]:
    data = plans(GQA, everywhere("a", *shared("blk.0.attn", "heads", [0, 1, 2], "ab"))).to_json()
    change(data["plans"][0]["placements"][1]["share"])
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(kind="columns"), "a share is of rows, heads, experts, not of 'columns'"),
        (lambda s: s.update(a="0"), "a share has numbers a, b and of, not '0'"),
        (lambda s: s.update(b=True), "a share has numbers a, b and of, not True"),
        (lambda s: s.update(more=1), "is not a plan as"),
        (lambda s: s.update(b=2), "each must be in one share"),
        (lambda s: s.update(order=["1", "0"]), "a share has an order of numbers"),
        (lambda s: s.update(whole=1), "a share has an order of numbers, and is whole or not"),
        (lambda s: s.update(whole=True), "only experts have one"),
    ],
)
def test_files_with_shares_that_are_none(
    change: Callable[[dict[str, object]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(spoiled(change)))
    with pytest.raises(OptionError, match=message):
        load_plan(path, GQA)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("tokens", [(1,) * 5, (40,)], ids=["few", "many"])
def test_a_gpu_has_the_experts_of_an_order_beside_a_host_that_has_all(tokens: tuple[int, ...]) -> None:
    """Its kernels know nothing of the order: its router has the same one."""
    names = ["llamacpp", "cuda"]
    order = [5, 0, 3, 1, 4, 2]
    shares = [
        p
        for scope in ("blk.0.ffn.exp", "blk.1.ffn.exp")
        for p in ordered(shared(scope, "experts", [0, 3, 6], names), order, whole=0)
    ]
    backends = devices(["llamacpp"]) | {"cuda": emulated(grant=24 << 20, name="cuda")}
    text = TOKENS[: sum(tokens)]
    expected = said(rig(MIXTURE, devices(["reference"])), (len(text),), text)
    made = shared_rig(MIXTURE, backends, everywhere("llamacpp", *shares))
    assert np.abs(expected - said(made, tokens, text)).max() < 1e-2 * np.abs(expected).max()
