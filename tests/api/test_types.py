"""What a type checker says of programs that use `LLM`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.tiers import exhaustive

pytestmark = [pytest.mark.slow, exhaustive]  # a checker that has seen nothing yet reads all of hetrun

PROGRAM = """
import asyncio
from hetrun import LLM, AsyncLLM, ChatChunk, Completion

llm = LLM("model.gguf", ram="3GiB", ctx=4096, backends=["llamacpp"], kv_type="q8_0")
whole: Completion = llm.chat("hi", temperature=0, tools=[{"type": "function"}])
parts: list[ChatChunk] = list(llm.chat([whole.message], stream=True, top_k=5))
several: list[Completion] = llm.chat(["a", "b"], temperature=0)
several = llm.chat([[{"role": "user", "content": "a"}], [whole.message]])
llm.generate(["a", "b"], max_tokens=3, stop="END")
llm.generate([1, 2], max_tokens=3)

async def main() -> None:
    async with AsyncLLM("model.gguf", ram=3 << 30) as llm:
        whole: Completion = await llm.chat("hi", temperature=0)
        several: list[Completion] = await llm.chat(["a", "b"])
        parts: list[ChatChunk] = [part async for part in llm.chat("hi", stream=True)]

LLM(rma="3GiB")  # wrong: rma
LLM(port=80)  # wrong: port
LLM(ctx="many")  # wrong: ctx
LLM(kv_type="q4")  # wrong: kv_type
AsyncLLM(rma="3GiB")  # wrong: rma
llm.chat("hi", temperatur=0)  # wrong: temperatur
llm.generate("hi", top_k="many")  # wrong: top_k
llm.chat("hi", stream=True).text  # wrong: text
llm.chat(["a", "b"]).text  # wrong: text
"""


def test_mistakes_in_keywords_are_errors_of_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = (sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program))
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[int, str] = {}
    for match in re.finditer(r"program\.py:(\d+): error: (.*)", run.stdout):
        found[int(match[1])] = f"{found.get(int(match[1]), '')} {match[2]}"
    lines = enumerate(PROGRAM.splitlines(), start=1)
    wrong = {number: line.rpartition(" ")[2] for number, line in lines if "# wrong: " in line}
    assert set(found) == set(wrong), run.stdout + run.stderr
    assert all(f'"{name}"' in found[number] for number, name in wrong.items())
