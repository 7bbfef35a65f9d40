"""Cutting a graph by placements, printing, saving and loading."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend import Segment
from hetrun.errors import OptionError
from hetrun.graph import Op, Value
from hetrun.planner.plan import (
    BUCKETS,
    BY_ORDER,
    MEASURED,
    ExpectedTimes,
    Placement,
    Plan,
    PlanSet,
    bucket_of,
    cut,
    make_plans,
    place,
)
from hetrun.planner.plan_file import load_plan
from hetrun.planner.rates import Residence, TokenRates
from tests.models.cases import GQA
from tests.support.rig import graph_of, placements, plan_set

GRAPH = graph_of(GQA)
SCOPES = sorted({".".join(op.scope.split(".")[:n]) for op in GRAPH.ops for n in range(1, 5)})


def shown(stages: tuple[tuple[Segment, ...], ...]) -> list[list[tuple[str, str]]]:
    return [[(s.name, s.backend) for s in stage] for stage in stages]


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, "1"), (2, "2-4"), (4, "2-4"), (5, "5-8"), (9, "9-16"), (16, "9-16"), (17, "17-32"), (32, "17-32"),
     (33, "33-64"), (64, "33-64"),
     (65, "65-256"), (256, "65-256"), (257, "257-512"), (512, "257-512"), (513, "513+"),
     (100_000, "513+")],
)  # fmt: skip
def test_buckets(tokens: int, bucket: str) -> None:
    assert bucket_of(tokens) == bucket


# --- cutting


def test_one_backend_is_one_segment() -> None:
    ((segment,),) = cut(GRAPH, placements({"": "a"}))
    assert (segment.name, segment.backend, segment.why) == ("model", "a", "the test says so")
    assert segment.ops == GRAPH.ops
    assert segment.reads == ()
    assert segment.writes == GRAPH.outputs


def test_the_coarse_level() -> None:
    placed = {"": "a", "blk.0.ffn": "b", "blk.1.ffn": "b"}
    assert shown(cut(GRAPH, placements(placed))) == [
        [("embed..blk.0.attn.out", "a")],
        [("blk.0.ffn", "b")],
        [("blk.1.attn", "a")],
        [("blk.1.ffn", "b")],
        [("output", "a")],
    ]


def test_what_crosses_is_read_and_written_and_nothing_else() -> None:
    stages = cut(GRAPH, placements({"": "a", "blk.0.ffn": "b"}))
    (first,), (ffn,), (rest,) = stages
    assert first.writes == ffn.reads == (ffn.ops[0].inputs[0],)
    assert ffn.writes == rest.reads
    assert rest.writes == GRAPH.outputs
    assert len(first.ops) + len(ffn.ops) + len(rest.ops) == len(GRAPH.ops)


def test_later_placements_overrule_earlier_ones() -> None:
    op = next(op for op in GRAPH.ops if op.scope == "blk.0.ffn.gate")
    first, second = Placement("blk.0", "a", "first"), Placement("blk.0.ffn", "b", "second")
    assert place([op], [first, second])[0] is second
    assert place([op], [second, first])[0] is first


def test_an_op_that_is_placed_nowhere() -> None:
    with pytest.raises(OptionError, match=r"^the plan has no placement for embed; add one for it or for the"):
        cut(GRAPH, placements({"blk": "a", "output": "a"}))


def test_reasons_are_joined_once_each() -> None:
    everywhere = Placement("", "a", "it is there")
    head = Placement("output.head", "a", "it is fast")
    ((segment,),) = cut(GRAPH, [everywhere, head])
    assert segment.why == "it is there; it is fast"


def test_pieces_of_one_scope_have_names_of_their_own() -> None:
    stages = cut(GRAPH, placements({"": "a", "blk.0.attn.k": "b", "blk.0.attn.v": "b", "blk.0.ffn": "b"}))
    assert shown(stages) == [
        [("embed..blk.0.attn.norm", "a")],
        [("blk.0.attn", "b")],
        [("blk.0.attn#2", "a")],
        [("blk.0.ffn", "b")],
        [("blk.1.attn.norm..output.head", "a")],
    ]


def test_neighbouring_buckets_are_one_range() -> None:
    one, other = placements({"": "a"}), placements({"": "b"})
    for ends, expected in (
        (("1", "5-8", "513+"), ["1", "2-8", "9+"]),
        (("2-4", "65-256", "513+"), ["1-4", "5-256", "257+"]),
        (("513+",), ["all"]),
    ):
        turns = [sum(BUCKETS.index(b) > BUCKETS.index(end) for end in ends) for b in BUCKETS]
        buckets = {b: (1, other if turn % 2 else one) for b, turn in zip(BUCKETS, turns, strict=True)}
        text = PlanSet(make_plans(GRAPH, buckets), 512, "").to_text()
        assert [line.split()[0] for line in text.splitlines()[1:-1]] == expected


def test_work_of_one_thread_is_not_split_for_company() -> None:
    """Two backends that both keep the engine's thread gain nothing from standing side by side."""
    placed = placements({"": "a", "blk.0.attn.q": "b"})
    assert [len(stage) for stage in cut(GRAPH, placed)] == [1, 1, 1]


@pytest.mark.parametrize("alone", [["a"], ["b"], ["a", "b"]])
def test_work_that_can_wait_runs_beside_a_device_that_works_by_itself(alone: list[str]) -> None:
    stages = cut(GRAPH, placements({"": "a", "blk.0.attn.q": "b", "blk.1.ffn.gate": "b"}), alone)
    beside = {s.backend: {op.scope for op in s.ops} for stage in stages if len(stage) == 2 for s in stage}
    assert [len(stage) for stage in stages] == [1, 2, 1, 2, 1]
    assert {s.backend for s in stages[1]} == {"a", "b"}
    assert beside["b"] == {"blk.1.ffn.gate"}
    assert beside["a"] == {"blk.1.ffn.up"}
    first = {s.backend: {op.scope for op in s.ops} for s in stages[1]}
    assert first == {"a": {"blk.0.attn.k", "blk.0.attn.v"}, "b": {"blk.0.attn.q"}}


@st.composite
def random_placements(draw: st.DrawFn) -> dict[str, str]:
    scopes = draw(st.lists(st.sampled_from(SCOPES), max_size=12))
    return {"": "a"} | {scope: draw(st.sampled_from("abc")) for scope in scopes}


@given(placed=random_placements(), alone=st.sets(st.sampled_from("abc")))
@settings(max_examples=150)
def test_any_cut_can_be_run_stage_by_stage(placed: dict[str, str], alone: set[str]) -> None:
    stages = cut(GRAPH, placements(placed), sorted(alone))
    ran: list[Op] = []
    there: set[Value] = set()
    for stage in stages:
        assert len({s.backend for s in stage}) == len(stage) > 0
        made: set[Value] = set()
        for segment in stage:
            assert set(segment.reads) <= there, "it needs something of its own stage or of a later one"
            inside = set(segment.reads)
            for op in segment.ops:
                assert set(op.inputs) <= inside
                assert place([op], placements(placed))[0].backend == segment.backend
                inside.add(op.out)
            assert {op.out for op in segment.ops} >= set(segment.writes)
            made |= set(segment.writes)
            ran += segment.ops
        there |= made
    assert sorted(map(GRAPH.ops.index, ran)) == list(range(len(GRAPH.ops)))
    assert there >= set(GRAPH.outputs)
    names = [s.name for stage in stages for s in stage]
    assert len(set(names)) == len(names)
    read = {v for stage in stages for s in stage for v in s.reads} | set(GRAPH.outputs)
    assert read == {v for stage in stages for s in stage for v in s.writes}


@given(placed=random_placements())
@settings(max_examples=50)
def test_as_few_stages_as_the_changes_of_backend_ask_for(placed: dict[str, str]) -> None:
    """The longest chain of changes decides, also where work was moved to run beside other work."""
    depth: dict[str, int] = {}
    backend: dict[str, str] = {}
    for op in GRAPH.ops:
        mine = place([op], placements(placed))[0].backend
        depth[op.out.name] = max((depth[v.name] + (backend[v.name] != mine) for v in op.inputs), default=0)
        backend[op.out.name] = mine
    for alone in ([], ["b", "c"]):
        assert len(cut(GRAPH, placements(placed), alone)) == max(depth.values()) + 1


# --- plan sets


def test_buckets_with_the_same_placements_share_their_stages() -> None:
    everywhere, split = placements({"": "a"}), placements({"": "a", "output": "b"})
    buckets = {b: (2 if b == "1" else 4, split if b in ("1", "513+") else everywhere) for b in BUCKETS}
    plans = make_plans(GRAPH, buckets)
    assert plans["1"].stages is plans["513+"].stages
    assert plans["2-4"].stages is plans["17-32"].stages
    assert plans["1"].stages is not plans["2-4"].stages
    assert [(p.bucket, p.threads) for p in plans.values()] == [(b, buckets[b][0]) for b in BUCKETS]


def test_a_plan_set_knows_its_backends_and_finds_the_bucket() -> None:
    plans = plan_set(GRAPH, {"": "a", "output": "b", "blk.1": "c"})
    assert plans.backends == ["a", "c", "b"]
    assert plans.plan(3) is plans.plans["2-4"]
    assert plans.plan(1000) is plans.plans["513+"]
    assert [s.backend for s in plans.plan(1).segments] == ["a", "c", "b"]


TEXT = """\
 tokens  segment                backend    threads  why
      1  embed..blk.1.ffn.down  a                1  everything is there
      1  output                 b                1  the head is faster there
     2+  model                  a                2  everything is there
passes have at most 256 tokens: as asked for
memory, full context       kind                MiB
  weights                  anonymous           1.5
  in all                                       1.5
not promised: --ram"""


def text_plans() -> PlanSet:
    everywhere = Placement("", "a", "everything is there")
    head = Placement("output", "b", "the head is faster there")
    buckets = {b: (1, (everywhere, head)) if b == "1" else (2, (everywhere,)) for b in BUCKETS}
    return PlanSet(make_plans(GRAPH, buckets), 256, "as asked for", {"weights": 3 << 19}, ("--ram",))


def test_a_plan_for_people() -> None:
    assert text_plans().to_text() == TEXT


def test_one_plan_for_all_buckets_is_one_row() -> None:
    lines = plan_set(GRAPH, {"": "a"}, ubatch=64).to_text().splitlines()
    assert lines[1:] == [
        "    all  model                  a                1  the test says so",
        "passes have at most 64 tokens: a test",
    ]


def test_what_a_plan_promises() -> None:
    plans = plan_set(GRAPH, {"": "a"}, ubatch=64)
    some = Residence(400 << 20, 300 << 20, 100 << 20, 100 << 20, 300 << 20)
    rates = TokenRates(prompts=812.4, answers=53.26, full=9.876, basis="measured")
    assert promised(replace(plans, context=4096, context_why="a test", weights=some, rates=rates)) == (
        "context: 4,096 tokens, a test "
        "weights: 300 MiB of 400 MiB in memory, 100 MiB read for each token; "
        "in a full context 100 MiB in memory, 300 MiB read "
        "speed: prompts 812 tokens/s, answers 53.3, in a full context 9.88 "
        "(from times measured on this machine) "
    )
    every = Residence(9 << 20, 9 << 20, 9 << 20)
    assert promised(replace(plans, weights=every, rates=TokenRates())) == (
        "weights: all 9 MiB in memory speed: unknown until it has been measured: the first run does that "
    )


def test_a_plan_that_was_measured_does_not_rest_on_an_order() -> None:
    plans = plan_set(GRAPH, {"": "a"}, ubatch=64)
    first = f"{BY_ORDER} a > b"
    placed = (Placement("", "a", first),)
    plans = replace(plans, plans=make_plans(GRAPH, {b: (1, placed) for b in BUCKETS}))
    assert first in plans.to_text()
    times = {s.name: (0.01, None) for s in plans.plan(1).segments}
    told = replace(plans, expected={b: ExpectedTimes(1, 10, times) for b in BUCKETS}).to_text()
    assert first not in told
    assert MEASURED in told


def promised(plans: PlanSet) -> str:
    """What stands above the table of segments."""
    text = plans.to_text().partition(" tokens  segment")[0]
    return re.sub(r"\s+", " ", text)


def segment(name: str, backend: str, ops: int, why: str) -> dict[str, Any]:
    """As JSON, of which nothing was measured."""
    return {
        "name": name, "backend": backend, "ops": ops, "why": why, "predicted_s": None, "measured_s": None
    }  # fmt: skip


def test_a_plan_as_json() -> None:
    data = text_plans().to_json()
    assert data == json.loads(json.dumps(data)) == text_plans().to_json()
    assert list(data) == [
        "format",
        "ubatch",
        "ubatch_why",
        "context",
        "context_why",
        "weights",
        "rates",
        "memory",
        "device_memory",
        "promises_off",
        "reason",
        "precision",
        "notes",
        "plans",
    ]
    assert [p["bucket"] for p in data["plans"]] == list(BUCKETS)
    assert data["plans"][0] == {
        "bucket": "1",
        "threads": 1,
        "placements": [
            {"scope": "", "backend": "a", "why": "everything is there"},
            {"scope": "output", "backend": "b", "why": "the head is faster there"},
        ],
        "stages": [
            [segment("embed..blk.1.ffn.down", "a", 33, "everything is there")],
            [segment("output", "b", 2, "the head is faster there")],
        ],
    }


def save(plans: PlanSet, path: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
    data = plans.to_json()
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plans = text_plans()
    saved = load_plan(save(plans, tmp_path / "plan.json"), GRAPH)
    assert saved.ubatch == 256
    assert make_plans(GRAPH, saved.buckets) == plans.plans


def set_first(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["plans"][0].__setitem__(key, value)


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.__setitem__("format", 2), "plan format 2 is not known; this version reads 1"),
    (lambda d: d.pop("format"), "is not a plan as `hetrun plan --json` writes it: it lacks 'format'"),
    (lambda d: d.pop("ubatch"), "it lacks 'ubatch'"),
    (lambda d: d["plans"].pop(2), "has no plan for steps of 5-8 tokens"),
    (set_first("bucket", "3"), "has no plan for steps of 1 token"),
    (
        lambda d: d["plans"].append(d["plans"][0] | {"bucket": "3"}),
        "steps of 3 tokens are not a bucket; the buckets are 1,",
    ),
    (set_first("threads", 0), "threads must be a number from 1 to 4096, not 0"),
    (set_first("threads", 10**6), "threads must be a number from 1 to 4096, not 1000000"),
    (lambda data: data.update(ubatch=10**9), "ubatch must be a number from 1 to 1048576, not 1000000000"),
    (set_first("threads", "2"), "threads must be a number from 1 to 4096, not '2'"),
    (lambda d: d.__setitem__("ubatch", True), "ubatch must be a number from 1 to 1048576, not True"),
    (set_first("placements", [{"scope": "", "backend": "a", "why": 3}]), "made of texts, not of 3"),
    (set_first("placements", [{"scope": "", "backend": "a"}]), "missing 1 required positional argument"),
    (set_first("placements", [["", "a", "why"]]), "is not a plan as"),
    (set_first("placements", None), "is not a plan as"),
    (
        set_first("placements", [{"scope": "blk.9.attn", "backend": "a", "why": ""}]),
        "places blk.9.attn, which the model does not have",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_file_that_is_not_a_plan_for_this_model(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        load_plan(save(text_plans(), tmp_path / "plan.json", change), GRAPH)
    assert str(caught.value).startswith(str(tmp_path / "plan.json"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"format": 1, "plans": 3, "ubatch": 1}']
)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="is not a plan as `hetrun plan --json` writes it"):
        load_plan(path, GRAPH)
    with pytest.raises(OptionError, match="No such file"):
        load_plan(tmp_path / "nowhere.json", GRAPH)


def test_plans_compare_by_what_they_say() -> None:
    a, b = plan_set(GRAPH, {"": "a"}), plan_set(GRAPH, {"": "a"})
    assert a.plans == b.plans
    assert a.plans["1"] != Plan("1", 2, a.plans["1"].placements, a.plans["1"].stages)
