"""Many requests on a real model, in little memory: whatever comes, leaves, shares and gives way, each answer
is the one that it has alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import pytest
from hypothesis import given, settings, strategies as st

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.events import Event, GenerateRequest
from hetrun.engine import slot_manager
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.planned_model import PlannedModel
from tests.models import tiny
from tests.models.cases import GQA
from tests.support.rig import model_file

CTX = 256
# Few beginnings, so that requests share them.
BEGINNINGS = [[(7 * i + 13 * k) % tiny.VOCAB for i in range(150)] for k in range(3)]


@dataclass(frozen=True)
class Wish:
    """A request, and after how many tokens of its answer it leaves."""

    beginning: int
    shared: int  # tokens of the beginning
    own: tuple[int, ...]
    n: int
    client: str
    priority: int
    temperature: float
    leaves: int | None

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*BEGINNINGS[self.beginning][: self.shared], *self.own)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.n, temperature=self.temperature, seed=5, ignore_eos=True)


WISHES = st.builds(
    Wish,
    beginning=st.integers(0, len(BEGINNINGS) - 1),
    shared=st.integers(0, 150),
    own=st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=20).map(tuple),
    n=st.integers(1, 80),
    client=st.sampled_from("abc"),
    priority=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 0.8]),
    leaves=st.none() | st.none() | st.integers(0, 10),
)


@dataclass
class Receiver:
    """Collects an answer, and leaves where it is told to."""

    llm: LocalModel
    wish: Wish
    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    id: int = 0

    def __call__(self, event: Event) -> None:
        assert not self.over.is_set()
        self.events.append(event)
        if self.wish.leaves == len(self.events):
            self.llm.cancel(self.id)
        if event.last:
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.events if e.token is not None]


@pytest.fixture(scope="module")
def llm() -> Iterator[LocalModel]:
    with LocalModel(model_file(GQA), backends=["llamacpp"], ctx=CTX, deterministic=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody begins who can, so that memory runs out later on."""
    monkeypatch.setattr(slot_manager, "AHEAD", 1)


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalModel]:
    with LocalModel(model_file(GQA), backends=["llamacpp"], ctx=CTX, deterministic=True) as llm:
        yield llm


@settings(max_examples=15, deadline=None)
@given(wishes=st.lists(WISHES, min_size=1, max_size=24), room=st.floats(1, 4), together=st.booleans())
def test_each_answer_is_the_one_it_has_alone(
    llm: LocalModel, alone: LocalModel, wishes: list[Wish], room: float, together: bool
) -> None:
    @cache
    def reference(wish: Wish) -> list[int]:
        def forget(loaded: LoadedModel) -> None:
            assert loaded.prefixes
            loaded.prefixes.clear()

        alone.call(forget)
        return alone.generate([list(wish.prompt)], wish.params)[0].tokens

    def limit(loaded: LoadedModel) -> None:
        kv = cast(PlannedModel, loaded.model).kv
        assert loaded.prefixes
        loaded.prefixes.clear()
        kv.trim()
        kv.limit_bytes = int(room * CTX * sum(kv._row_bytes))

    def submit(wish: Wish) -> Receiver:
        r = Receiver(llm, wish)
        request = GenerateRequest(wish.params, tokens=wish.prompt, client=wish.client, priority=wish.priority)
        r.id = llm.submit(request, r)
        return r

    llm.call(limit)
    if together:
        receivers = llm.call(lambda _: [submit(w) for w in wishes])
    else:
        receivers = [submit(w) for w in wishes]
    for r in receivers:
        assert r.over.wait(60), r.wish
        expected, wish = reference(r.wish), r.wish
        if wish.leaves is None or r.events[-1].finish_reason == "length":
            assert r.events[-1].finish_reason == "length", r.events[-1].error
            assert r.tokens == expected, wish
        else:
            assert r.events[-1].finish_reason == "cancelled"
            assert r.tokens == expected[: len(r.tokens)], wish
    llm.call(nothing_left)


def nothing_left(loaded: LoadedModel) -> None:
    """Only what is cached takes memory."""
    model = cast(PlannedModel, loaded.model)
    assert loaded.prefixes
    assert not loaded.prefixes.n_running
    loaded.prefixes.clear()
    assert model.kv_bytes == 0
