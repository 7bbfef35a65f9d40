"""Devices with memory of their own: what each may take, and what of a model lies there instead of in RAM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from hetrun.backend import Available, Descriptor, OwnMemory, ReadInto, WeightUse, registry
from hetrun.backend.interpreter import ArrayBuffer
from hetrun.errors import BudgetError, OptionError
from hetrun.executor.loading.device_memory import within
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from tests.models import cases
from tests.support.nulldevice import NullDevice
from tests.support.rig import graph_of, model_file

SOURCE = open_model(model_file(cases.GQA))
WEIGHTS = sum(w.nbytes for w in graph_of(cases.GQA).weights().values())
BESIDES = 1 << 20  # bytes that nothing but weights has


THERE = ArrayBuffer(np.empty((0, 0), np.float32))  # a weight that the device has


class Gpu(NullDevice):
    """A device that holds the stored bytes of weights, in memory of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[str] = []

    def grant(self, nbytes: int | None) -> OwnMemory:
        self.calls.append(f"grant {nbytes}")
        return OwnMemory(1 << 30 if nbytes is None else nbytes, BESIDES)

    def resident_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return 0

    def device_bytes(self, wanted: Sequence[WeightUse]) -> int:
        return sum(use.weight.nbytes for use in wanted)

    def upload(self, wanted: WeightUse, read: ReadInto) -> ArrayBuffer:
        self.calls.append("upload")
        return THERE


@contextmanager
def prepared(*names: str, vram: int | None = None, ram: int | None = None) -> Iterator[LoadPlan]:
    """What is decided for a small model."""
    found = prepare(SOURCE, Options(Wishes(), names, ctx=64, vram=vram, ram=ram))
    yield found
    for backend in found.backends.values():
        backend.close()


def own_bytes(found: LoadPlan, name: str) -> int:
    return found.backends[name].device_bytes(found.wanted[name])


@pytest.fixture(autouse=True)
def gpus() -> Iterator[list[Gpu]]:
    """Two of them can be chosen; the list has what was made."""
    made: list[Gpu] = []

    def make(name: str) -> Gpu:
        made.append(Gpu(name))
        return made[-1]

    undo = [
        registry.register(
            Descriptor(
                *(name, lambda: Available("a test"), lambda name=name: make(name)),
                preference=1000 - at,
                own_memory=True,
            )
        )
        for at, name in enumerate(("gpu", "gpu-1"))
    ]
    yield made
    for function in undo:
        function()


def test_weights_that_lie_there_are_not_counted_here() -> None:
    with prepared("gpu", "reference", vram=BESIDES + 2 * WEIGHTS) as found:
        assert found.plans.backends == ["gpu"]
        memory, devices = found.plans.memory, found.plans.devices
        assert (found.weights, memory["weights"]) == (0, 0)
        limit, weights = BESIDES + 2 * WEIGHTS, own_bytes(found, "gpu")
        assert devices == {
            "gpu": {
                "weights": weights,
                "driver, scratch and KV": BESIDES,
                "limit": limit,
                "left": 2 * WEIGHTS - weights,
            }
        }
        assert {name: own.room for name, own in found.own.items()} == {"gpu": 2 * WEIGHTS}
        assert json.loads(json.dumps(found.plans.to_json()))["device_memory"] == devices
        lines = found.plans.to_text().splitlines()
        at = lines.index(next(line for line in lines if line.startswith("memory of gpu ")))
        assert [line.split()[0] for line in lines[at:]] == [
            "memory",
            "weights",
            "driver,",
            "in",
            "limit",
            "left",
        ]
        assert all("its own" in line for line in lines[at + 1 : at + 3])


def test_a_budget_of_ram_is_for_what_lies_in_ram() -> None:
    with prepared("reference") as found:
        held = found.plans.memory
        least = sum(held[n] for n in held if n not in ("weights", "KV of all, at most", "limit", "left"))
    with prepared("gpu", "reference", ram=least + (64 << 10)) as found:
        assert found.plans.backends == ["gpu"]
        assert found.plans.memory["left"] >= 0
        assert not found.streamed


@pytest.mark.parametrize("vram", [BESIDES, BESIDES + WEIGHTS // 2])
def test_a_device_without_room_comes_behind_the_others(vram: int) -> None:
    with prepared("gpu", "gpu-1", "reference", vram=vram) as found:
        assert found.plans.backends == ["reference"]
        assert found.plans.memory["weights"] > 0
        assert {name: bill.get("weights") for name, bill in found.plans.devices.items()} == {
            "gpu": None,
            "gpu-1": None,
        }
        assert {name: own.room for name, own in found.own.items()} == dict.fromkeys(
            ["gpu", "gpu-1"], vram - BESIDES
        )


def test_alone_it_is_refused_with_what_it_would_take() -> None:
    said = r"^1 MiB of device memory is too little for gpu: .* it needs 3 MiB; allow more with --vram, or"
    with pytest.raises(BudgetError, match=said), prepared("gpu", vram=BESIDES + 1000):
        pass


def test_each_gets_its_grant_before_anything_is_brought_in(gpus: list[Gpu]) -> None:
    model = PlannedModel(SOURCE, Options(Wishes(), ("gpu", "gpu-1"), ctx=64, vram=1 << 29))
    first, second = gpus
    assert first.calls[:2] == ["grant 536870912", "upload"]
    assert second.calls == ["grant 536870912"]
    seq = model.alloc()
    rows = model.step(Step((Chunk(seq, np.arange(3), np.arange(3)),)))
    assert rows.argmax(1).tolist() == [1, 2, 3]
    model.close()
    assert first.closed
    assert second.closed


def test_without_a_word_it_takes_what_is_free(gpus: list[Gpu]) -> None:
    plans = predict_plans(SOURCE, Options(Wishes(), ("gpu", "reference"), ctx=64))
    assert gpus[0].calls == ["grant None"]
    assert plans.devices["gpu"]["limit"] == 1 << 30
    assert gpus[0].closed


def test_none_of_it_leaves_the_devices_out(gpus: list[Gpu]) -> None:
    with prepared("gpu", "reference", vram=0) as found:
        assert list(found.backends) == ["reference"]
        assert found.plans.devices == {}
    assert gpus == []
    with pytest.raises(
        OptionError, match=r"^--vram 0 leaves no memory for gpu and gpu-1; allow more, or other"
    ):
        prepare(SOURCE, Options(Wishes(), ("gpu", "gpu-1"), vram=0))


def test_the_bill_is_of_what_there_is_now() -> None:
    with prepared("gpu", "reference", vram=BESIDES + 2 * WEIGHTS) as found:
        less = {"gpu": OwnMemory(BESIDES + WEIGHTS, BESIDES // 2)}
        now = within(found.plans, less).devices["gpu"]
        assert (now["limit"], now["driver, scratch and KV"]) == (BESIDES + WEIGHTS, BESIDES // 2)
        assert now["left"] == BESIDES // 2 + WEIGHTS - own_bytes(found, "gpu")


def test_a_grant_that_is_refused_leaves_nothing_open(
    gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Gpu, nbytes: int | None) -> OwnMemory:
        raise BudgetError("no")

    monkeypatch.setattr(Gpu, "grant", refuse)
    with pytest.raises(BudgetError, match=r"^no$"):
        prepare(SOURCE, Options(Wishes(), ("gpu", "reference"), ctx=64))
    assert [gpu.closed for gpu in gpus] == [True]
