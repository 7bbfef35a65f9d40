"""A server whose worker is killed again and again:

    python -m tests.tools.kill_test [--seconds 120] [-- OPTIONS]

Runs `hetrun serve` on a socket of its own, asks it from several clients, streamed and whole, and kills the
worker with SIGKILL and SIGABRT in turn. Every request must end, the server itself must answer throughout, and
nothing may be left behind. With --deterministic every complete answer is compared with what an undisturbed
server said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

CHAT = "/v1/chat/completions"
QUESTIONS = 16
PATIENCE_S = 120.0  # a request that takes longer has no end
SUBJECTS = ("rivers", "bread", "the moon", "clocks", "bees", "glass", "maps", "salt")


@dataclass
class Tally:
    """What happened."""

    ends: Counter[str] = field(default_factory=Counter)
    deaths: list[int] = field(default_factory=list)  # the processes that were killed
    theirs: list[int] = field(default_factory=list)  # and their children
    back: list[float] = field(default_factory=list)  # seconds from each death until it was ready
    survived: int = 0  # complete answers that a death fell into
    longest: dict[str, float] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    reference: dict[int, str] = field(default_factory=dict)

    def took(self, what: str, seconds: float) -> None:
        self.longest[what] = max(self.longest.get(what, 0.0), seconds)


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]


def worker_of(server: int) -> int | None:
    """The process in which the server's engine runs."""
    for pid in children(server):
        try:
            if b"hetrun.client.worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except FileNotFoundError:  # it has just ended
            pass
    return None


def question(number: int, stream: bool) -> dict[str, object]:
    number %= QUESTIONS
    text = f"Write {20 + number % 5 * 20} words about {SUBJECTS[number % len(SUBJECTS)]}."
    tokens = 16 + number * 7 % 96
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }


async def ask(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, str]:
    """How a request ended, and the answer's text."""
    if not body["stream"]:
        response = await http.post(CHAT, json=body)
        if response.status_code == 200:
            return "complete", response.json()["choices"][0]["message"]["content"]
        return f"status {response.status_code}", ""
    text, end = "", "cut off without a word"
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}", ""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                end = "complete"
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    end = "an error in the stream"
                else:
                    text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
    return end, text


async def user(http: httpx.AsyncClient, first: int, tally: Tally, over: Callable[[], bool]) -> None:
    """Ask until it is over; every second user streams."""
    number = first
    while not over():
        body, began, deaths = question(number, first % 2 == 0), time.monotonic(), len(tally.deaths)
        try:
            end, text = await asyncio.wait_for(ask(http, body), PATIENCE_S)
        except (TimeoutError, httpx.HTTPError) as error:
            end, text = f"no end: {type(error).__name__}", ""
        if end == "complete":
            tally.survived += len(tally.deaths) > deaths
            if tally.reference.get(number % QUESTIONS, text) != text:
                end = "another answer than without disturbance"
        tally.ends[end] += 1
        tally.took("request", time.monotonic() - began)
        number += 7


async def watch(http: httpx.AsyncClient, tally: Tally, over: Callable[[], bool]) -> None:
    """The server itself must answer at any time."""
    while not over():
        for path in ("/health", "/v1/models"):
            began = time.monotonic()
            try:
                response = await http.get(path, timeout=PATIENCE_S)
                said = response.json().get("status", "") if path == "/health" else ""
                tally.statuses[f"{path} {response.status_code} {said}".strip()] += 1
            except httpx.HTTPError as error:
                tally.statuses[f"{path} no answer: {type(error).__name__}"] += 1
            tally.took(path, time.monotonic() - began)
        await asyncio.sleep(0.1)


async def healthy(http: httpx.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it does not listen yet
        await asyncio.sleep(0.02)
    raise SystemExit(f"the server ended with {server.returncode}")


async def kill(
    http: httpx.AsyncClient,
    server: subprocess.Popen[bytes],
    every: float,
    tally: Tally,
    over: Callable[[], bool],
) -> None:
    began = time.monotonic()
    while not over():
        await asyncio.sleep(max(began + every - time.monotonic(), 0.1))
        if (pid := worker_of(server.pid)) is None:
            continue  # it waits before it begins the next one
        number = signal.SIGABRT if len(tally.deaths) % 2 else signal.SIGKILL
        tally.deaths.append(pid)
        tally.theirs += children(pid)
        began = time.monotonic()
        os.kill(pid, number)
        while worker_of(server.pid) in (None, pid):
            await asyncio.sleep(0.01)
        await healthy(http, server)
        tally.back.append(time.monotonic() - began)


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        uds = str(Path(folder) / "socket")
        command = [sys.executable, "-m", "hetrun", "serve", "--uds", uds, *options.serve]
        server = subprocess.Popen(command)
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=httpx.Limits(max_connections=None))
        tally = Tally()
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as http:
            await healthy(http, server)
            if "--deterministic" in options.serve:
                for number in range(QUESTIONS):
                    tally.reference[number] = (await ask(http, question(number, False)))[1]
            end: float = time.monotonic() + options.seconds

            def over() -> bool:
                return time.monotonic() > end

            users = [user(http, number, tally, over) for number in range(options.clients)]
            await asyncio.gather(
                *users, watch(http, tally, over), kill(http, server, options.every, tally, over)
            )
        last = worker_of(server.pid)
        server.terminate()
        server.wait(20)
    left = [pid for pid in (*tally.deaths, *tally.theirs, last) if pid and Path(f"/proc/{pid}").exists()]
    return report(tally, left)


def report(tally: Tally, left: list[int]) -> int:
    """Say what happened; the exit code."""
    print(f"deaths: {len(tally.deaths)}; ready again after {', '.join(f'{s:.1f}' for s in tally.back)} s")
    print(f"requests: {tally.ends.total()}, of them {dict(tally.ends)}")
    print(f"complete although a worker died meanwhile: {tally.survived}")
    print(f"longest: {', '.join(f'{what} {s:.2f} s' for what, s in tally.longest.items())}")
    print(f"the server itself: {dict(tally.statuses)}")
    bad = [end for end in tally.ends if end.startswith(("no end", "cut off", "another"))]
    bad += [status for status in tally.statuses if "no answer" in status]
    bad += [f"process {pid} is left" for pid in left]
    print(f"NOT PASSED: {bad}" if bad else "passed")
    return bool(bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=5, help="seconds between two deaths")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("serve", nargs="*", help="options of hetrun serve")
    sys.exit(asyncio.run(run(parser.parse_args())))
