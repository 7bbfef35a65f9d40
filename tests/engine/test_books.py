"""The books of a model that runs, held against what the kernel counts: within 5 %, kind by kind.

What was booked since the books were last brought in line with the kernel is what these tests look at. Work
that is done for the first time takes memory that no book foresees: until the next look at them the reserve is
for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hetrun.memory.breakdown import HELPERS, INTERPRETER, KV, LIBRARIES, WEIGHTS, WORK, total
from hetrun.memory.ledger import RESERVE
from tests.support.tiers import exhaustive
from tests.tools.make_model import smollm2_file

MIB = 1 << 20
PARTS = (INTERPRETER, LIBRARIES, WEIGHTS, WORK)

# In a process of its own: a test's has in memory whatever was imported before.
RUN = """
import json, sys
from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.executor.loading import resident_budget as inmemory
from hetrun.memory.ledger import KINDS, kernel_figures
from hetrun.prefetch import streamed_weights as fromdisk

path, backend, tokens, *budgets = sys.argv[1:]
options = {"ram": budgets[0]} if budgets else {}
found = {}
# Time stands still but for `look`: it is not this machine's speed that says when books are brought in line.
now = [1000.0]
inmemory.perf_counter = fromdisk.perf_counter = lambda: now[0]
# No guesses: how many tokens they are goes by how long steps took, and each number is another graph.
fixed = {"planner": "static", "spec": "off", "ctx": 1024, "threads": 1}
with LocalModel(path, backends=[backend], **fixed, **options) as llm:
    def compare(when):
        def look(loaded):
            books, figures = loaded.model.books, kernel_figures()
            found[when] = {kind: (books.booked(kind=kind), figures.of(kind)) for kind in KINDS}
            others = books.booked("reserve") + books.booked("helper processes")
            found[when]["anonymous"] = found[when]["anonymous"][0] - others, figures.anonymous
            found[when]["bill"] = books.bill(), loaded.model.kv.held_bytes
        llm.call(look)

    def answer(n, tokens=8):
        prompts = [[7 + i] * 40 for i in range(n)]
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))

    def look():
        now[0] += max(inmemory.LOOK_S, fromdisk.LOOK_S)
        llm.call(lambda loaded: loaded.model.tend())

    answer(1)
    look()
    answer(1, 2 * int(tokens))
    compare("after an answer")
    for budget in budgets[1:]:
        llm.set_ram(budget)
        compare(f"with {budget}")
        answer(1)
    answer(6, int(tokens))
    compare("the first time beside others")
    look()
    answer(6, int(tokens))
    compare("beside others")
print(json.dumps(found))
"""


# A chat of ten turns, as the engine of the terminal's chat has it; what it holds when it rests.
CHAT = """
import json, sys
from hetrun import SamplingParams
from hetrun.api.local_model import for_conversations
from hetrun.client.completion import completion
from hetrun.client.events import GenerateRequest
from hetrun.client.queries import StateQuery
from hetrun.memory.ledger import kernel_figures
from tests.tools.chat_memory import PROMPTS

llm, messages, found = for_conversations(backends=("llamacpp",), threads=1), [], {}
try:
    for prompt in PROMPTS:
        messages.append({"role": "user", "content": prompt})
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        said = completion(llm.collect([GenerateRequest(params, messages=tuple(messages))])[0])
        messages.append({"role": "assistant", "content": said.text})
    found["busy"] = kernel_figures().anonymous
    llm.call(lambda loaded: loaded.model.rest())
    state, figures = llm.ask(StateQuery()), kernel_figures()
    found |= {"plan": dict(state.memory), "seen": dict(state.in_use), "panel": state.used}
    found |= {"counted": figures.total, "rested": figures.anonymous}
finally:
    llm.close()
print(json.dumps(found))
"""


def found(backend: str, tokens: int, *budgets: str) -> dict[str, Any]:
    """What was booked and what the kernel counted, with each budget in turn; answers of `tokens` tokens."""
    command = [sys.executable, "-c", RUN, str(smollm2_file()), backend, str(tokens), *budgets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    what: dict[str, Any] = json.loads(done.stdout)
    for when, kinds in what.items():
        # Of rows, what they may come to is booked before it is taken.
        bill, held = kinds["bill"]
        assert bill["KV"] >= held, when
        assert bill["left"] >= 0, when
    return what


def agree(what: dict[str, Any]) -> None:
    """The books say what the kernel counts."""
    for when, kinds in what.items():
        for kind in ("anonymous", "file-backed"):
            booked, counted = kinds[kind]
            off = RESERVE if when.startswith("the first time") else 0.05 * counted
            assert abs(booked - counted) <= off, f"{kind} memory {when}: {booked}, not {counted}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tokens"), [("llamacpp", 30), ("amx", 8), pytest.param("amx", 30, marks=exhaustive)]
)
def test_the_books_are_what_the_kernel_counts(backend: str, tokens: int) -> None:
    if backend == "amx":
        pytest.importorskip("torch")
    agree(found(backend, tokens))


@pytest.mark.slow
def test_pieces_are_booked_as_they_come_and_go() -> None:
    what = found("llamacpp", 30, "190MiB", "170MiB", "200MiB", "180MiB")
    agree(what)
    weights = [kinds["bill"][0]["weights"] for when, kinds in what.items() if when.startswith("with")]
    assert weights[1] - weights[0] > 25 * MIB
    assert weights[1] - weights[2] > 15 * MIB


@pytest.mark.slow
def test_the_engine_of_a_chat_holds_what_is_said_of_it() -> None:
    """By plan, books and panel, within 5 % of the kernel's count, and no more than 300 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", CHAT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    what = json.loads(done.stdout)
    plan, seen, counted = what["plan"], what["seen"], what["counted"]
    assert counted < 300 * MIB
    assert abs(total(seen) - seen[HELPERS] - counted) < 0.05 * counted
    assert abs(what["panel"] - counted) < 0.05 * counted
    # Keys and values are planned as the most that they may take; and graphs of long passes, which have gone.
    planned = sum(plan[name] for name in PARTS) + seen[KV]
    given_back = what["busy"] - what["rested"]
    assert 4 * MIB < given_back < 40 * MIB
    assert 0.95 * counted < planned < 1.05 * (counted + given_back)
