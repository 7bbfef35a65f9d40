"""The whole path of a prompt on the null device: whatever runs together, each answer counts upwards."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backend import Available, Descriptor, registry
from hetrun.client.events import Event, GenerateRequest
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError
from hetrun.executor.planned_model import PlannedModel
from tests.models import tiny
from tests.models.cases import GQA
from tests.support.nulldevice import NullDevice
from tests.support.rig import model_file

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[NullDevice]:
    """The device that models are put on while this file is tested."""
    device = NullDevice()
    remove = registry.register(Descriptor("null", lambda: Available("it computes nothing"), lambda: device))
    yield device
    remove()


def counted(prompt: list[int], n: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % tiny.VOCAB for i in range(n)]


def test_an_answer_counts_upwards(device: NullDevice) -> None:
    with LocalModel(model_file(GQA), backends=["null"]) as llm:
        (done,) = llm.generate([40, 50], SamplingParams(max_tokens=20, **GREEDY))
        assert done.tokens == counted([50], 20)
        assert llm.plan.backends == ["null"]
        assert llm.logits([7, 9]).argmax(-1).tolist() == [8, 10]
        assert device.uploaded
    assert device.closed
    assert device.open == []


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=70), st.integers(1, 12)),
    min_size=1,
    max_size=20,
)


def bytes_left(loaded: LoadedModel) -> int:
    """Memory of keys and values that is not needed any more: nothing runs, and nothing is kept."""
    assert loaded.prefixes
    assert loaded.prefixes.n_running == 0
    loaded.prefixes.clear()
    return cast(PlannedModel, loaded.model).kv_bytes


@given(prompts=PROMPTS, ubatch=st.sampled_from((1, 3, 16, 40, 512)), deterministic=st.booleans())
@settings(max_examples=25)
def test_whatever_runs_together_each_answer_is_its_own(
    device: NullDevice, prompts: list[tuple[list[int], int]], ubatch: int, deterministic: bool
) -> None:
    """More prompts than places, prompts longer than a step, answers of different lengths."""
    options: dict[str, Any] = {"ubatch": ubatch, "deterministic": deterministic, "ctx": 128}
    device.passes.clear()
    with LocalModel(model_file(GQA), backends=["null"], **options) as llm:
        params = [SamplingParams(max_tokens=n, **GREEDY) for _, n in prompts]
        answers = generate_each(llm, [p for p, _ in prompts], params)
        assert answers == [counted(prompt, n) for prompt, n in prompts]
        assert llm.call(bytes_left) == 0
    assert max(len(work.tokens) for work in device.passes) <= ubatch


def generate_each(llm: LocalModel, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """All at once, each with parameters of its own."""
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    requests = [GenerateRequest(p, tokens=tuple(t)) for t, p in zip(prompts, params, strict=True)]

    def submit_all(_: LoadedModel) -> None:
        for i, request in enumerate(requests):
            llm.submit(request, lambda event, i=i: events.put((i, event)))  # type: ignore[misc]

    llm.call(submit_all)
    answers: list[list[int]] = [[] for _ in prompts]
    left = len(prompts)
    while left:
        i, event = events.get(timeout=30)
        if event.token is not None:
            answers[i].append(event.token)
        else:
            assert event.finish_reason == "length"
            left -= 1
    return answers


def test_a_budget_that_cannot_hold_the_model() -> None:
    with pytest.raises(BudgetError, match="this model needs at least"):
        LocalModel(model_file(GQA), backends=["null"], ram="1MiB")
