"""A GPU's memory that is full of weights while a text becomes long: weights go, not the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from hetrun.backend import OwnMemory
from hetrun.backends.reference import descriptor
from hetrun.errors import BudgetError
from hetrun.executor.loading.device_memory import less_room, whose_memory
from hetrun.executor.planned_model import PlannedModel
from hetrun.graph import Op
from hetrun.graph.signature import units
from hetrun.loader.open_model import open_model
from hetrun.planner.costmodel import OpWork
from hetrun.planner.options import Options, Wishes
from hetrun.planner.weight_sizes import Sizes, rows_of
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.test_backend import both, close, cuda, tokens
from tests.cuda.test_lost_device import MODEL, place, registered, steps
from tests.support.pass_listener import PassListener
from tests.support.rig import graph_of, model_file, rig

CONTEXT = 300
SLAB = 32 * MODEL.layers * 2 * 2 * 32 * 2  # rows, layers, keys and values, heads, numbers, bytes
FAST, SLOW = 1e-6, 1e-2  # seconds of any unit on the GPU and on the host, as the planner believes


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannedModel]:
    """All layers on the GPU and on the host, and room for the rows of a hundred tokens."""
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 0.0)
    driver = EmulatedDriver()
    undo = registered(driver)
    made = PlannedModel(
        open_model(model_file(MODEL)),
        Options(Wishes(threads=1), ("reference", "cuda"), ctx=CONTEXT, vram=24 << 20, eager=False),
    )
    assert made.autotuner
    made._executor.observe(PassListener())  # what passes took says how slow the emulator is
    for form in {unit.form for unit in made.autotuner.planner.units}:
        for n in (1, 4, 16, 64, 256):
            made.autotuner.forecast.learn(OpWork(form, "cuda", 1), n, 32.0, FAST)
            made.autotuner.forecast.learn(OpWork(form, "reference", 1), n, 32.0, SLOW)
    yield made
    made.close()
    undo()
    assert driver.closed


@needs_compiler
@pytest.mark.slow
def test_a_long_text_keeps_the_gpu(model: PlannedModel) -> None:
    place(model, "blk")
    right = rig(MODEL, {"reference": descriptor.create()}, context=CONTEXT)
    a, b = model.alloc(), right.kv.alloc()
    close(steps(model, a, tokens(25)), right.logits(b, tokens(25)))
    backend = model.backends["cuda"]
    memory = backend.gpu.memory  # type: ignore[attr-defined]
    gaps = [memory.take(SLAB, "rows to come") for _ in range(3)]
    while memory.arena.left:
        try:
            memory.arena.take(max(256, memory.arena.left // 4), "others")
        except BudgetError:
            try:
                memory.arena.take(256, "others")
            except BudgetError:
                break
    for gap in gaps:
        memory.give(gap)
    for i in range(1, 10):
        close(steps(model, a, tokens(25, i)), right.logits(b, tokens(25, i)))
    assert model.length(a) == 250
    assert "cuda" in model.plans.backends
    assert model.autotuner
    assert any("left cuda for keys and values" in change.reason for change in model.autotuner.changes)
    right.close()


@needs_compiler
@pytest.mark.slow
def test_rows_of_layers_that_have_left_make_room() -> None:
    """Another plan has copies of its own of the same rows: those of the plan before go, however long they
    were in use last."""
    driver = EmulatedDriver()
    mine, right = both(driver=driver, context=512)
    memory = cuda(mine).gpu.memory
    a, b = mine.kv.alloc(), right.kv.alloc()
    close(mine.logits(a, tokens(40)), right.logits(b, tokens(40)))
    mine.kv.settle()
    assert memory.give_up()
    assert memory.give_up()
    assert not memory.give_up(), "nothing is left of two slabs"
    close(mine.logits(a, tokens(1)), right.logits(b, tokens(1)))
    mine.close()
    right.close()


def test_a_copy_of_attention_claims_room_for_its_keys_and_values() -> None:
    """As much as those of all layers exceed what is kept for them; where they do not, nothing."""
    some = units(graph_of(MODEL))
    attention = [i for i, unit in enumerate(some) if any(op.kind == "attention" for op in unit.ops)]
    copies = [(i, name) for i in range(len(some)) for name in ("cuda", "host")]

    def row_bytes(ops: Sequence[Op]) -> int:
        return 1000 * sum(op.kind == "attention" for op in ops)

    little = {"cuda": OwnMemory(10_000, 5_000, 600)}
    claims = rows_of(some, copies, little, row_bytes)
    assert claims == {(i, "cuda"): 800 for i in attention}, "3,000 in all, 600 of them are kept"
    assert not any(rows_of(some, copies, {"cuda": OwnMemory(10_000, 5_000, 3_000)}, row_bytes).values())
    sizes = Sizes({}, dict.fromkeys(copies, 50), claims)
    assert sizes.claimed(copies, "cuda") == 50 * len(some) + 800 * len(attention)
    assert sizes.own_total(copies, "cuda") == 50 * len(some), "which is what a bill has"


def test_a_second_way_to_work_has_no_memory_of_its_own() -> None:
    own = dict.fromkeys(("cuda", "cuda-1"), OwnMemory(10, 3))
    names = {name: whose_memory(name, own) for name in ("cuda", "cuda-streamed", "cuda-1-streamed", "other")}
    assert names == {"cuda": "cuda", "cuda-streamed": "cuda", "cuda-1-streamed": "cuda-1", "other": ""}
    assert less_room(own["cuda"], 4).room == 3
    assert less_room(own["cuda"], 40).room == 0
