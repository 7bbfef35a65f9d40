"""A fork of the process that opened the model: every method says so, and the parent goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.models.cases import GQA
from tests.support.rig import model_file

SCRIPT = """
import asyncio, json, multiprocessing, os, signal, sys, tempfile, threading, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
from hetrun import LLM, AsyncLLM

llm = LLM(sys.argv[1], backends=["reference"], planner="static")
before = llm.chat("hi", temperature=0, max_tokens=3).tokens  # its template's process runs now
waiting = AsyncLLM(sys.argv[1], backends=["reference"], planner="static")
asyncio.run(waiting.generate("a", max_tokens=1))

begun, goes_on = threading.Event(), threading.Event()
held = lambda part: begun.set() or goes_on.wait()
slow = AsyncLLM(sys.argv[1], backends=["reference"], planner="static", progress=held)
loader = threading.Thread(target=lambda: asyncio.run(slow.tokenize("a")))
loader.start()
begun.wait()

METHODS = {
    "generate": lambda: llm.generate("a"),
    "stream": lambda: list(llm.stream("a")),
    "chat": lambda: llm.chat("a"),
    "chat, streamed": lambda: list(llm.chat("a", stream=True)),
    "embed": lambda: llm.embed("a"),
    "render": lambda: llm.render("a"),
    "tokenize": lambda: llm.tokenize("a"),
    "detokenize": lambda: llm.detokenize([5]),
    "logits": lambda: llm.logits([5]),
    "plan": lambda: llm.plan,
    "stats": lambda: llm.stats,
    "memory": lambda: llm.memory,
    "set_ram": lambda: llm.set_ram("1GiB"),
    "save_prompts": lambda: llm.save_prompts("/nowhere"),
    "load_prompts": lambda: llm.load_prompts("/nowhere"),
    "with": llm.__enter__,
    "async": lambda: asyncio.run(waiting.generate("a")),
    "async, loading": lambda: asyncio.run(slow.generate("a")),
    "async, streamed": lambda: asyncio.run(anext(waiting.stream("a"))),
}

def said(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

def in_pool(text):
    return llm.generate(text)

with tempfile.TemporaryFile("w+") as told:
    if (child := os.fork()) == 0:
        signal.alarm(40)  # instead of hanging for ever
        json.dump({name: said(work) for name, work in METHODS.items()}, told)
        told.flush()
        llm.close()
        asyncio.run(waiting.close())
        asyncio.run(slow.close())
        sys.exit(0)  # with everything that Python does at the end
    status = os.waitpid(child, 0)[1]
    told.seek(0)
    answers = json.load(told)
with multiprocessing.get_context("fork").Pool(1) as pool:
    answers["pool"] = said(lambda: pool.map_async(in_pool, ["a"]).get(40))
after = llm.chat("hi", temperature=0, max_tokens=3).tokens
print(json.dumps({"status": status, "answers": answers, "same": before == after, "render": llm.render("a")}))
goes_on.set()
loader.join()
llm.close()
asyncio.run(waiting.close())
asyncio.run(slow.close())
"""


@pytest.fixture(scope="module")
def told() -> Any:  # noqa: ANN401
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_file(GQA))], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_method_says_that_the_model_is_elsewhere(told: Any) -> None:  # noqa: ANN401
    assert len(told["answers"]) == 20
    wrong = {
        name: answer
        for name, answer in told["answers"].items()
        if not answer.startswith("UserError: the model was opened in another process")
    }
    assert wrong == {}


def test_the_parent_goes_on(told: Any) -> None:  # noqa: ANN401
    assert told["status"] == 0
    assert told["same"]
    assert told["render"].startswith("<|im_start|>user\na")
