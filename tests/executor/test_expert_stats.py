"""Which experts tokens choose, as it is counted where passes run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Pass
from hetrun.graph.ops import Moe
from hetrun.planner.expert_stats import DOUBT, ENOUGH, EVERY, MEMORY, Choices, known_choices, path_of
from tests.models import cases, cases_hf, tiny
from tests.models.test_placement import devices
from tests.support.pass_listener import PassListener
from tests.support.rig import graph_of, rig

MIXTURE = cases_hf.MIXTRAL[0]
GRAPH = graph_of(MIXTURE)
ROUTERS = [op.weights[0].name for op in GRAPH.ops if isinstance(op.attrs, Moe)]
N, USED = next((op.attrs.n_experts, op.attrs.n_used) for op in GRAPH.ops if isinstance(op.attrs, Moe))


def test_nothing_is_known_before_enough_tokens_were_counted() -> None:
    choices = Choices(GRAPH)
    assert choices.likely(ROUTERS[0]) is None
    choices.add(ROUTERS[0], np.tile([0, 1], (int(ENOUGH) - 1, 1)))
    assert choices.likely(ROUTERS[0]) is None
    choices.add(ROUTERS[0], np.tile([0, 1], (30, 1)))
    found = choices.likely(ROUTERS[0])
    assert found is not None
    assert found.sum() == pytest.approx(USED, rel=1e-3)
    assert found[0] == found[1] > 0.9
    assert 0 < found[2] < DOUBT / ENOUGH
    assert choices.likely(ROUTERS[1]) is None
    assert choices.likely("another") is None


def test_what_was_chosen_long_ago_is_forgotten() -> None:
    choices = Choices(GRAPH)
    for expert in (0, 2):
        for _ in range(int(5 * MEMORY)):
            choices.add(ROUTERS[0], np.array([[expert, expert + 1]]))
    found = choices.likely(ROUTERS[0])
    assert found is not None
    assert found[2] == found[3] > 0.95
    assert found[0] == found[1] < 0.05


@pytest.mark.parametrize("name", ["reference", "llamacpp"])
def test_one_pass_in_some_is_counted_and_only_small_ones(name: str) -> None:
    """As the reference's router says; also by the host's share of a mixture, which has the whole router."""
    tokens = tiny.random_tokens(40, seed=3)
    made, expected = rig(MIXTURE, devices([name])), Choices(GRAPH)
    asked: list[tuple[str, np.ndarray]] = []

    def ask(work: Pass) -> None:
        if len(work.tokens) <= 16:
            work.chosen = lambda router, chosen: asked.append((router, chosen.copy()))

    made.executor.observe(PassListener(prepare=ask))
    seq = made.kv.alloc()
    made.logits(seq, tokens[:30])
    assert not asked
    for at in range(30, 40, 2):
        made.logits(seq, tokens[at : at + 2])
    assert [router for router, _ in asked] == ROUTERS * 5
    assert all(chosen.shape == (2, USED) for _, chosen in asked)
    assert all(len({*row}) == USED and max(row) < N for _, chosen in asked for row in chosen.tolist())
    if name != "reference":
        assert_same_choices(asked, tokens)
    for router, chosen in asked:
        expected.add(router, chosen)
    made.close()


def assert_same_choices(found: list[tuple[str, np.ndarray]], tokens: list[int]) -> None:
    """As the reference chooses; rounding may send one row or other elsewhere."""
    made = rig(MIXTURE, devices(["reference"]))
    asked: list[np.ndarray] = []

    def ask(work: Pass) -> None:
        work.chosen = lambda router, chosen: asked.append(chosen)

    seq = made.kv.alloc()
    made.logits(seq, tokens[:30])
    made.executor.observe(PassListener(prepare=ask))
    for at in range(30, 40, 2):
        made.logits(seq, tokens[at : at + 2])
    mine, theirs = (np.sort(np.concatenate(rows)) for rows in ([c for _, c in found], asked))
    assert (mine == theirs).mean() > 0.9


def test_a_pass_is_asked_now_and_then() -> None:
    made, choices = rig(MIXTURE, devices(["reference"])), Choices(GRAPH)
    asked: list[bool] = []

    def ask(work: Pass) -> None:
        choices.ask(work)
        asked.append(work.chosen is not None)

    made.executor.observe(PassListener(prepare=ask))
    seq = made.kv.alloc()
    made.logits(seq, tiny.random_tokens(20, seed=1))
    for _ in range(2 * EVERY):
        made.logits(seq, [5])
    assert asked == [False, *([False] * (EVERY - 1) + [True]) * 2]
    made.close()


def counted() -> Choices:
    choices = Choices(GRAPH)
    for i, router in enumerate(ROUTERS):
        choices.add(router, np.tile([i, i + 1], (300, 1)))
    return choices


def test_what_was_counted_is_there_at_the_next_start() -> None:
    choices, path = counted(), path_of(GRAPH)
    assert path is not None
    choices.save(path)
    found = known_choices(GRAPH)
    for router in ROUTERS:
        before, after = choices.likely(router), found.likely(router)
        assert before is not None
        assert after is not None
        assert np.abs(before - after).max() < 1e-3
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_nothing_is_kept_before_anything_is_known_nor_without_a_mixture(tmp_path: Path) -> None:
    Choices(GRAPH).save(tmp_path / "choices.json")
    assert not list(tmp_path.iterdir())
    assert path_of(graph_of(cases.GQA)) is None
    assert known_choices(graph_of(cases.GQA)).likely("any") is None


WRONG = [
    "", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "counts": {}}',
    json.dumps({"format": 1, "counts": {r: [1.0] * (N + 1) for r in ROUTERS}}),
    json.dumps({"format": 1, "counts": {r: [-1.0] * N for r in ROUTERS}}),
    json.dumps({"format": 1, "counts": {r: ["1"] * (N - 1) + [{}] for r in ROUTERS}}),
    json.dumps({"format": 1, "counts": {r: [float("nan")] * N for r in ROUTERS}}),
    json.dumps({"format": 1, "counts": {r: [1e300] * N for r in ROUTERS}}),
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_cannot_be_is_ignored_and_said(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    choices = counted()
    before = choices.likely(ROUTERS[0])
    choices.load(path)
    after = choices.likely(ROUTERS[0])
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()
    assert "is ignored, and the choices of experts are counted from zero" in caplog.text
