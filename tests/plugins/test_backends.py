"""Backends of strangers that are no good: named, left out, and the model runs on with the same answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import Available, Backend, Descriptor, Floats, Pass, Runner, Segment, registry
from hetrun.backend.interpreter import InterpretingBackend
from hetrun.backends.reference.ops import TABLE
from hetrun.errors import PluginError
from hetrun.executor.autotune.measurement import backend_probe, model_measurement
from hetrun.executor.autotune.measurement.prober import Prober
from hetrun.executor.loading import backend_selection
from hetrun.graph import Op
from hetrun.memory.kv.cache import KvCache
from hetrun.system import entry_points
from hetrun.system.entry_points import PluginPoint
from tests.plugins.strangers import Register

pytestmark = pytest.mark.slow

PROMPT = list(range(1000, 1400))  # so long that products of many rows are worth another backend
SMALL = 320  # the widest result of the cases that strangers are tried on


class Quick(InterpretingBackend):
    """Feed-forward parts: right where it is tried, and no time spent on a real model."""

    def __init__(self) -> None:
        super().__init__("odd", dict.fromkeys(("rms_norm", "linear", "swiglu", "add"), self.compute))
        self.broken = False
        self._zeros = np.zeros((512, 1 << 12), np.float32)

    def compute(self, op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        if self.broken:
            raise ZeroDivisionError("in the middle of an answer")
        if op.out.width <= SMALL:
            return TABLE[op.kind](op, x, w, work, kv)
        return self._zeros[: len(x[0]), : op.out.width]


class Liar(Quick):
    """Says that it can, and gives zeros."""

    def compute(self, op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        return np.zeros((len(x[0]), op.out.width), np.float32)


class Raising(Quick):
    def compute(self, op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        raise IndexError("out of range")


class Late(Quick):
    """Can do nothing before it has started."""

    started = False

    def start(self) -> None:
        self.started = True

    def compute(self, op: Op, x: list[Floats], w: list[Floats], work: Pass, kv: KvCache) -> Floats:
        assert self.started
        return super().compute(op, x, w, work, kv)


class Unwilling(Quick):
    def supports(self, op: Op) -> bool:
        raise RuntimeError("do not ask")


class Confused(Quick):
    def resident_bytes(self, wanted: object) -> int:
        return -1


@pytest.fixture
def made(register: Register, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginPoint]:
    """Registers a kind of backend, and keeps what was created of it."""
    monkeypatch.setattr(backend_selection, "_passed", set())
    monkeypatch.setattr(backend_probe, "others_running", lambda: 0.0)  # measure as long as on an idle machine
    choose = registry.choose  # without torch, whose results differ in the last bits
    monkeypatch.setattr(registry, "choose", lambda *a: [n for n in choose(*a) if not n.startswith("amx")])

    def make(create: Callable[[], Backend]) -> PluginPoint:
        return register("backends", "odd", Descriptor("odd", lambda: Available("for a test"), create))

    return make


def answer(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))[0].tokens


def opened(*backends: str) -> LLM:
    return LLM(planner="measured", eager=True, spec="off", backends=backends)


@pytest.fixture
def measured_as_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stranger's times are made up, and what there is to measure is measured on a busy machine, too."""
    clock = Prober._time

    def time(
        self: Prober,
        segments: Sequence[Segment],
        runners: Sequence[Runner],
        work: Pass,
        hear: Callable[[float], None],
        once: bool,
    ) -> None:
        quick = segments[0].backend == "odd"
        clock(self, segments, runners, work, (lambda seconds: hear(1e-6)) if quick else hear, once)

    monkeypatch.setattr(Prober, "_time", time)
    # A pause at the wrong moment makes a change of backend look dearer than all that it gains.
    monkeypatch.setattr(Prober, "in_turn", lambda self, units, ways, *rest: [1e-6] * len(ways))
    monkeypatch.setattr(model_measurement, "PROBE_S", 600.0)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What llama.cpp's kernels answer alone."""
    with opened("llamacpp") as llm:
        return answer(llm)


@pytest.mark.parametrize(
    ("create", "said"),
    [
        (Liar, "its results differ from the reference: "),
        (Raising, "IndexError: out of range"),
        (Unwilling, "asking it about embed fails: RuntimeError: do not ask"),
        (Confused, "a size, an error or a number of rows is too small"),
    ],
)
def test_it_is_left_out_before_anything_stands_on_it(
    made: Callable[..., PluginPoint],
    create: Callable[[], Backend],
    said: str,
    expected: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = made(create)
    with caplog.at_level(logging.WARNING), opened() as llm:
        assert answer(llm) == expected
        assert "odd" not in llm.plan.backends
    assert said in entry_points.left_out()[bad]
    told = [
        r.message for r in caplog.records if r.message.startswith("the backend odd of stranger 0.1 is left")
    ]
    assert len(told) == 1


@pytest.mark.parametrize("create", [Liar, Unwilling])
def test_who_names_it_is_told(made: Callable[..., PluginPoint], create: Callable[[], Backend]) -> None:
    made(create)
    with pytest.raises(PluginError, match=r"^the backend odd of stranger 0\.1 is left out: "):
        LLM(planner="static", backends=["odd", "reference"], ctx=64).close()


def test_one_that_has_to_start_is_started_before_it_is_tried(made: Callable[..., PluginPoint]) -> None:
    late = made(Late)
    with LLM(planner="static", backends=["odd", "reference"], ctx=64) as llm:
        assert "odd" in llm.plan.backends
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))[0].tokens
    assert late not in entry_points.left_out()


@pytest.mark.usefixtures("measured_as_quick")
def test_one_that_fails_in_the_middle_of_an_answer_costs_nothing_but_time(
    made: Callable[..., PluginPoint], expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    device = Quick()
    made(lambda: device)
    with caplog.at_level(logging.WARNING), opened() as llm:
        assert any("odd" in {s.backend for s in p.segments} for p in llm.plan.plans.values())
        device.broken = True
        assert answer(llm) == expected
        assert "odd" not in llm.plan.backends
        assert answer(llm) == expected
    assert any("the backend odd is left out" in r.message for r in caplog.records)
