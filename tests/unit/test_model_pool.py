"""Several models within one budget: who is loaded, who goes, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient, Health
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import PROCESS, ModelPool, OnDemand
from hetrun.client.queries import Question, SetRam, StateQuery
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import BudgetError, EngineStopped, ModelFileError, UserError
from tests.support.fakes import INFO

A = TypeVar("A")

MIB = 1 << 20
ASKED = GenerateRequest(SamplingParams(), text="?")


class Engine:
    """A client whose answers last until they are let go."""

    def __init__(self, found: CatalogModel, ram: int | None) -> None:
        self.found, self.ram = found, ram
        self.go = asyncio.Event()
        self.closed = False
        self.least = 0
        self.broken = found.name == "broken"

    @property
    def progress(self) -> float:
        return 1.0

    @property
    def health(self) -> Health:
        return Health("failed" if self.broken else "ok")

    async def info(self) -> ModelInfo:
        await asyncio.sleep(0)
        if self.broken:
            raise ModelFileError(str(self.found.path), "is broken")
        return replace(INFO, name=self.found.name)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield Event("token", self.found.name)
        await self.go.wait()
        assert not self.closed
        yield Event("done")

    async def ask(self, question: Question[A]) -> A:
        if isinstance(question, StateQuery):  # the pool wants to know before it is unloaded
            raise UserError("a fake has no state")
        assert isinstance(question, SetRam)
        if question.nbytes < self.least:
            raise BudgetError("too little")
        self.ram = question.nbytes
        return cast(A, {})

    async def close(self) -> None:
        self.closed = True


class Started:
    """What was started, in order."""

    def __init__(self) -> None:
        self.all: list[Engine] = []

    def __call__(self, found: CatalogModel, ram: int | None) -> ChatClient:
        self.all.append(Engine(found, ram))
        return self.all[-1]

    @property
    def names(self) -> list[str]:
        return [e.found.name for e in self.all]

    @property
    def open(self) -> list[str]:
        return [e.found.name for e in self.all if not e.closed]


@pytest.fixture
def started() -> Started:
    return Started()


def found(name: str, nbytes: int = 100 * MIB) -> CatalogModel:
    return CatalogModel(name, Path(f"/models/{name}.gguf"), nbytes)


def shelf(started: Started, *names: str, ram: int | None = 4096 * MIB, **more: object) -> ModelPool:
    return ModelPool([found(name) for name in names], started, ram=ram, **more)  # type: ignore[arg-type]


async def answer(model: OnDemand) -> list[Event]:
    return [event async for event in model.stream(ASKED)]


async def begun(model: OnDemand) -> asyncio.Task[list[Event]]:
    """An answer that has begun."""
    task = asyncio.ensure_future(answer(model))
    while not model.users:
        await asyncio.sleep(0)
    return task


async def a_while() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def let_go(model: OnDemand) -> None:
    assert isinstance(model.client, Engine)
    model.client.go.set()


async def test_a_model_is_loaded_when_it_is_asked_for_and_stays(started: Started) -> None:
    models = shelf(started, "a", "b").models
    assert started.names == []
    assert (await models["a"].info()).name == "a"
    task = await begun(models["a"])
    let_go(models["a"])
    assert [e.kind for e in await task] == ["token", "done"]
    assert (await models["b"].info()).name == "b"
    assert started.names == started.open == ["a", "b"]


async def test_shares_are_equal_or_what_is_needed(started: Started) -> None:
    several = ModelPool([found("small"), found("large", 2000 * MIB)], started, ram=4000 * MIB)
    await several.models["small"].info()
    await several.models["large"].info()
    need = several.models["large"].need
    assert need > 2000 * MIB + PROCESS
    # Both together would be too much: the small one has gone.
    assert [e.ram for e in started.all] == [2000 * MIB, need]
    assert started.open == ["large"]


async def test_one_that_is_larger_than_everything_has_everything(started: Started) -> None:
    several = ModelPool([found("small"), found("huge", 9000 * MIB)], started, ram=4000 * MIB)
    await several.models["huge"].info()
    assert started.all[0].ram == 4000 * MIB


async def test_the_one_that_was_not_used_for_longest_goes(started: Started) -> None:
    models = shelf(started, "a", "b", "c", most_loaded=2).models
    for name in "abab":
        let_go(models[name]) if models[name].client else None
        client = await models[name]._shelf.lend(models[name])
        assert isinstance(client, Engine)
        models[name]._shelf.give_back(models[name])
    await models["c"].info()
    assert started.open == ["b", "c"]


async def test_one_that_answers_goes_after_its_answers_and_no_request_overtakes(started: Started) -> None:
    models = shelf(started, "a", "b", most_loaded=1).models
    first = await begun(models["a"])
    other = asyncio.ensure_future(models["b"].info())
    await a_while()
    later = asyncio.ensure_future(answer(models["a"]))  # after the one that waits for room
    await a_while()
    assert started.names == ["a"]
    assert models["a"].users == 1
    let_go(models["a"])
    assert [e.kind for e in await first] == ["token", "done"]
    assert (await other).name == "b"
    while started.names != ["a", "b", "a"]:
        await asyncio.sleep(0)
    assert [e.closed for e in started.all] == [True, True, False]
    let_go(models["a"])
    assert len(await later) == 2


async def test_who_gives_up_waiting_changes_nothing(started: Started) -> None:
    models = shelf(started, "a", "b", most_loaded=1).models
    first = await begun(models["a"])
    other = asyncio.ensure_future(models["b"].info())
    await a_while()
    other.cancel()
    await a_while()
    second = await begun(models["a"])
    assert started.names == ["a"]
    let_go(models["a"])
    await asyncio.gather(first, second)


async def test_one_that_cannot_be_loaded_says_why_and_is_tried_again(started: Started) -> None:
    models = shelf(started, "broken", "b", "c", most_loaded=2).models
    await models["b"].info()
    with pytest.raises(ModelFileError, match="is broken"):
        await models["broken"].info()
    (event,) = await answer(models["broken"])
    assert isinstance(event.error, ModelFileError)
    await a_while()
    assert started.names == ["b", "broken", "broken"]
    assert (await models["c"].info()).name == "c"
    assert started.open == ["b", "c"]


async def test_it_sleeps_without_requests_and_wakes_up(started: Started) -> None:
    models = shelf(started, "a", ram=None, idle_s=0.02).models
    assert (await models["a"].info()).name == "a"
    task = await begun(models["a"])
    await asyncio.sleep(0.05)
    assert started.open == ["a"]  # who answers does not sleep
    let_go(models["a"])
    await task
    while started.open:
        await asyncio.sleep(0.01)
    assert models["a"].health.status == "ok"
    assert (await models["a"].info()).name == "a"  # known: it is not woken up for that
    with pytest.raises(EngineStopped, match="is asleep"):
        await models["a"].ask(StateQuery())  # who looks does not wake it either
    assert started.open == []
    await begun(models["a"])
    let_go(models["a"])
    assert started.names == ["a", "a"]
    assert [e.ram for e in started.all] == [None, None]


async def test_a_model_stays_as_long_as_a_client_says(started: Started) -> None:
    models = shelf(started, "a", "b", ram=None, most_loaded=2).models
    a = models["a"]
    assert models["b"].leaves_in_s is None
    a.keep(300)
    await a.wake()
    assert a.leaves_in_s is not None
    assert 200 < a.leaves_in_s <= 300
    a.keep(0)
    task = await begun(a)
    let_go(a)
    await task
    while started.open:
        await asyncio.sleep(0.001)
    assert a.idle_s is None  # what was said of it is forgotten when it goes


async def test_a_model_that_is_to_rest_ends_its_answers_first(started: Started) -> None:
    a = shelf(started, "a").models["a"]
    await a.rest()  # it is not loaded
    assert started.names == []
    await a.wake()
    await a.rest()
    assert started.open == []
    task = await begun(a)
    await a.rest()
    assert started.open == ["a"]
    let_go(a)
    assert [e.kind for e in await task] == ["token", "done"]
    while started.open:
        await asyncio.sleep(0.001)


async def test_models_come_and_go(started: Started) -> None:
    several = shelf(started, "a", "b")
    b = several.models["b"]
    several.add(found("c"))
    assert (await several.models["c"].info()).name == "c"
    task = await begun(b)
    dropping = asyncio.ensure_future(several.drop(b))
    await a_while()
    assert several.find("b") is None
    assert not dropping.done()  # its answer is not complete
    let_go(b)
    await asyncio.gather(task, dropping)
    assert started.open == ["c"]
    (event,) = await answer(b)
    assert isinstance(event.error, EngineStopped)
    assert started.names == ["c", "b"]


async def test_leaving_an_answer_gives_the_model_back(started: Started) -> None:
    models = shelf(started, "a").models
    async with aclosing(models["a"].stream(ASKED)) as events:
        await anext(events)
        assert models["a"].users == 1
    assert models["a"].users == 0


async def test_the_budget_changes(started: Started) -> None:
    several = shelf(started, "a", "b", ram=4096 * MIB)
    a, b = several.models.values()
    await a.info()
    await b.info()
    assert await several.set_ram(2048 * MIB) == {"a": 1024 * MIB, "b": 1024 * MIB}
    assert [e.ram for e in started.all] == [1024 * MIB, 1024 * MIB]
    task = await begun(b)
    assert await several.set_ram(500 * MIB) == {"b": b.need}
    assert started.open == ["b"]
    other = asyncio.ensure_future(a.info())
    await other  # known already
    let_go(b)
    await task
    several = shelf(started, "a", "b")
    both = [await begun(m) for m in several.models.values()]
    with pytest.raises(BudgetError, match="a, b are answering"):
        await several.set_ram(500 * MIB)
    for model in several.models.values():
        let_go(model)
    await asyncio.gather(*both)


async def test_one_that_cannot_do_with_less_goes_unless_it_answers(started: Started) -> None:
    several = shelf(started, "a", "b", ram=4096 * MIB)
    a, b = several.models.values()
    for model in (a, b):
        await model.info()
        started.all[-1].least = 1500 * MIB
    task = await begun(b)
    with pytest.raises(BudgetError, match="too little"):
        await several.set_ram(2048 * MIB)
    assert started.open == ["a", "b"]
    let_go(b)
    await task
    assert await several.set_ram(2048 * MIB) == {}
    assert started.open == []
    task = await begun(a)
    assert started.all[-1].ram == 1024 * MIB
    let_go(a)
    await task


async def test_closing(started: Started) -> None:
    several = shelf(started, "a", "b")
    for model in several.models.values():
        await model.info()
    await several.close()
    assert started.open == []
    (event,) = await answer(several.models["a"])
    assert isinstance(event.error, EngineStopped)


async def test_names(started: Started) -> None:
    assert shelf(started, "a", "b").usual is None
    several = shelf(started, "a", "b")
    for name in ("b", "b.gguf", "/models/b.gguf"):
        assert several.find(name) is several.models["b"]
    assert several.find("c") is None
    await several.models["b"].info()
    assert several.usual is several.models["b"]
    only = shelf(started, "a")
    assert only.usual is only.models["a"]
