"""Prompts of a model whose weights come from disk, on a device that reads them all for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest

from hetrun.backends.cuda import backend
from hetrun.backends.cuda.streamed import file_feed
from hetrun.backends.llamacpp.kernels.matmul import products
from hetrun.errors import BudgetError, Cancelled, ModelFileError
from hetrun.executor.loading import pieced_plan
from hetrun.executor.long_prompts import LongPrompts
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from hetrun.planner.options import Wishes
from hetrun.prefetch import ring_buffer
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.e2e.test_ram_and_vram import SHAPE, gpus, needed, options, room_for
from tests.models.tiny import write_gguf
from tests.support.streamed import MIB

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(
        ring_buffer.library() is None or products() is None, reason="built without a C compiler"
    ),
]
PROMPT = np.arange(40, 104) % 90 + 5
AT_ONCE = 16  # tokens that the host computes at once


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(SHAPE, tmp_path_factory.mktemp("models") / "prompts.gguf")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and passes as small as the model."""
    monkeypatch.setattr(file_feed, "PIECE", 128 << 10)
    monkeypatch.setattr(pieced_plan, "MOST_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(backend, "LONG_PASSES", (64, 32))


@contextmanager
def from_disk(path: Path, wishes: Wishes | None = None) -> Iterator[PlannedModel]:
    """The model with half of its weights in RAM and a quarter on the device, at most."""
    need, weights = needed(path)
    wanted = options(need - weights // 2, room_for(path, weights // 4))
    wanted = replace(wanted, planner="measured", ctx=256, wishes=wishes or wanted.wishes)
    model = PlannedModel(open_model(path), wanted)
    try:
        yield model
    finally:
        model.close()


def prompts_of(model: PlannedModel) -> LongPrompts:
    assert model.long_prompts
    return model.long_prompts


def asked(model: PlannedModel, seq: int, ids: np.ndarray) -> np.ndarray:
    return model.step(Step((Chunk(seq, ids, np.arange(len(ids))[-4:]),))).copy()


def text(model: PlannedModel) -> np.ndarray:
    """A prompt, two tokens, and more of a prompt."""
    seq = model.alloc()
    parts = [asked(model, seq, PROMPT), *(asked(model, seq, np.array([i])) for i in (3, 4))]
    found = np.concatenate([*parts, asked(model, seq, PROMPT[:40])])
    model.free(seq)
    return found


def close(found: np.ndarray, right: np.ndarray) -> None:
    # Where the host computes all of it, its inputs of 8 bits alone make 1.3e-3.
    assert np.square(found - right).sum() <= 2e-3 * np.square(right).sum()


@cache
def by_reference(path: Path) -> np.ndarray:
    model = PlannedModel(open_model(path), replace(options(names=("reference",)), ctx=256))
    found = text(model)
    model.close()
    return found


def test_a_prompt_is_read_once_and_by_the_device(path: Path) -> None:
    driver = EmulatedDriver(128 << 20)
    with gpus(driver):
        expected = by_reference(path)
        with from_disk(path) as model:
            assert model.streaming()
            device = prompts_of(model).device
            assert "long prompts: cuda can compute up to 64 tokens at once" in model.plans.to_text()
            assert text(model).shape == expected.shape
            first = model.crossed["cuda-streamed"]
            assert device.nbytes <= first < 2 * device.nbytes + file_feed.PIECE, (
                "two prompts of one pass each"
            )
            close(text(model), expected)
            assert model.bill()["left"] >= 0
    assert driver.closed


def test_what_fills_ram_and_a_device_opens_with_measuring(path: Path) -> None:
    """Nothing more fits there: what is measured is what lies there, and stands for the others."""
    with gpus(EmulatedDriver(128 << 20)):
        need, weights = needed(path)
        wanted = options(need - weights // 4, room_for(path, weights // 2))
        model = PlannedModel(open_model(path), replace(wanted, planner="measured", ctx=256, streaming="off"))
        assert not model.streaming()
        assert model.autotuner
        assert {"cuda", "llamacpp"} <= set(model.plans.backends)
        close(text(model), by_reference(path))
        model.close()


def test_the_faster_way_is_taken_and_taken_back(path: Path) -> None:
    """By what passes of both took; in the meantime answers are the host's, with what it has in memory."""
    with gpus(EmulatedDriver(128 << 20)), from_disk(path) as model:
        prompts = prompts_of(model)
        seq = model.alloc()
        model.expect(len(PROMPT))
        assert model.plans is prompts.with_device
        assert model.plans.ubatch == 64
        asked(model, seq, PROMPT)
        crossed = model.crossed["cuda-streamed"]
        asked(model, seq, np.array([3]))
        for _ in range(3):
            prompts.observe(len(PROMPT), 1e3)
        model.expect(len(PROMPT))
        assert model.plans is prompts.by_host
        assert model.plans.ubatch == AT_ONCE
        asked(model, seq, PROMPT)
        assert model.crossed["cuda-streamed"] == crossed, "the host has computed it"
        assert prompts.on_host(64) < prompts.on_device(64)
        tries = 0
        while model.plans is prompts.by_host:
            model.expect(len(PROMPT))
            assert (tries := tries + 1) < 2000
        assert tries > 20, "a device that was slower is tried again, but not soon"


def test_another_budget_keeps_the_way(path: Path) -> None:
    with gpus(EmulatedDriver(128 << 20)):
        expected = by_reference(path)
        with from_disk(path) as model:
            model.expect(len(PROMPT))
            least = model.streaming()
            assert least
            model.set_ram(least.budget - 1 * MIB)
            assert model.plans is prompts_of(model).with_device
            close(text(model), expected)


def test_a_device_that_is_lost_in_a_prompt_leaves_it_to_the_host(path: Path) -> None:
    driver = EmulatedDriver(128 << 20)
    with gpus(driver):
        expected = by_reference(path)
        with from_disk(path) as model:
            driver.breaks_at = driver.calls + 60
            close(text(model), expected)
            assert driver.loss
            assert model.plans.backends == ["llamacpp"]
            assert model.streaming()
    assert driver.closed


def test_a_device_without_room_leaves_prompts_to_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where others took its memory: nothing is lost, and the device keeps its layers."""
    with gpus(EmulatedDriver(128 << 20)):
        expected = by_reference(path)
        with from_disk(path) as model:
            streamed = model.backends["cuda-streamed"]

            def full(*_: object) -> NoReturn:
                raise BudgetError("no room")

            monkeypatch.setattr(streamed, "compile", full)
            close(text(model), expected)
            assert model.plans.backends == ["llamacpp", "cuda"]


def test_a_file_that_cannot_be_read_is_an_error_and_the_device_stays(path: Path) -> None:
    with gpus(EmulatedDriver(128 << 20)):
        expected = by_reference(path)
        with from_disk(path) as model:
            reader = mock.patch.object(FileReader, "fill", side_effect=ModelFileError(str(path), "is gone"))
            with reader, pytest.raises(ModelFileError, match="is gone"):
                text(model)
            close(text(model), expected)
            assert {"cuda", "cuda-streamed"} <= model.backends.keys()


def test_a_cancel_is_heard_while_a_piece_is_read(path: Path) -> None:
    with gpus(EmulatedDriver(128 << 20)):
        expected = by_reference(path)
        with from_disk(path) as model:
            fill, late = FileReader.fill, threading.Event()

            def slow(self: FileReader, *arguments: Any) -> None:  # noqa: ANN401
                if threading.current_thread().name.startswith("hetrun-read-weights"):
                    model.cancel()
                    late.wait(30)
                fill(self, *arguments)

            threading.Timer(0.2, late.set).start()
            with mock.patch.object(FileReader, "fill", slow), pytest.raises(Cancelled):
                text(model)
            model.rearm()
            close(text(model), expected)


@pytest.mark.parametrize("wish", [{"deterministic": True}, {"ubatch": 16}])
def test_what_was_asked_for_is_kept(path: Path, wish: dict[str, Any]) -> None:
    with gpus(EmulatedDriver(128 << 20)):
        with from_disk(path, replace(Wishes(threads=1), **wish)) as model:
            assert "long prompts" not in model.plans.to_text()
            assert "cuda-streamed" not in model.plans.backends
