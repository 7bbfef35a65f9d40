"""Questions on their way through the worker's pipe: each has its answer, none waits for a slow one of another
lane, and those of a process that dies are asked again, where that does no harm."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hetrun.client import worker_process
from hetrun.client.engine_client import LocalClient, WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.client.interface import ChatClient
from hetrun.client.queries import (
    LANES,
    Detokenize,
    PlanNow,
    Question,
    Render,
    SetRam,
    StateQuery,
    Tokenize,
    TokenizerInfo,
)
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.errors import BackendError, EngineStopped, OptionError, Overloaded
from tests.support.fakes import DEADLY_RAM, FakeEngine

FAKE = "tests.support.fakes:FakeEngine"
HELLO = ({"role": "user", "content": "hello"},)
SLOW = Render(({"role": "user", "content": "slow"},))
QUESTIONS: tuple[Question[Any], ...] = (
    Tokenize("hello", parse_special=False),
    Detokenize((1, 2)),
    TokenizerInfo(),
    Render(HELLO, {"a": 1}),
    PlanNow(),
    SetRam(5 << 20),
    StateQuery(),
)


@asynccontextmanager
async def opened(kind: str = "worker") -> AsyncIterator[Any]:
    client: ChatClient = (
        LocalClient(FakeEngine())
        if kind == "local"
        else WorkerClient(Settings.resolve(environ={}), engine=FAKE)
    )
    try:
        yield client
    finally:
        await client.close()


async def said(client: ChatClient, text: str) -> str:
    request = GenerateRequest(SamplingParams(), text=text, whole=True)
    return "".join([event.text async for event in client.stream(request)])


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
async def test_the_answers_are_those_of_the_engine(question: Question[Any]) -> None:
    engine = FakeEngine()
    async with opened() as worker, opened("local") as local:
        expected = engine.ask(question)
        assert await worker.ask(question) == expected
        assert await local.ask(question) == expected
    engine.close()


async def test_what_is_slow_holds_up_only_its_own_kind() -> None:
    async with opened() as client:
        await client.info()
        slow = asyncio.create_task(client.ask(SLOW))
        also = asyncio.create_task(client.ask(Render(HELLO)))
        for _ in range(3):
            assert await client.ask(Tokenize("a", add_special=False)) == [97]
            assert (await client.ask(StateQuery())).places == 64
            assert (await client.ask(SetRam(5 << 20)))["KV"] == 1000
            assert await said(client, "say fine") == "fine"
        assert not slow.done()
        assert not also.done()  # one text is written at a time
        slow.cancel()
        also.cancel()


def test_every_question_has_a_lane() -> None:
    assert {question.lane for question in QUESTIONS} == set(LANES)
    assert [type(question) for question in QUESTIONS if not question.repeatable] == [SetRam]
    assert LANES["model"] == 1  # what was set last is in force


async def test_questions_of_a_worker_that_dies_are_asked_again(tmp_path: Path) -> None:
    async with opened() as client:
        await client.info()
        first = client.pid
        waiting = asyncio.create_task(client.ask(SLOW))
        text = f"once {tmp_path / 'died'}"
        assert await client.ask(Tokenize(text, add_special=False)) == list(text.encode())
        assert client.pid != first
        assert not waiting.done()  # it waits in the next one
        os.kill(client.pid, signal.SIGKILL)
        assert (await client.ask(StateQuery())).places == 64
        assert not waiting.done()
        waiting.cancel()


async def test_a_question_that_kills_every_worker_is_given_up() -> None:
    async with opened() as client:
        with pytest.raises(BackendError, match=r"SIGABRT.*3 processes ended while running this request"):
            await client.ask(Tokenize("die"))
        assert await client.ask(Tokenize("a", add_special=False)) == [97]


async def test_a_budget_is_not_set_again() -> None:
    async with opened() as client:
        with pytest.raises(EngineStopped, match="It is being restarted"):
            await client.ask(SetRam(DEADLY_RAM))
        assert (await client.ask(StateQuery())).budget is None


async def test_questions_at_a_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "MOST_ASKED", 2)
    async with opened() as client:
        await client.info()
        slow = [asyncio.create_task(client.ask(SLOW)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="already has 2 queries"):
            await client.ask(StateQuery())
        for task in slow:
            task.cancel()
        # Who does not wait any more has asked nevertheless.
        with pytest.raises(Overloaded):
            await client.ask(StateQuery())
        assert await said(client, "say fine") == "fine"


@pytest.mark.parametrize("kind", ["local", "worker"])
async def test_errors_are_those_of_the_engine(kind: str) -> None:
    async with opened(kind) as client:
        with pytest.raises(OptionError, match="no render"):
            await client.ask(Render(({"role": "user", "content": "refuse"},)))


async def test_nothing_is_answered_any_more() -> None:
    async with opened() as client:
        await client.info()
        waiting = asyncio.create_task(client.ask(SLOW))
        await asyncio.sleep(0.05)
    with pytest.raises(EngineStopped, match="the engine was closed"):
        await waiting
    with pytest.raises(EngineStopped, match="the engine was closed"):
        await client.ask(StateQuery())
