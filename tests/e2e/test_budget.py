"""The budget goes down and up in the middle of answers: every token is the one that it would have been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.client.queries import SetRam
from hetrun.client.sampling_params import SamplingParams
from hetrun.client.wire_protocol import Patience
from hetrun.config import Settings
from hetrun.errors import BudgetError

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
# Of the weights, how much less there is than the whole model needs in a process, or more.
SMALL, MIDDLE, LARGE = -0.6, -0.3, 0.6
CHANGES = (SMALL, LARGE, MIDDLE, SMALL, LARGE, SMALL)
PARTS = ("weights", "KV of one full sequence", "interpreter", "libraries", "reserve")

# Three answers together; behind every fourth token of the first one comes another budget. In a process of its
# own: a test's has in memory whatever was imported before.
ANSWERS = """
import json, sys, threading
from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.memory.ledger import kernel_figures
from hetrun.client.events import GenerateRequest

path, ram, *budgets = sys.argv[1:]
prompts = [[i * 37 % 4000 for i in range(1, n)] for n in (5, 40, 90)]
tokens, found, over = [[], [], []], [], threading.Semaphore(0)
turn = threading.Semaphore(0)

def collector(i):
    def on_event(event):
        if event.kind == "token":
            tokens[i].append(event.token)
            if i == 0 and len(tokens[0]) % 4 == 0:
                turn.release()
        if event.last:
            tokens[i].append(str(event.error or event.finish_reason))
            over.release()
    return on_event

options = {"ram": ram} if ram else {}
with LocalModel(path, ctx=256, deterministic=True, backends=["llamacpp"], **options) as llm:
    greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        llm.submit(GenerateRequest(greedy, tokens=tuple(prompt)), collector(i))
    for budget in budgets:
        turn.acquire()
        bill = llm.set_ram(budget).memory
        streamed = llm.call(lambda loaded: loaded.model.streaming().streamed_bytes)
        found.append((kernel_figures().total, streamed, dict(bill)))
    for _ in prompts:
        over.acquire()
    refused = ""
    if ram:
        try:
            llm.set_ram("20MiB")
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
    bill = dict(llm.plan.memory)
    print(json.dumps({"tokens": tokens, "found": found, "refused": refused, "bill": bill}))
"""


def answers(model: Path, ram: str, *budgets: str) -> dict[str, Any]:
    command = [sys.executable, "-c", ANSWERS, str(model), ram, *budgets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def resident(tall: Path) -> dict[str, Any]:
    """The answers with all weights in memory, and what that takes."""
    return answers(tall, "")


Budget = Callable[[float], int]


@pytest.fixture(scope="module")
def budget(resident: dict[str, Any]) -> Budget:
    """Whole MiB in bytes, for a process that holds so much less or more."""
    bill = resident["bill"]
    whole = sum(bill.get(part, 0) for part in PARTS)
    return lambda part: int(whole + part * bill["weights"]) >> 20 << 20


def test_the_budget_changes_in_the_middle_of_answers_and_no_token_does(
    tall: Path, resident: dict[str, Any], budget: Budget
) -> None:
    assert [len(text) for text in resident["tokens"]] == [33] * 3
    changing = answers(tall, *(f"{budget(part) >> 20}MiB" for part in (MIDDLE, *CHANGES)))
    assert changing["tokens"] == resident["tokens"]
    assert len(changing["found"]) == len(CHANGES)
    for part, (held, streamed, bill) in zip(CHANGES, changing["found"], strict=True):
        assert held <= budget(part)
        assert (streamed > 0) == (part != LARGE)
        assert bill["limit"] == budget(part)
        assert bill["left"] >= 0
    assert changing["refused"].startswith("BudgetError: --ram 20 MiB is too little")


async def test_a_worker_s_budget_is_for_the_front_end_too(tall: Path, budget: Budget) -> None:
    limit, front, helpers = budget(MIDDLE), 32 << 20, list[int]()
    for part in (0, front):
        options = {"model": str(tall), "ctx": 256, "ram": limit + part, "backends": ["llamacpp"]}
        client = WorkerClient(Settings.resolve(environ={}, **options), front=part)
        try:
            helpers.append((await client.ask(SetRam(limit + part)))["helper processes"])
        finally:
            await client.close()
    assert abs(helpers[1] - helpers[0] - front) < 8 << 20
    client = WorkerClient(Settings.resolve(environ={}, **options), front=limit)
    try:
        with pytest.raises(BudgetError):
            await client.info()
    finally:
        await client.close()


async def test_a_worker_s_budget_changes_and_holds_for_the_next_one(tall: Path, budget: Budget) -> None:
    small, middle_ram = budget(SMALL), budget(MIDDLE)
    options = {"model": str(tall), "ctx": 256, "ram": middle_ram, "backends": ["llamacpp"]}
    settings = Settings.resolve(environ={}, deterministic=True, **options)
    client = WorkerClient(settings, patience=Patience(look=0.1), front=0)  # pytest is large
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)

    async def text() -> str:
        request = GenerateRequest(params, tokens=(1, 2, 3), whole=True)
        events = [event async for event in client.stream(request)]
        assert events[-1].kind == "done", events[-1].error
        return "".join(event.text for event in events)

    async def until_budget(nbytes: int) -> int:
        """What is read for each pass, once the worker says that it has this budget."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := client.health.streaming) or found.budget != nbytes:
                await asyncio.sleep(0.01)
        return found.streamed_bytes

    try:
        first = await text()
        middle = await until_budget(middle_ram)
        running = asyncio.create_task(text())
        bill = await client.ask(SetRam(small))
        assert bill["limit"] == small
        assert await running == first
        assert await until_budget(small) > middle > 0
        with pytest.raises(BudgetError):
            await client.ask(SetRam(20 << 20))
        os.kill(client.pid, signal.SIGKILL)
        assert await text() == first
        assert await until_budget(small) > middle
    finally:
        await client.close()
