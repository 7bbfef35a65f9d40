"""A device that fails while it has layers for which RAM has no room: they come from disk from then on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import (
    Available,
    Buffers,
    Descriptor,
    Done,
    OwnMemory,
    Pass,
    PassShape,
    Runner,
    Segment,
    WeightUse,
    registry,
)
from hetrun.backend.interpreter import InterpretingBackend
from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.backends.reference.ops import TABLE
from hetrun.errors import BackendError
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import SOON
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.graph.signature import coarse
from hetrun.loader.open_model import open_model
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.options import Options, Wishes
from hetrun.prefetch import ring_buffer
from hetrun.prefetch.pass_times import PassTimes, learn
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.streamed import made_small

pytestmark = pytest.mark.skipif(
    ring_buffer.library() is None or products() is None, reason="built without a C compiler"
)
SHAPE = TinyLlama("fragile", layers=4, embd=512, ffn=1024, heads=8, kv_heads=4, head_dim=64, quant="Q4_0")
NAMES = ("fragile", "llamacpp")


class Fragile(InterpretingBackend):
    """Holds weights in memory of its own, until it breaks."""

    made: list[Fragile] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, name: str = "fragile") -> None:
        super().__init__(name, TABLE)
        self.broken, self.closed, self.passes = False, False, 0
        self.made.append(self)

    def grant(self, nbytes: int | None) -> OwnMemory:
        assert nbytes
        return OwnMemory(nbytes, 0)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Breaking(self, super().compile(segment, shape, buffers, kv))

    def close(self) -> None:
        self.closed = True


@dataclass
class Breaking:
    """A segment there."""

    device: Fragile
    inner: Runner

    def submit(self, work: Pass) -> Done:
        self.device.passes += 1
        if self.device.broken:
            raise BackendError("its driver says no")
        return self.inner.submit(work)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(SHAPE, tmp_path_factory.mktemp("models") / "fragile.gguf")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    undo = registry.register(
        Descriptor("fragile", lambda: Available("a test"), Fragile, preference=-1, own_memory=True)
    )
    with made_small():
        yield
    undo()
    Fragile.made.clear()


def options(path: Path, part: float, names: tuple[str, ...] = NAMES) -> Options:
    """RAM for so much less than all weights, and a device for a quarter of them."""
    wanted = Options(Wishes(1, 64), ("llamacpp",), ctx=64, planner="static", mtp="off")
    found = prepare(open_model(path), wanted, SOON)
    for backend in found.backends.values():
        backend.close()
    memory = found.plans.memory
    need = sum(n for name, n in memory.items() if name not in ("KV of all, at most", "limit", "left"))
    weights = memory["weights"]
    return replace(wanted, backends=names, ram=need - int(part * weights), vram=weights // 4)


def run(model: PlannedModel, seq: int, *ids: int) -> np.ndarray:
    return model.step(Step((Chunk(seq, np.array(ids), np.arange(len(ids))),))).copy()


@contextmanager
def opened(path: Path, wanted: Options) -> Iterator[PlannedModel]:
    model = PlannedModel(open_model(path), wanted)
    try:
        yield model
    finally:
        model.close()


TEXT = ((40, 41, 42), (3,), (4,), (5, 6), (7,))


def right(path: Path) -> list[np.ndarray]:
    with opened(path, Options(Wishes(threads=1), ("llamacpp",), ctx=64, planner="static")) as model:
        seq = model.alloc()
        return [run(model, seq, *ids) for ids in TEXT]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.square(found - expected).sum() <= 1e-3 * np.square(expected).sum()


@pytest.mark.parametrize("part", [0.05, 0.5], ids=["all in memory", "some from disk"])
def test_the_text_goes_on_with_weights_from_disk(path: Path, part: float) -> None:
    expected, wanted = right(path), options(path, part)
    with opened(path, wanted) as model:
        (device,) = Fragile.made[-1:]
        seq = model.alloc()
        for ids, logits in zip(TEXT[:2], expected, strict=False):
            close(run(model, seq, *ids), logits)
        assert set(model.plans.backends) == {"fragile", "llamacpp"}
        before = model.streaming()
        assert (before is None) == (part == 0.05)
        device.broken, passes = True, device.passes
        for ids, logits in zip(TEXT[2:], expected[2:], strict=True):
            close(run(model, seq, *ids), logits)
        assert device.passes == passes + 1
        assert device.closed
        assert model.plans.backends == ["llamacpp"]
        assert "fragile failed: what it had of the weights comes from disk" in model.reason
        after = model.streaming()
        assert after
        assert after.streamed_bytes > (before.streamed_bytes if before else 0)
        memory = model.bill()
        assert memory["left"] >= 0
        assert memory["limit"] == wanted.ram


def test_the_budget_may_change_afterwards(path: Path) -> None:
    wanted = options(path, 0.5)
    with opened(path, wanted) as model:
        seq = model.alloc()
        run(model, seq, 40)
        Fragile.made[-1].broken = True
        run(model, seq, 41)
        before = model.streaming()
        assert wanted.ram
        model.set_ram(2 * wanted.ram)
        model.tend()
        run(model, seq, 42)
        after = model.streaming()
        assert before
        assert after
        assert after.streamed_bytes < before.streamed_bytes


def test_where_nothing_else_can_run_it_the_request_fails(path: Path) -> None:
    wanted = options(path, 0.5)
    assert wanted.vram
    with opened(path, replace(wanted, backends=("fragile",), vram=8 * wanted.vram)) as model:
        Fragile.made[-1].broken = True
        with pytest.raises(BackendError, match="its driver says no"):
            run(model, model.alloc(), 40)


def homes(path: Path, wanted: Options) -> tuple[int, LoadPlan]:
    """How many units lie on the device."""
    found = prepare(open_model(path), wanted, SOON)
    for backend in found.backends.values():
        backend.close()
    assert found.streamed
    there = {coarse(op.scope) for s in found.plans.plan(1).segments if s.backend == "fragile" for op in s.ops}
    return len(there), found


def test_as_much_lies_on_a_device_as_passes_have_shown_to_pay(path: Path) -> None:
    """All there is room for, until it has turned out to be slower than the disk; then what was the best."""
    wanted = replace(options(path, 0.5), planner="measured")
    most, found = homes(path, wanted)
    assert most > 1
    assert found.streamed
    rate = found.streamed.disk.rate
    fast, slow = PassTimes(1e-4, 1e-5, 1.0, 0.0, rate), PassTimes(0.5, 1e-3, 1.0, 0.0, rate)

    def ran(found: LoadPlan, times: PassTimes) -> int:
        """Passes took so long; what lies there the next time."""
        assert found.streamed
        for tenth in range(11):
            learn(found.streamed.key, tenth / 10, times)
        return homes(path, wanted)[0]

    assert ran(found, fast) == most
    # A device that is slower than anything: less of it is tried, and what was faster stays.
    fewer = ran(found, slow)
    assert fewer < most
    seen = {most: found}
    while fewer not in seen:
        now, seen[fewer] = homes(path, wanted)
        assert now == fewer
        fewer = ran(seen[now], slow if now else fast)
    assert (fewer, min(seen)) == (0, 0), "none of its passes was faster than those without"
    assert ran(seen[0], PassTimes(5.0, 1e-3, 1.0, 0.0, rate)) > 0, "the host has become slower still"
    assert homes(path, replace(wanted, planner="static"))[0] == most


def test_mapped_weights_are_mapped_again(path: Path) -> None:
    expected, wanted = right(path), replace(options(path, 0.5), streaming="mmap")
    with opened(path, wanted) as model:
        before = model._weights.maps
        assert before is not None
        seq = model.alloc()
        close(run(model, seq, *TEXT[0]), expected[0])
        assert "fragile" in model.plans.backends
        Fragile.made[-1].broken = True
        for ids, logits in zip(TEXT[1:], expected[1:], strict=True):
            close(run(model, seq, *ids), logits)
        assert model.plans.backends == ["llamacpp"]
        assert model._weights.maps not in (None, before)
        assert model.bill()["left"] >= 0


def test_a_pass_that_stands_still_keeps_what_it_runs_by(path: Path) -> None:
    """Another step fails in the middle of it, and nothing is read again under its feet."""
    with opened(path, options(path, 0.05)) as model:
        assert model.stands_aside
        first, second, failed = model.alloc(), model.alloc(), list[str]()
        device = Fragile.made[-1]

        def between() -> None:
            if not failed:
                device.broken = True
                with pytest.raises(BackendError, match="its driver says no") as e:
                    run(model, second, 7)
                failed.append(str(e.value))
                device.broken = False

        chunk = Chunk(first, np.array(TEXT[0]), np.arange(len(TEXT[0])))
        close(model._executor.run(Step((chunk,)), between).copy(), right(path)[0])
        assert failed
        assert not device.closed
        device.broken = True
        run(model, second, 7)
        assert device.closed


def test_a_model_that_was_only_there_is_read_into_ram(path: Path) -> None:
    expected, wanted = right(path), options(path, 0.0)
    assert wanted.ram
    assert wanted.vram
    make = partial(Fragile, "wanted")  # before all others
    wanted_most = Descriptor("wanted", lambda: Available("a test"), make, preference=1000, own_memory=True)
    undo = registry.register(wanted_most)
    names = ("wanted", "llamacpp")
    with opened(path, replace(wanted, backends=names, vram=8 * wanted.vram, ram=None)) as model:
        undo()
        assert model.plans.backends == ["wanted"]
        seq = model.alloc()
        close(run(model, seq, *TEXT[0]), expected[0])
        Fragile.made[-1].broken = True
        for ids, logits in zip(TEXT[1:], expected[1:], strict=True):
            close(run(model, seq, *ids), logits)
        assert model.plans.backends == ["llamacpp"]
        assert model.streaming() is None
