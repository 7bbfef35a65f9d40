"""The segments of a stage on several devices: at once, and waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from hetrun.backend import Backend, Buffers, Done, Pass, PassShape, Runner, Segment
from hetrun.backends import reference
from hetrun.errors import BackendError
from hetrun.memory.kv.cache import KvCache
from tests.models import tiny
from tests.models.cases import GQA
from tests.support.nulldevice import NullDevice
from tests.support.rig import Rig, ThreadedDevice, graph_of, plan_set, rig

TOKENS = tiny.random_tokens(48)


def following(tokens: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """What the null device says of the wanted tokens."""
    return [(tokens[i] + 1) % tiny.VOCAB for i in wanted]


SPLIT = {"": "reference", "blk.0.attn.q": "second", "blk.1.ffn.gate": "second"}


def with_second(before: Callable[[Segment], object], first: Backend | None = None) -> Rig:
    second = ThreadedDevice(reference.create("second"), before)
    return rig(GQA, {"reference": first or reference.create(), "second": second}, SPLIT)


def test_two_devices_give_what_one_gives() -> None:
    made, alone = with_second(lambda segment: None), rig(GQA, {"reference": reference.create()})
    a, b = made.kv.alloc(), alone.kv.alloc()
    for tokens in (TOKENS[:20], TOKENS[20:21], TOKENS[21:]):
        assert (made.logits(a, tokens) == alone.logits(b, tokens)).all()
    made.close()


def test_the_segments_of_a_stage_are_in_flight_at_once() -> None:
    """Both devices wait in a stage until the other one is there too: it passes only if they run together."""
    met: list[str] = []
    meeting = threading.Barrier(2, timeout=30)
    plans = plan_set(graph_of(GQA), SPLIT, alone=["reference", "second"])
    together = [stage for stage in plans.plan(1).stages if len(stage) == 2]
    assert [{s.backend for s in stage} for stage in together] == [{"reference", "second"}] * 2
    shared = {s.name for stage in together for s in stage}

    def before(segment: Segment) -> None:
        if segment.name in shared:
            meeting.wait()
            met.append(segment.name)

    first = ThreadedDevice(reference.create(), before)
    made = with_second(before, first)
    logits = made.logits(made.kv.alloc(), TOKENS)
    assert sorted(met) == sorted(shared)
    alone = rig(GQA, {"reference": reference.create()})
    assert (logits == alone.logits(alone.kv.alloc(), TOKENS)).all()
    made.close()


class Meeting(NullDevice):
    """Computes on the calling thread, and only once the other device has begun."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self._begun = begun

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        return Waiting(super().compile(segment, shape, buffers, kv), segment, self._begun)


class Waiting:
    def __init__(self, inner: Runner, segment: Segment, begun: threading.Event) -> None:
        self._inner, self._segment, self._begun = inner, segment, begun

    def submit(self, work: Pass) -> Done:
        if beside_q(self._segment):
            assert self._begun.wait(30), "the other device was not given its work first"
        return self._inner.submit(work)

    def close(self) -> None:
        self._inner.close()


def test_a_device_that_works_by_itself_begins_before_the_one_that_keeps_the_thread() -> None:
    begun = threading.Event()
    second = ThreadedDevice(NullDevice("second"), lambda segment: begun.set())
    made = rig(GQA, {"null": Meeting(begun), "second": second}, {"": "null", "blk.0.attn.q": "second"})
    assert made.step((made.kv.alloc(), TOKENS, [3])).argmax(-1).tolist() == following(TOKENS, [3])
    made.close()


def test_when_one_device_fails_the_others_are_waited_for() -> None:
    """The others still write into arrays of this step."""

    def fail(segment: Segment) -> None:
        if beside_q(segment):
            raise BackendError("the first device failed")

    first, second = ThreadedDevice(NullDevice(), fail), ThreadedDevice(NullDevice("second"))
    made = rig(GQA, {"null": first, "second": second}, {"": "null", "blk.0.attn.q": "second"})
    a = made.kv.alloc()
    with pytest.raises(BackendError, match="the first device failed"):
        made.step((a, TOKENS, [3]))
    assert made.kv.length(a) == 0
    assert [task.waited for task in second.given] == [True]
    made.close()


def beside_q(segment: Segment) -> bool:
    """Whether a segment is the one that runs beside the first layer's q."""
    return any(op.scope == "blk.0.attn.k" for op in segment.ops)


def test_work_that_was_given_is_waited_for_when_the_next_cannot_be_given() -> None:
    second = ThreadedDevice(NullDevice("second"))

    class Refusing(NullDevice):
        def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
            return Refused() if beside_q(segment) else super().compile(segment, shape, buffers, kv)

    class Refused:
        def submit(self, work: Pass) -> Done:
            raise BackendError("refused")

        def close(self) -> None:
            """Nothing to give back."""

    made = rig(GQA, {"null": Refusing(), "second": second}, {"": "null", "blk.0.attn.q": "second"})
    with pytest.raises(BackendError, match="refused"):
        made.step((made.kv.alloc(), TOKENS, [3]))
    assert [task.waited for task in second.given] == [True]
    made.close()
