"""Models that fit neither into RAM nor into the memory of a device, but into both; and larger ones, of which
the rest comes from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Available, Descriptor, registry
from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.errors import BudgetError
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import SOON
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from hetrun.prefetch import ring_buffer
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import CONTEXT, EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.streamed import MIB, made_small

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(
        ring_buffer.library() is None or products() is None, reason="built without a C compiler"
    ),
]
SHAPE = TinyLlama("both", layers=8, embd=512, ffn=1536, heads=8, kv_heads=4, head_dim=64, quant="Q4_0")
IDS = np.arange(40, 46)
NAMES = ("cuda", "llamacpp")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(SHAPE, tmp_path_factory.mktemp("models") / "both.gguf")


@contextmanager
def gpus(*drivers: EmulatedDriver) -> Iterator[None]:
    """As many as there are drivers, with nothing small about the models that run there."""
    undo = []
    for i, driver in enumerate(drivers):
        name = f"cuda-{i}" if i else "cuda"
        make = partial(emulated, driver, name=name)
        gpu = Descriptor(name, lambda: Available("a test"), make, preference=1000 - i, own_memory=True)
        undo.append(registry.register(gpu))
    try:
        with made_small():
            yield
    finally:
        for each in undo:
            each()


def options(ram: int | None = None, vram: int | None = None, names: tuple[str, ...] = NAMES) -> Options:
    return Options(Wishes(threads=1), names, ctx=64, ram=ram, vram=vram, planner="static")


@contextmanager
def decided(path: Path, wanted: Options) -> Iterator[LoadPlan]:
    found = prepare(open_model(path), wanted, SOON)  # as what runs
    try:
        yield found
    finally:
        for backend in found.backends.values():
            backend.close()


def needed(path: Path) -> tuple[int, int]:
    """RAM for the whole model, and what of it are weights."""
    with decided(path, options(names=("llamacpp",))) as found:
        memory = found.plans.memory
        others = ("KV of all, at most", "limit", "left")
        return sum(size for part, size in memory.items() if part not in others), memory["weights"]


def room_for(path: Path, nbytes: int) -> int:
    """--vram of which so much is for weights."""
    with decided(path, options(vram=60 * MIB)) as found:
        own = found.own["cuda"]
    return own.besides + nbytes


def logits(
    path: Path, wanted: Options, between: Callable[[PlannedModel], None] = lambda model: None
) -> tuple[np.ndarray, PlannedModel]:
    """Of a prompt and two tokens after it."""
    model = PlannedModel(open_model(path), wanted)
    seq = model.alloc()
    first = model.step(Step((Chunk(seq, IDS, np.arange(len(IDS))),))).copy()
    between(model)
    more = [model.step(Step((Chunk(seq, np.array([i]), np.array([0])),))).copy() for i in (3, 4)]
    return np.concatenate([first, *more]), model


def close(found: np.ndarray, right: np.ndarray) -> None:
    # Weights of 4 bits times inputs of 8 bits here, of 16 there.
    assert np.square(found - right).sum() <= 1e-3 * np.square(right).sum()


def test_what_ram_cannot_hold_lies_on_the_device_from_the_beginning(path: Path) -> None:
    driver = EmulatedDriver()
    with gpus(driver):
        need, weights = needed(path)
        vram = room_for(path, weights // 2)
        right, model = logits(path, options(names=("llamacpp",)))
        model.close()
        found, model = logits(path, options(need - weights // 3, vram))
        places = model.plans.plan(1).places
        assert [backend for _, backend in places] == ["llamacpp", "cuda"], "one change of sides"
        assert places[-1][0].endswith("output.head")
        assert model.streaming() is None
        memory, own = model.plans.memory, model.plans.devices["cuda"]
        assert memory["left"] >= 0
        assert own["left"] >= 0
        assert weights // 4 < own["weights"] < weights
        assert "RAM has no room for all weights" in model.plans.to_text()
        model.close()
    close(found, right)
    assert driver.most_allocated + CONTEXT <= vram


def test_what_neither_holds_comes_from_disk(path: Path) -> None:
    driver = EmulatedDriver()
    with gpus(driver):
        need, weights = needed(path)
        vram = room_for(path, weights // 4)
        right, model = logits(path, options(names=("llamacpp",)))
        model.close()
        ram = need - weights // 2
        # As if there were no more room for weights than was planned.
        found, model = logits(path, replace(options(ram, vram), streaming="none"))
        assert [backend for _, backend in model.plans.plan(1).places] == ["llamacpp", "cuda"]
        streaming = model.streaming()
        assert streaming
        with_device = streaming.streamed_bytes
        assert model.plans.devices["cuda"]["weights"] > weights // 8
        model.close()
        _, model = logits(path, replace(options(ram, names=("llamacpp",)), streaming="none"))
        streaming = model.streaming()
        assert streaming
        assert 0 < with_device < streaming.streamed_bytes, "each byte there is one less from disk"
        model.close()
    close(found, right)


def test_several_devices_are_filled_one_after_the_other(path: Path) -> None:
    drivers = EmulatedDriver(), EmulatedDriver()
    with gpus(*drivers):
        need, weights = needed(path)
        vram = room_for(path, weights // 4)
        names = ("cuda", "cuda-1", "llamacpp")
        right, model = logits(path, options(names=("llamacpp",)))
        model.close()
        found, model = logits(path, options(need - weights // 3, vram, names))
        assert [backend for _, backend in model.plans.plan(1).places] == ["llamacpp", "cuda-1", "cuda"]
        assert all(bill["left"] >= 0 for bill in model.plans.devices.values())
        model.close()
    close(found, right)


@pytest.mark.parametrize("vram", [20, 60])  # MiB: a part of the model, and all of it
def test_too_little_of_everything_says_the_least(path: Path, vram: int) -> None:
    with gpus(EmulatedDriver()):
        with pytest.raises(BudgetError, match=r"--ram 1 MiB is too little: .* at least \d+ MiB"):
            prepare(open_model(path), options(MIB, vram * MIB))


def test_rows_of_keys_and_values_have_room_on_the_device(path: Path) -> None:
    """What a device holds of a model leaves room for a sequence of full length."""
    driver = EmulatedDriver()
    with gpus(driver):
        need, weights = needed(path)
        vram = room_for(path, weights // 2)
        few = Options(Wishes(threads=1), NAMES, ctx=64, ram=need - weights // 3, vram=vram, planner="static")
        many = Options(Wishes(threads=1), NAMES, ctx=20_000, vram=vram, planner="static")
        with decided(path, few) as found:
            assert found.plans.devices["cuda"]["weights"] > 0
        with decided(path, many) as found:
            assert "weights" not in found.plans.devices["cuda"], "no room for that many rows"


def test_a_device_that_is_lost_leaves_its_layers_to_the_disk(path: Path) -> None:
    """In the middle of a text, which goes on."""
    driver = EmulatedDriver()
    with gpus(driver):
        need, weights = needed(path)
        vram = room_for(path, weights // 4)
        right, model = logits(path, options(names=("llamacpp",)))
        model.close()

        def lose(model: PlannedModel) -> None:
            model.kv.settle()
            driver.breaks_at = driver.calls + 5

        found, model = logits(path, options(need - weights // 2, vram), lose)
        assert driver.loss
        assert model.plans.backends == ["llamacpp"]
        assert model.streaming()
        model.close()
    close(found, right)
    assert driver.closed
