"""The budget goes down and up in the middle of answers: every token is the one that it would have been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetrun.client import WorkerClient
from hetrun.config import Settings
from hetrun.errors import BudgetError
from hetrun.events import GenerateRequest
from hetrun.params import SamplingParams
from hetrun.questions import SetRam
from hetrun.wire import Patience
from tests.tools import make_model

pytestmark = pytest.mark.slow

# 340 MB of weights; a process needs some 220 MiB besides.
SHAPE = make_model.Shape(
    "tall", embd=1024, layers=40, ffn=4096, heads=16, kv_heads=4, head_dim=64, vocab=4096
)
SMALL, MIDDLE, LARGE = 300, 380, 700  # MiB; all weights fit into the last
PATIENCE_S = 60.0
BUDGETS = (SMALL, LARGE, MIDDLE, SMALL, LARGE, SMALL)

# Three answers together; behind every fourth token of the first one comes another budget. In a process of its
# own: a test's has in memory whatever was imported before.
ANSWERS = """
import json, sys, threading
from hetrun import LLM, SamplingParams
from hetrun.books import kernel_figures
from hetrun.events import GenerateRequest

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
with LLM(path, ctx=256, deterministic=True, backends=["llamacpp"], **options) as llm:
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
    print(json.dumps({"tokens": tokens, "found": found, "refused": refused}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tall-q4_0.gguf"
    make_model.write_model(path, SHAPE, "Q4_0", 0)
    return path


def answers(model: Path, ram: str, *budgets: str) -> dict[str, Any]:
    command = [sys.executable, "-c", ANSWERS, str(model), ram, *budgets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_budget_changes_in_the_middle_of_answers_and_no_token_does(model: Path) -> None:
    resident = answers(model, "")
    assert [len(text) for text in resident["tokens"]] == [33] * 3
    changing = answers(model, f"{MIDDLE}MiB", *(f"{budget}MiB" for budget in BUDGETS))
    assert changing["tokens"] == resident["tokens"]
    assert len(changing["found"]) == len(BUDGETS)
    for budget, (held, streamed, bill) in zip(BUDGETS, changing["found"], strict=True):
        assert held <= budget << 20
        assert (streamed > 0) == (budget != LARGE)
        assert bill["limit"] == budget << 20
        assert bill["left"] >= 0
    assert changing["refused"].startswith("BudgetError: --ram 20 MiB is too little")


async def test_a_worker_s_budget_changes_and_holds_for_the_next_one(model: Path) -> None:
    options = {"model": str(model), "ctx": 256, "ram": f"{MIDDLE}MiB", "backends": ["llamacpp"]}
    settings = Settings.resolve(environ={}, deterministic=True, **options)
    client = WorkerClient(settings, patience=Patience(look=0.1))
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
        middle = await until_budget(MIDDLE << 20)
        running = asyncio.create_task(text())
        bill = await client.ask(SetRam(SMALL << 20))
        assert bill["limit"] == SMALL << 20
        assert await running == first
        assert await until_budget(SMALL << 20) > middle > 0
        with pytest.raises(BudgetError):
            await client.ask(SetRam(20 << 20))
        os.kill(client.pid, signal.SIGKILL)
        assert await text() == first
        assert await until_budget(SMALL << 20) > middle
    finally:
        await client.close()
