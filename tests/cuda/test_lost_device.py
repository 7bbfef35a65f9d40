"""A GPU that is lost in the middle of a step: each of its calls fails from then on, for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import Available, Backend, Descriptor, registry
from hetrun.backends.cuda import backend as device
from hetrun.backends.reference import descriptor
from hetrun.errors import DeviceLost, EngineStopped
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from hetrun.planner.plan import BUCKETS, Placement, make_plans
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.survival import goes_on
from tests.cuda.test_backend import close, tokens
from tests.models.tiny import TinyLlama
from tests.support.rig import Rig, model_file, rig
from tests.support.tiers import first

pytestmark = [needs_compiler, pytest.mark.slow]  # every kernel is built
MODEL = TinyLlama("cuda", layers=3, embd=128, ffn=128, heads=4, kv_heads=2, head_dim=32)
PARTS = ("attn", "ffn", "attn.q", "ffn.up", "")
NAMES = ("cuda", "cuda-streamed", "reference")
PASSES = (7, 1, 1, 20, 1, 1)
CALLS = 250  # about as many as two or three passes make


@pytest.fixture(autouse=True)
def all_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are to cross do, however small they are."""
    monkeypatch.setattr(device, "SMALL", 1 << 10)


def placed(rng: np.random.Generator) -> dict[str, str]:
    """Parts of layers at random, some of them on the GPU in any case."""
    found = {"": "reference", "blk.1.ffn": "cuda"}
    for layer in range(MODEL.layers):
        part = str(rng.choice(PARTS))
        found[f"blk.{layer}.{part}".rstrip(".")] = str(rng.choice(NAMES))
    return found


def beside(driver: EmulatedDriver, where: dict[str, str]) -> Rig:
    """The model on the GPU, over its link, and on the host, which has all weights."""
    stays = emulated(driver, 24 << 20, "cuda")
    streaming = stays.streaming(256 << 10)
    assert streaming
    backends: dict[str, Backend] = {
        "cuda": stays,
        "cuda-streamed": streaming[0],
        "reference": descriptor.create(),
    }
    made = rig(MODEL, backends, where, context=128, ubatch=64)
    host = made.backends["reference"]
    made.executor._store.load({"reference": host.wants(made.graph.ops)})
    return made


@pytest.mark.parametrize("seed", first(range(200), 6))
def test_wherever_it_is_lost_the_text_goes_on_without_it(seed: int) -> None:
    """With the same step where all of its rows are at home, else from its beginning."""
    rng, driver = np.random.default_rng(seed), EmulatedDriver(seed=seed)
    mine, right = beside(driver, placed(rng)), rig(MODEL, {"reference": descriptor.create()}, context=128)
    driver.breaks_at = driver.calls + int(rng.integers(1, CALLS))
    goes_on(mine, right, driver, PASSES, close)


def test_who_computes_on_it_hears_of_it_every_time_and_who_gives_back_does_not() -> None:
    driver = EmulatedDriver()
    memory, event, stream = driver.allocate(64), driver.event(), driver.stream()
    driver.breaks_at = driver.calls + 1
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"an illegal memory access .*; only a new process can use it"):
            driver.record(event, stream)
    driver.drop(event)
    driver.free(memory)
    driver.close()


def registered(driver: EmulatedDriver) -> Callable[[], None]:
    """The GPU among the backends, the last of them; what takes it out again."""
    make = partial(emulated, driver, name="cuda")
    return registry.register(
        Descriptor("cuda", lambda: Available("a test"), make, preference=-1, own_memory=True)
    )


@pytest.fixture
def piloted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PlannedModel, EmulatedDriver]]:
    """A model whose plans may change while it runs, with its second layer on the GPU."""
    monkeypatch.setattr("hetrun.executor.tuning_setup.LEAST_MEASURED", 0)
    monkeypatch.setattr("hetrun.executor.autotune.measurement.model_measurement.PROBE_S", 0.0)
    driver = EmulatedDriver()
    undo = registered(driver)
    model = PlannedModel(
        open_model(model_file(MODEL)),
        Options(Wishes(threads=1), ("reference", "cuda"), ctx=128, vram=24 << 20, eager=False),
    )
    try:
        yield model, driver
    finally:
        model.close()
        undo()
    assert driver.closed


def place(model: PlannedModel, scope: str) -> None:
    """Have a part of it computed by the GPU from the next step on."""
    autotuner = model.autotuner
    assert autotuner
    units = [i for i, unit in enumerate(autotuner.planner.units) if unit.scope.startswith(scope)]
    autotuner._weights.bring(frozenset((i, "cuda") for i in units))
    there = (Placement("", "reference", "a test"), Placement(scope, "cuda", "a test"))
    plans = make_plans(model.graph, dict.fromkeys(BUCKETS, (1, there)), ["cuda"])
    autotuner._active_plan.adopt(replace(model.plans, plans=plans))


def steps(model: PlannedModel, seq: int, text: list[int]) -> np.ndarray:
    ids = np.array(text)
    return model.step(Step((Chunk(seq, ids, np.arange(len(ids))),))).copy()


@pytest.mark.parametrize("after", first([5, 1, 9]))  # calls: in each of three passes
def test_the_step_in_which_it_is_lost_is_answered_by_the_host(
    piloted: tuple[PlannedModel, EmulatedDriver], after: int
) -> None:
    model, driver = piloted
    place(model, "blk.1.ffn")
    right = rig(MODEL, {"reference": descriptor.create()}, context=128)
    a, b = model.alloc(), right.kv.alloc()
    for i in range(6):
        if i == 3:
            assert "cuda" in model.plans.backends
            driver.breaks_at = driver.calls + after
        close(steps(model, a, tokens(2, i)), right.logits(b, tokens(2, i)))
    assert driver.loss
    assert model.plans.backends == ["reference"]
    right.close()


def test_where_nothing_else_has_the_weights_the_engine_ends() -> None:
    """A worker process that ends so is started again, and has the GPU again."""
    driver = EmulatedDriver()
    undo = registered(driver)
    try:
        with LLM(str(model_file(MODEL)), backends=["cuda"], ctx=64, spec="off") as llm:
            few = SamplingParams(max_tokens=2, ignore_eos=True)
            llm.generate([tokens(5)], few)
            driver.breaks_at = driver.calls + 5
            for _ in range(2):
                with pytest.raises(EngineStopped):
                    llm.generate([tokens(5)], few)
    finally:
        undo()
    assert driver.closed
