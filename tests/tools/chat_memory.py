"""What the engine of a chat holds in memory, turn by turn: `python -m tests.tools.chat_memory`.

A conversation as people have it, with prompts of some sentences and pauses between them, goes through the
client of the chat in the terminal to an engine in a process of its own (`--way chat`), or to an `LLM` in a
program (`eager`, `lazy`). After every turn the kernel's count of that process is set against its books, and
in the end against `hetrun plan`; what the kernel counts is named part by part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import GenerateRequest, Message
from hetrun.client.queries import StateQuery
from hetrun.client.sampling_params import SamplingParams
from hetrun.client.worker_main import CHAT
from hetrun.config import Settings
from hetrun.memory import breakdown

MIB = 1 << 20
PAUSE_S = 4.0  # before the next prompt: longer than the engine waits before it rests
ANSWERS = (60, 90, 120)  # tokens, in turn
PROMPTS = (
    "I have three days in Lisbon in late October, I like old trams, tiles and quiet places with a view. "
    "Which two neighbourhoods would you look for a room in, and why those?",
    "That sounds good. Take the first of them: what would a slow morning there look like, with breakfast, "
    "one museum and a walk that is not too steep for someone with a bad knee?",
    "My sister joins me on the second day and she does not eat fish. Name some dishes of the country that "
    "she could order anywhere, with a sentence on each of them.",
    "How do I get from the airport into town with a large suitcase after eleven in the evening? I would "
    "rather not change twice, and I do not mind paying a little more.",
    "Write a short and friendly message to the owner of the room, to say that we come late, and ask where "
    "we can leave the luggage on the last day until the train goes.",
    "It may rain. What are good plans for a wet afternoon that do not take us to a shopping centre, and "
    "which of them should be booked before we come?",
    "Explain to me in simple words why a lot of houses there have tiles on their fronts, where the habit "
    "came from, and whether it is more than decoration.",
    "Let us say that we spend about ninety euros a day for both of us, without the room. Is that enough, "
    "and what would you leave out first if it turned out not to be?",
    "Please list what I should pack in a small rucksack for the day at the sea, when mornings are cool, "
    "noon is warm, and the wind can be strong in the afternoon.",
    "Thank you. Sum up everything we have planned so far in a list by days, in as few words as you can, "
    "so that I can print it and put it into my pocket.",
)
# Which library a mapped file belongs to; the first that fits.
FILES = (
    ("keys and values", "memfd:"),
    ("torch", "/torch/"),
    ("ggml and llama.cpp", "ggml|libllama|llama_cpp|libmtmd"),
    ("own libraries", r"hetrun"),
    ("numpy", "numpy|openblas|gfortran|quadmath"),
    ("interpreter", r"/bin/python|libpython|lib-dynload|_cffi|\.cpython"),
    ("C libraries", r"\.so"),
)
IN_A_PROGRAM = """
import json, sys
from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.completion import completion
from hetrun.client.events import GenerateRequest
from hetrun.client.queries import StateQuery
options = json.loads(sys.argv[1])
with LocalModel(**options) as llm:
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        if line.strip() == "state":
            state = llm.ask(StateQuery())
            said = {"memory": dict(state.memory), "in_use": dict(state.in_use), "used": state.used}
            said["reason"] = state.reason
        else:
            wish = json.loads(line)
            params = SamplingParams(max_tokens=wish["n"], temperature=0, ignore_eos=True)
            asked = GenerateRequest(params, messages=tuple(wish["messages"]))
            said = {"text": completion(llm.collect([asked])[0]).text}
        print(json.dumps(said), flush=True)
"""


class Chat(Protocol):
    """A chat that answers, in a process that can be looked at."""

    @property
    def pid(self) -> int: ...

    def say(self, messages: Sequence[Message], n: int) -> str: ...

    def state(self) -> Mapping[str, Any]:
        """`memory` by plan, `in_use` by the books, `used` by the panel, `reason` of the plan."""
        ...


class InWorker:
    """The engine as the chat in the terminal has it."""

    def __init__(self, client: WorkerClient, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    @property
    def pid(self) -> int:
        return self._client.pid

    def say(self, messages: Sequence[Message], n: int) -> str:
        params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        return self._runner.run(self._said(GenerateRequest(params, messages=tuple(messages), linger_s=0.016)))

    async def _said(self, request: GenerateRequest) -> str:
        parts = []
        async for event in self._client.stream(request):
            if event.error:
                raise event.error
            parts.append(event.text)
        return "".join(parts)

    def state(self) -> Mapping[str, Any]:
        state = self._runner.run(self._client.ask(StateQuery()))
        return {
            "memory": dict(state.memory),
            "in_use": dict(state.in_use),
            "used": state.used,
            "reason": state.reason,
        }


class InProgram:
    """An `LLM` in a program that does nothing else."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        command = [sys.executable, "-c", IN_A_PROGRAM, json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, messages: Sequence[Message], n: int) -> str:
        return str(self._ask(json.dumps({"messages": list(messages), "n": n}))["text"])

    def state(self) -> Mapping[str, Any]:
        return self._ask("state")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, line: str) -> Mapping[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout
        said: Mapping[str, Any] = json.loads(self._process.stdout.readline())
        return said


@contextmanager
def opened(way: str, options: Mapping[str, Any]) -> Iterator[Chat]:
    """A chat that is opened in this way."""
    if way != "chat":
        program = InProgram(dict(options) | {"eager": way == "eager"})
        try:
            yield program
        finally:
            program.close()
        return
    with asyncio.Runner() as runner:
        settings = Settings.resolve(environ=None, **options)
        client = WorkerClient(settings, engine=CHAT)
        try:
            runner.run(client.info())
            yield InWorker(client, runner)
        finally:
            runner.run(client.close())


def counted(pid: int) -> dict[str, int]:
    """What the kernel counts of a process, in bytes."""
    process = Path(f"/proc/{pid}")
    found = _figures((process / "status").read_text()) | _figures((process / "smaps_rollup").read_text())
    names = {
        "rss": "VmRSS",
        "pss": "Pss",
        "anonymous": "RssAnon",
        "file": "RssFile",
        "shared": "RssShmem",
        "peak": "VmHWM",
    }
    return {name: found[word] for name, word in names.items()}


def _figures(text: str) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(number) << 10 for name, number in found}


def parts_of(pid: int) -> dict[str, int]:
    """The same by what it is: files by their library, anonymous memory by its kind of mapping."""
    parts: Counter[str] = Counter()
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if begins := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line):
            path = begins[1]
            name = next((what for what, words in FILES if re.search(words, path)), path or "mapped")
            mapped = path.startswith("/")
        elif rss := re.match(r"(Rss|Anonymous): +(\d+) kB", line):
            size = int(rss[2]) << 10
            if rss[1] == "Rss":
                parts[name] += size
            elif mapped:  # written pages of a file are the process's own
                parts[name] -= size
                parts[f"{name}, written"] += size
    return {what: size for what, size in parts.most_common() if size}


def planned(options: Mapping[str, Any]) -> dict[str, int]:
    """What `hetrun plan` says, in a process of its own."""
    backends = [word for name in options.get("backends", ()) for word in ("--backend", name)]
    command = [sys.executable, "-m", "hetrun", "plan", "--json", *backends]
    command += ["-m", options["model"]] if "model" in options else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout)["memory"]
    return found


def held(bill: Mapping[str, int]) -> int:
    """What a bill says lies in the engine's process, without what keys and values may come to."""
    besides = (*breakdown.LAST, breakdown.LIMIT, breakdown.LEFT, breakdown.KV_ONE, breakdown.KV_ALL)
    return sum(size for name, size in bill.items() if name not in besides)


def conversation(chat: Chat, turns: int, pause_s: float) -> list[dict[str, Any]]:
    """What was counted and what was booked before the first turn, and when each was over for a while."""
    messages: list[Message] = []
    rows = [_look(chat, 0, pause_s)]
    for turn in range(turns):
        messages.append({"role": "user", "content": PROMPTS[turn % len(PROMPTS)]})
        said = chat.say(messages, ANSWERS[turn % len(ANSWERS)])
        messages.append({"role": "assistant", "content": said})
        at_once = counted(chat.pid)["rss"]
        rows.append(_look(chat, turn + 1, pause_s) | {"at once": at_once})
    return rows


def _look(chat: Chat, turn: int, pause_s: float) -> dict[str, Any]:
    time.sleep(pause_s)
    state = chat.state()
    return {"turn": turn, **counted(chat.pid), "books": held(state["in_use"]), "panel": state["used"]}


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{'turn':<5}" + "".join(f"{name:>11}" for name in TOLD)
    for row in found["turns"]:
        yield f"{row['turn']:<5}" + "".join(f"{row.get(name, 0) / MIB:>11.1f}" for name in TOLD)
    for title in ("parts", "in_use", "memory", "plan"):
        yield ""
        yield f"{title}:"
        for name, size in found[title].items():
            if size >= MIB / 2:
                yield f"  {name:<40} {size / MIB:>9.1f}"
    yield f"torch was loaded: {'yes' if found['torch'] else 'no'}"
    yield f"plan: {found['reason']}"


TOLD = ("rss", "pss", "anonymous", "file", "shared", "peak", "at once", "books", "panel", "plan")


def measured(way: str, options: Mapping[str, Any], turns: int, pause_s: float) -> dict[str, Any]:
    """All of it."""
    with opened(way, options) as chat:
        rows = conversation(chat, turns, pause_s)
        state, parts = chat.state(), parts_of(chat.pid)
    plan = planned(options)
    for row in rows:  # a plan bills what keys and values may take at most
        row["plan"] = held(plan) + row["shared"]
    return {
        "way": way,
        "options": dict(options),
        "turns": rows,
        "parts": parts,
        "in_use": state["in_use"],
        "memory": state["memory"],
        "plan": plan,
        "torch": "torch" in parts,
        "reason": state["reason"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", help="default: the model of the chat")
    parser.add_argument("--way", choices=("chat", "eager", "lazy"), default="chat")
    parser.add_argument("--backend", action="append", default=[], help="use only this one; may be repeated")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds after each turn")
    parser.add_argument("--json", action="store_true", help="bytes, in JSON")
    args = parser.parse_args()
    options: dict[str, Any] = {"backends": args.backend} if args.backend else {}
    options |= {"model": args.model} if args.model else {}
    found = measured(args.way, options, args.turns, args.pause)
    print(json.dumps(found, indent=1) if args.json else "\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
