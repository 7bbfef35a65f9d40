"""Plans that stop before the output matrix, and the passes that run by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.steps import Step
from hetrun.graph import Op, Value
from hetrun.planner.partial_plans import PartialPlans
from hetrun.planner.plan import BUCKETS, cut, up_to
from tests.models import tiny
from tests.models.cases import GQA
from tests.planner.test_plan import random_placements
from tests.support.nulldevice import NullDevice
from tests.support.pass_listener import PassListener
from tests.support.rig import Rig, graph_of, placements, plan_set, rig, step

GRAPH = graph_of(GQA)
TOKENS = tiny.random_tokens(48)


def hidden(r: Rig, *chunks: tuple[int, list[int], range]) -> np.ndarray:
    return r.executor.run(Step(step(*chunks).chunks, hidden=True)).copy()


@given(placed=random_placements(), alone=st.sets(st.sampled_from("abc")))
@settings(max_examples=100)
def test_all_that_hidden_states_need_and_no_more(placed: dict[str, str], alone: set[str]) -> None:
    whole = cut(GRAPH, placements(placed), sorted(alone))
    stages = up_to(whole, GRAPH.hidden)
    ran: list[Op] = []
    there: set[Value] = set()
    for stage in stages:
        assert stage
        assert all(set(s.reads) <= there for s in stage)
        there |= {v for s in stage for v in s.writes}
        ran += [op for s in stage for op in s.ops]
    assert GRAPH.hidden in there
    assert {op.kind for op in GRAPH.ops} - {op.kind for op in ran} == {"head"}
    assert len(ran) == len(GRAPH.ops) - 1
    assert {v for stage in stages for s in stage for v in (*s.reads, GRAPH.hidden)} == there
    kept = {id(s) for stage in whole for s in stage}
    changed = [s.name for stage in stages for s in stage if id(s) not in kept]
    assert len(changed) <= 1, "only what held the head is another segment"
    assert all(name.endswith(" (hidden)") for name in changed)


def test_a_plan_is_cut_once_and_forgotten_with_the_plan() -> None:
    plans = plan_set(GRAPH, {"": "a"})
    one, many = plans.plan(1), plans.plan(100)
    made = PartialPlans(lambda stages: up_to(stages, GRAPH.hidden))
    assert made.of(one) is made.of(one)
    assert made.of(one).stages is made.of(many).stages
    assert (made.of(many).bucket, made.of(many).threads) == (many.bucket, many.threads)
    stages = made.of(one).stages
    fewer = replace(many, threads=3)
    assert made.keep([fewer]) == {id(stages)}
    assert made.of(fewer).stages is stages
    assert made.of(fewer).threads == 3
    assert made.keep(plan_set(GRAPH, {"": "b"}).plans.values()) == set()


def test_passes_of_both_kinds_in_turn() -> None:
    device = NullDevice()
    r = rig(GQA, {"null": device}, ubatch=16)
    heard: list[PassTiming] = []
    r.executor.observe(PassListener(heard.append))
    a, b = r.kv.alloc(), r.kv.alloc()
    for _ in range(3):
        # All rows of a pass may be wanted, though a step with this many logits would be cut into more passes.
        rows = hidden(r, (a, TOKENS[:9], range(9)), (b, TOKENS[:20], range(13, 20)))
        assert rows.shape == (16, GRAPH.hidden.width)
        assert rows[:, 0].tolist() == [*TOKENS[:9], *TOKENS[13:20]]
        assert not heard, "what it takes is no measure of plans"
        assert r.step((a, [5], [0]))[0].argmax() == 6
        heard.clear()
    kinds = [[op.kind for op in runner.segment.ops].count("head") for runner in device.runners]
    assert kinds == [0, 0, 1]
    assert [runner.shape.tokens for runner in device.runners] == [16, 13, 1]
    r.executor.adopt(plan_set(r.graph, {"": "null"}))
    assert device.open == []
    assert hidden(r, (a, [7], range(0))).shape == (0, GRAPH.hidden.width)
    assert len(r.executor.plans.plans) == len(BUCKETS)
    r.close()
