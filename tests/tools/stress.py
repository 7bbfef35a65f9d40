"""Many requests at once against `hetrun serve --deterministic`: none lost, none mixed up, nothing kept.

    python -m tests.tools.stress                    2000 requests, 200 at once, a tiny model of random weights
    python -m tests.tools.stress -m MODEL --requests 400

Prompts of 1 to 600 tokens, short and long answers, streamed and whole, some of which begin alike; one client
in ten leaves midway. Every answer is compared with the one that its request gets alone, one by one, from a
model in this process. A client that leaves must have seen the beginning of it. In the end the server must
hold what it held after a first round: memory, descriptors, threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.completion import completion
from hetrun.client.events import GenerateRequest
from hetrun.config import Settings
from hetrun.engine.upkeep import REST_S
from hetrun.tools.bench.serving.http_load import ConnectionLost, RequestRefused, ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess, hetrun_serve, tree
from tests.tools import make_model

LONGEST = 600  # tokens of a prompt, nearly
WARM = 200  # requests before the server's memory, descriptors and threads are counted
BEGINNINGS = 5  # that some requests share
MAY_GROW = 32 << 20  # bytes, for what the caches of a longer run hold
PATIENCE_S = 30.0  # until the last of those who left is cancelled


@dataclass(frozen=True, slots=True)
class Wish:
    """A request, and how its client behaves."""

    text: str
    max_tokens: int
    temperature: float
    seed: int
    stream: bool
    leaves_after: float | None  # seconds; or, of a stream, pieces of text

    @property
    def body(self) -> bytes:
        """As it is sent."""
        request = {"messages": list(self.messages), "stream": self.stream, **self.sampling}
        if self.stream:
            request["stream_options"] = {"include_usage": True}
        return json.dumps(request).encode()

    @property
    def messages(self) -> tuple[dict[str, object], ...]:
        """The conversation."""
        return ({"role": "user", "content": self.text},)

    @property
    def sampling(self) -> dict[str, Any]:
        """The same for the server and for the reference."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, or as much of it as its client waited for."""

    text: str
    finish_reason: str | None = None
    tokens: int = 0
    left: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """What a server's processes hold."""

    memory: int
    own: int  # of it, what is neither files nor keys and values, which are shared with their own pages
    descriptors: int
    threads: int


@dataclass
class Outcome:
    """What came of all of it."""

    answers: int = 0
    left: int = 0  # clients that had not seen the end
    wrong: list[str] = field(default_factory=list)
    before: Held = Held(0, 0, 0, 0)
    after: Held = Held(0, 0, 0, 0)
    seconds: float = 0.0

    @property
    def complaints(self) -> list[str]:
        """What is not as it should be."""
        found = list(self.wrong)
        if self.after.memory > self.before.memory + MAY_GROW:
            found.append(f"memory grew from {self.before.memory >> 20} to {self.after.memory >> 20} MiB")
        for what in ("descriptors", "threads"):
            if getattr(self.after, what) > getattr(self.before, what):
                found.append(
                    f"{what}: {getattr(self.before, what)} before, {getattr(self.after, what)} after"
                )
        return found


def wishes(count: int, leaving: float, rng: random.Random) -> list[Wish]:
    """Mixed sizes: as many between 1 and 10 words as between 60 and 600."""
    words = ["time", "water", "and", "the", "of", "people", "small", "under", "house", "light", "seven", "is"]
    beginnings = [" ".join(rng.choices(words, k=LONGEST // 3)) for _ in range(BEGINNINGS)]

    def wish(n: int) -> Wish:
        text = " ".join(rng.choices(words, k=max(1, round(LONGEST ** rng.random()))))
        if rng.random() < 0.2:
            text = f"{rng.choice(beginnings)} {text}"[: 5 * LONGEST]
        stream, most = rng.random() < 0.5, rng.choice((1, 4, 16, 16, 32, 64))
        leaves = None
        if rng.random() < leaving:
            leaves = rng.randrange(most) if stream else rng.uniform(0, 3)
        return Wish(text, most, rng.choice((0.0, 0.9)), n, stream, leaves)

    return [wish(n) for n in range(count)]


def references(llm: LocalModel, asked: Sequence[Wish]) -> list[Said]:
    """Each request alone."""
    found = []
    for wish in asked:
        request = GenerateRequest(SamplingParams(**wish.sampling), messages=tuple(wish.messages))
        alone = completion(llm.collect([request])[0])
        found.append(Said(alone.text, alone.finish_reason, len(alone.tokens)))
    return found


class Left(Exception):
    """The client does not want more."""


async def answer(endpoint: ServerEndpoint, wish: Wish) -> Said:
    """What its client gets."""
    pieces: list[str] = []
    end: dict[str, Any] = {}

    def on_event(event: bytes, at: float) -> None:
        if event == b"data: [DONE]":
            end["done"] = True
            return
        chunk = json.loads(event.removeprefix(b"data: "))
        for choice in chunk["choices"]:
            pieces.append(choice["delta"].get("content", ""))
            end["finish_reason"] = choice["finish_reason"]
        end["usage"] = chunk.get("usage")
        if wish.leaves_after is not None and sum(map(bool, pieces)) > wish.leaves_after:
            connection.leave()

    connection = await endpoint.connect()
    try:
        asking = connection.post(wish.body, on_event)
        if wish.leaves_after is not None and not wish.stream:
            whole = await asyncio.wait_for(asking, wish.leaves_after)
        else:
            whole = await asking
    except (ConnectionLost, TimeoutError):
        if wish.leaves_after is None:
            raise
        return Said("".join(pieces), left=True)
    finally:
        connection.leave()
    if wish.stream:
        if not end.get("done"):
            raise ConnectionLost("a stream ended without [DONE]")
        return Said("".join(pieces), end["finish_reason"], end["usage"]["completion_tokens"])
    body = json.loads(whole)
    choice = body["choices"][0]
    return Said(choice["message"]["content"], choice["finish_reason"], body["usage"]["completion_tokens"])


async def ask_all(endpoint: ServerEndpoint, asked: Sequence[Wish], at_once: int) -> list[Said | Exception]:
    """The answers to all, `at_once` at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(wish: Wish) -> Said | Exception:
        async with places:
            try:
                return await answer(endpoint, wish)
            except (ConnectionLost, RequestRefused, OSError) as error:
                return error

    return await asyncio.gather(*map(one, asked))


def compare(asked: Sequence[Wish], got: Sequence[Said | Exception], alone: Sequence[Said]) -> Outcome:
    """Every answer with its own reference."""
    outcome = Outcome()
    for n, (wish, said, expected) in enumerate(zip(asked, got, alone, strict=True)):
        if isinstance(said, Exception):
            outcome.wrong.append(f"request {n}: {said!r}")
        elif said.left:
            outcome.left += 1
            # What is held back, because it may begin a stop string or half a character, is not sent.
            if not expected.text.startswith(said.text):
                outcome.wrong.append(f"request {n}, which left: {said.text!r} begins no {expected.text!r}")
        else:
            outcome.answers += 1
            if said != expected:
                outcome.wrong.append(f"request {n}, {wish.max_tokens} tokens: {said} instead of {expected}")
    return outcome


def held(server: ServerProcess) -> Held:
    """What the server's processes hold now."""
    memory = own = descriptors = threads = 0
    for pid in tree(server.pid):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory += int(status["VmRSS"].split()[0]) << 10
        own += int(status["RssAnon"].split()[0]) << 10
        threads += int(status["Threads"])
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return Held(memory, own, descriptors, threads)


def settled(server: ServerProcess, wanted: Held | None = None) -> Held:
    """What it holds when all who left are forgotten: descriptors are closed a moment after their clients."""
    until = time.monotonic() + PATIENCE_S
    time.sleep(REST_S + 1)  # what is not used goes back to the system
    last = held(server)
    while time.monotonic() < until:
        time.sleep(0.5)
        now = held(server)
        calm = now.descriptors == last.descriptors and now.threads == last.threads
        if calm and (wanted is None or now.descriptors <= wanted.descriptors):
            return now
        last = now
    return last


def run(settings: Settings, count: int, at_once: int, leaving: float, seed: int = 1) -> Outcome:
    """The whole of it, with a model and settings."""
    asked = wishes(count, leaving, random.Random(seed))
    warm = wishes(min(WARM, count), leaving, random.Random(seed + 1))
    with LocalModel.of(settings, chatting=True) as llm:
        alone = references(llm, asked)
    with tempfile.TemporaryDirectory(prefix="hetrun-stress-") as folder:
        server = hetrun_serve(settings, Path(folder))
        try:
            ask = partial(ask_all, server.endpoint, at_once=at_once)
            asyncio.run(ask(warm))
            before = settled(server)
            start = time.monotonic()
            got = asyncio.run(ask(asked))
            seconds = time.monotonic() - start
            after = settled(server, before)
        finally:
            server.close()
    outcome = compare(asked, got, alone)
    outcome.before, outcome.after, outcome.seconds = before, after, seconds
    return outcome


def settings_of(model: Path, at_once: int) -> Settings:
    """One numeric path, and room for everybody in the queue."""
    return Settings.resolve(model=str(model), deterministic=True, queue=at_once)


@contextmanager
def tiny_model() -> Iterator[Path]:
    """Small enough that thousands of answers take minutes."""
    with tempfile.TemporaryDirectory(prefix="hetrun-stress-") as folder:
        path = Path(folder) / "tiny.gguf"
        make_model.write_model(path, make_model.SHAPES["tiny"], "Q8_0", 0)
        yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", type=Path, help="default: a tiny one with random weights")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument(
        "--leaving", type=float, default=0.1, help="the part of the clients that leave midway"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tiny_model() if args.model is None else nullcontext(args.model) as model:
        outcome = run(settings_of(model, args.at_once), args.requests, args.at_once, args.leaving, args.seed)
    print(f"{outcome.answers} answers, {outcome.left} clients left midway, {outcome.seconds:.0f} s")
    for name, state in (("before", outcome.before), ("after", outcome.after)):
        memory = f"{state.memory >> 20} MiB"
        print(f"{name}: {memory}, {state.descriptors} descriptors, {state.threads} threads")
    for complaint in outcome.complaints[:20]:
        print(f"WRONG: {complaint}")
    print(f"{len(outcome.complaints)} complaints")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
