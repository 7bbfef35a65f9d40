"""How long sequences may become: what was asked for, what the model was trained for, or what memory holds."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from hetrun.errors import BudgetError
from hetrun.executor.loading import context_length as lengths, load_budget
from hetrun.executor.loading.context_length import USUAL_CONTEXT, choose_context
from hetrun.executor.loading.load_plan import prepare
from hetrun.executor.loading.memory_estimates import HELPER, MAX_SEQUENCES, kv_of_all
from hetrun.graph import KvShape
from hetrun.graph.quant import by_name
from hetrun.loader.architectures import build_graph
from hetrun.loader.open_model import open_model
from hetrun.memory.kv.cache import sequence_bytes
from hetrun.memory.ledger import RESERVE
from hetrun.planner.options import Options, Wishes
from tests.models import cases, cases_hf, hf
from tests.support.rig import model_file
from tests.tools import make_model

SOURCE = open_model(model_file(cases.GQA))  # trained for 256 tokens
SHAPES = {0: KvShape(1, 16), 1: KvShape(1, 16, 10)}  # 64 bytes of a token in each; the window is 96 rows
BYTES = partial(sequence_bytes, SHAPES, by_name("F16"), 20)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes nothing here."""
    monkeypatch.setattr(load_budget, "besides", lambda entries, to_come: RESERVE)


def choose(weights: int = 1000, **options: int) -> int:
    return choose_context(SOURCE, Options(Wishes(), **options), weights, BYTES).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [32, 64, 95, 96, 97, 200, 255, 256])
def test_the_longest_context_that_a_budget_holds(tokens: int) -> None:
    need = 64 * tokens + 64 * min(tokens, 96)
    assert BYTES(tokens) == need
    assert choose(ram=1000 + need) == tokens
    assert choose(ram=1000 + need + 63) == tokens
    if tokens > 32:
        assert choose(ram=1000 + need - 1) == tokens - 1


def test_no_more_than_the_model_was_trained_for_unless_it_is_asked_for() -> None:
    assert choose(ram=1 << 40) == 256
    assert choose(ctx=1000) == 1000
    assert choose(ctx=1000, ram=1 << 40) == 1000


def test_what_is_free_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    need = 64 * 150 + 64 * 96
    monkeypatch.setattr(lengths, "available_memory", lambda: 1000 + 2 * need)
    assert choose() == 150


def test_a_context_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match="--ram 1000 bytes is too little: this model needs at least"):
        choose(ctx=1000, ram=1000)
    monkeypatch.setattr(lengths, "available_memory", lambda: 64 * 150 + 64 * 96)
    with pytest.raises(BudgetError, match="up to 150 tokens would fit"):
        choose(ctx=1000)


def test_a_graph_that_depends_on_the_context_is_built_for_the_one_that_was_chosen() -> None:
    row = next(row for row in cases_hf.ROWS if str(row) == "phi3-longrope")  # factors change at 32 tokens
    source = open_model(hf.folder(row))
    short, long = build_graph(source, 32), build_graph(source)
    assert short != long
    bill = prepare(source, Options(Wishes(), ("reference",), ctx=32)).plans.memory
    ram = bill["weights"] + bill["KV of one full sequence"] + RESERVE
    prepared = prepare(source, Options(Wishes(), ("reference",), ram=ram))
    assert prepared.context == 32
    assert prepared.graph == short
    assert prepared.kv_bytes == bill["KV of one full sequence"]
    assert {op for plan in prepared.plans.plans.values() for s in plan.segments for op in s.ops} == set(
        short.ops
    )
    assert prepared.wanted["reference"]
    assert prepare(source, Options(Wishes(), ("reference",), ram=1 << 40)).graph == long


def test_a_mixture_is_refused_with_what_slots_need(tmp_path: Path) -> None:
    """Its experts in slots need less than all of its weights: that is the budget to name, and it works."""
    shape = replace(make_model.SHAPES["moe"], layers=1, vocab=4096)
    path = tmp_path / "mixture.gguf"
    size = make_model.write_model(path, shape, "Q4_0", 0, make_model.Making(large=1 << 20))
    source = open_model(path)
    options = Options(Wishes(), ("llamacpp",), planner="static", ram=1 << 20)
    with pytest.raises(BudgetError) as caught:
        prepare(source, options)
    named = re.search(r"needs at least (\d+) MiB", str(caught.value))
    assert named is not None
    least = int(named[1]) << 20
    assert least < size
    found = prepare(source, replace(options, ram=least))
    for backend in found.backends.values():
        backend.close()
    assert found.experts is not None
    with pytest.raises(BudgetError, match=re.escape(f"needs at least {least >> 20} MiB")):
        prepare(source, replace(options, ram=least - (1 << 20)))


def test_memory_of_all_sequences() -> None:
    assert kv_of_all(one=100, room=1000) == 250  # a quarter
    assert kv_of_all(one=300, room=1000) == 300  # one fits in any case
    assert kv_of_all(one=300, room=-5) == 300
    assert kv_of_all(one=10, room=100_000) == 10 * MAX_SEQUENCES  # more than all of them need is no use
    prepared = prepare(SOURCE, Options(Wishes(), ("reference",), ctx=64, ram=1 << 40))
    bill = prepared.plans.memory
    weights, one = bill["weights"], bill["KV of one full sequence"]
    assert prepared.kv_bytes == bill["KV of all, at most"] == MAX_SEQUENCES * one
    assert prepared.room == (1 << 40) - RESERVE - HELPER - prepared.kv_bytes
    held = weights + bill["graphs and scratch"] + RESERVE + HELPER
    prepared = prepare(SOURCE, Options(Wishes(), ("reference",), ctx=64, ram=held + 8 * one))
    assert prepared.kv_bytes == 2 * one
    assert prepared.room == weights + bill["graphs and scratch"] + 6 * one


def rule(trained: int, room: int, whole: bool = True, ctx: int | None = None) -> tuple[int, str]:
    """The context of a model with a byte for each token, in so much memory for keys and values."""
    source = Mock(require_int=lambda *_: trained)
    options = Options(Wishes(), ram=1000 + room, ctx=ctx)
    return choose_context(source, options, 1000, lambda tokens: tokens, whole)


def test_the_rule_by_which_a_context_is_chosen() -> None:
    assert rule(8192, 1 << 20) == (8192, "what the model was trained for")
    assert rule(131072, 50_000) == (48 * 1024, "what memory has room for; the model was trained for 131,072")
    # Weights come from disk: first the usual length, then weights.
    tokens, why = rule(131072, 50_000, whole=False)
    assert tokens == USUAL_CONTEXT
    assert "a longer context (--ctx) would leave less memory for weights" in why
    assert rule(131072, 700, whole=False) == (
        700,
        "what memory has room for; the model was trained for 131,072",
    )
    assert rule(2048, 50_000, whole=False) == (2048, "what the model was trained for")
    assert rule(2048, 50_000, ctx=4000) == (4000, "as asked for; the model was trained for 2,048")
    assert rule(2048, 50_000, ctx=1000) == (1000, "as asked for")


def test_more_memory_never_means_a_shorter_context() -> None:
    found = [rule(131072, room)[0] for room in range(100, 200_000, 777)]
    assert found == sorted(found)
