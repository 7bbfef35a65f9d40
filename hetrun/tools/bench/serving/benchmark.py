"""A server as its users have it: real sockets, streamed answers, several clients at once.

The clients live in this process, which shares the machine with the server that it measures; what they took
of it is measured too. Only one of two servers has anything to do at a time.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Protocol

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.errors import HetrunError
from hetrun.tools.bench.interleave import PAUSE_S
from hetrun.tools.bench.memory_bandwidth import load_average
from hetrun.tools.bench.prompts import BenchPrompts, body
from hetrun.tools.bench.serving.cases import (
    FEW,
    LEAD,
    TAIL,
    ArrivalCase,
    LoadCase,
    PrefixCase,
    ServingCase,
    ServingOptions,
)
from hetrun.tools.bench.serving.http_load import ServerEndpoint, TimedAnswer, ask
from hetrun.tools.bench.serving.servers import (
    LlamaServer,
    ServerCapacity,
    ServerProcess,
    find_llama_server,
    hetrun_serve,
)

WARM = 16  # tokens of an answer while a server warms up
LOOK_S = 0.01  # how often running answers are looked at

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ServingSample:
    """One run of one case against one server: the number it is about, and what else was seen."""

    value: float
    spans: Mapping[str, tuple[float, ...]]  # seconds, by name
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServingSide:
    """Every run of a case against one server."""

    name: str
    samples: tuple[ServingSample, ...]
    threads: int | None = None  # that were given to it

    @property
    def value(self) -> float:
        """The median of what the case is about."""
        return median(s.value for s in self.samples)

    def spans(self, name: str) -> list[float]:
        """The seconds of this name, of all runs."""
        return [seconds for s in self.samples for seconds in s.spans.get(name, ())]

    def count(self, name: str) -> float:
        """The mean over the runs."""
        return sum(s.counts[name] for s in self.samples) / len(self.samples)


@dataclass(frozen=True, slots=True)
class ServingRow:
    """The result of one case."""

    model: str
    case: ServingCase
    ours: ServingSide
    theirs: ServingSide | None
    load: tuple[float, float]  # average at the start and at the end

    @property
    def ratio(self) -> float | None:
        """The median of what each pair of runs says: neighbours in time saw the same machine."""
        if self.theirs is None:
            return None
        return median(a.value / b.value for a, b in zip(self.ours.samples, self.theirs.samples, strict=True))


@dataclass(frozen=True, slots=True)
class ServingReport:
    """All rows, and who the peer was."""

    rows: tuple[ServingRow, ...]
    peer: LlamaServer | None


class Texts(Protocol):
    """Where messages come from."""

    def text(self, tokens: int, seed: object) -> str:
        """A message that makes a prompt of `tokens` tokens."""

    def more(self, words: int, seed: object) -> str:
        """Some words to go on with."""


class ServedProcess(Protocol):
    """A server that runs."""

    @property
    def endpoint(self) -> ServerEndpoint: ...

    def cpu_seconds(self) -> Mapping[str, float]: ...


class Contender(Protocol):
    """A server that takes its turns."""

    @property
    def name(self) -> str: ...

    def prepare(self, case: ServingCase, prompts: Texts) -> None:
        """Start what the case needs and warm it up; nothing of it counts."""

    def sample(self, case: ServingCase, prompts: Texts, seed: int) -> ServingSample: ...


def run(settings: Settings, options: ServingOptions, tell: Tell | None = None) -> ServingReport:
    """Measure everything that was asked for."""
    cases, start, path = options.cases(), load_average(), model_path(settings)
    peer = find_llama_server(options.vs, path) if options.vs else None
    done = 0
    with ExitStack() as stack:
        prompts = stack.enter_context(BenchPrompts(settings))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hetrun-bench-")))
        ours = HetrunServer(stack, hetrun_serve(settings, folder))
        theirs = LlamaServerSide(stack, peer, path, folder) if peer else None
        sides: list[Contender] = [ours] if theirs is None else [ours, theirs]
        rows = []
        for case in cases:
            for side in sides:
                side.prepare(case, prompts)
            samples: list[list[ServingSample]] = [[] for _ in sides]
            for n in range(options.rounds):
                order = list(enumerate(sides))
                for i, side in order if n % 2 == 0 else reversed(order):
                    sleep(PAUSE_S)
                    samples[i].append(side.sample(case, prompts, n + 1))
                    done += 1
                    if tell:
                        tell(done, len(cases) * options.rounds * len(sides), case.name)
            first = ServingSide(ours.name, tuple(samples[0]), settings.threads)
            second = ServingSide(theirs.name, tuple(samples[1]), theirs.threads) if theirs else None
            rows.append(ServingRow(path.stem, case, first, second, (start, load_average())))
    return ServingReport(tuple(rows), peer)


class HetrunServer:
    """`hetrun serve`: one server for every case, as it was configured."""

    name = "hetrun"

    def __init__(self, stack: ExitStack, server: ServerProcess) -> None:
        stack.callback(server.close)
        self._server = server

    def prepare(self, case: ServingCase, prompts: Texts) -> None:
        warm_up(self._server, case, prompts)

    def sample(self, case: ServingCase, prompts: Texts, seed: int) -> ServingSample:
        return measure(self._server, case, prompts, seed)


class LlamaServerSide:
    """llama.cpp's server, which is told at its start how many conversations it will have."""

    def __init__(self, stack: ExitStack, peer: LlamaServer, model: Path, folder: Path) -> None:
        stack.callback(self._close)
        self._peer, self._model, self._folder = peer, model, folder
        self._server: ServerProcess | None = None
        self._room: ServerCapacity | None = None
        self.threads = 0
        self.name = "llama-server"

    def prepare(self, case: ServingCase, prompts: Texts) -> None:
        """Start it with the number of threads that suits the case best: it shall not lose by a setting."""
        if case.room == self._room:
            warm_up(self._running(), case, prompts)
            return
        best: tuple[float, int] | None = None
        counts = thread_counts()
        for threads in counts:
            self._start(case.room, threads)
            warm_up(self._running(), case, prompts)
            if len(counts) > 1:
                seconds = warm_up(self._running(), case, prompts)
                best = min(best or (seconds, threads), (seconds, threads))
        if best and best[1] != self.threads:
            self._start(case.room, best[1])
            warm_up(self._running(), case, prompts)

    def sample(self, case: ServingCase, prompts: Texts, seed: int) -> ServingSample:
        return measure(self._running(), case, prompts, seed)

    def _running(self) -> ServerProcess:
        assert self._server is not None, "sampled before it was prepared"
        return self._server

    def _start(self, room: ServerCapacity, threads: int) -> None:
        self._close()
        self._server = self._peer.start(self._model, room, threads, self._folder)
        self._room, self.threads = room, threads

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._room = None


def thread_counts() -> list[int]:
    """What is worth trying: one thread, half of the cores, all of them."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, max(1, cores // 2), cores})


# --- runs


def warm_up(server: ServedProcess, case: ServingCase, prompts: Texts) -> float:
    """Short answers to as many clients as the case has; what they took."""
    size = case.prefix if isinstance(case, PrefixCase) else case.prompt
    bodies = [[body(prompts.text(size, ("warm", i)), WARM, i)] for i in range(case.clients)]
    begin = perf_counter()
    asyncio.run(_all_clients(server, bodies))
    seconds = perf_counter() - begin
    if isinstance(case, PrefixCase):  # short prompts behind long ones are something else again
        measure(server, case, prompts, 0)
    return seconds


def measure(server: ServedProcess, case: ServingCase, prompts: Texts, seed: int) -> ServingSample:
    """One run. Both sides get the same prompts, and no prompt comes twice: a server may know it by then."""
    match case:
        case LoadCase():
            return _load(server, case, prompts, seed)
        case PrefixCase():
            return asyncio.run(_prefix(server, case, prompts, seed))
        case ArrivalCase():
            return asyncio.run(_arrival(server, case, prompts, seed))


def _load(server: ServedProcess, case: LoadCase, prompts: Texts, seed: int) -> ServingSample:
    bodies = [
        [
            body(
                prompts.text(case.prompt, (case.name, seed, client, n)),
                case.answer,
                client * case.requests + n,
            )
            for n in range(case.requests)
        ]
        for client in range(case.clients)
    ]
    cpu, mine = server.cpu_seconds(), _own_cpu()
    begin = perf_counter()
    answers = asyncio.run(_all_clients(server, bodies))
    seconds = max(a.ended for a in answers) - begin
    taken = {name: s - cpu[name] for name, s in server.cpu_seconds().items()}
    for a in answers:
        if a.tokens != case.answer:
            raise HetrunError(
                f"an answer has {a.tokens} tokens instead of the {case.answer} that were asked for"
            )
    counts = {
        "prompt_tokens": sum(a.prompt_tokens for a in answers) / len(answers),
        "cached_tokens": sum(a.cached_tokens for a in answers) / len(answers),
        "clients_cpu": (_own_cpu() - mine) / seconds,
        "front_cpu": taken["front"] / seconds,
        "others_cpu": taken["others"] / seconds,
        "seconds": seconds,
    }
    spans = {"first": tuple(a.first for a in answers), "gaps": tuple(g for a in answers for g in a.gaps)}
    return ServingSample(sum(a.tokens for a in answers) / seconds, spans, counts)


async def _all_clients(server: ServedProcess, bodies: Sequence[Sequence[bytes]]) -> list[TimedAnswer]:
    clients = await asyncio.gather(*(_client(server.endpoint, own) for own in bodies))
    return [answer for answers in clients for answer in answers]


async def _client(endpoint: ServerEndpoint, bodies: Iterable[bytes]) -> list[TimedAnswer]:
    return [await ask(endpoint, request) for request in bodies]


async def _prefix(server: ServedProcess, case: PrefixCase, prompts: Texts, seed: int) -> ServingSample:
    shared = prompts.text(case.prefix, (case.name, seed, "shared"))
    bodies = [body(shared + prompts.more(TAIL, (case.name, seed, n)), FEW, n) for n in range(2)]
    first, second = await _client(server.endpoint, bodies)
    counts = {"prompt_tokens": float(second.prompt_tokens), "cached_tokens": float(second.cached_tokens)}
    spans = {"first request": (first.first,), "second request": (second.first,)}
    return ServingSample(first.first / second.first, spans, counts)


async def _arrival(server: ServedProcess, case: ArrivalCase, prompts: Texts, seed: int) -> ServingSample:
    """The newcomer alone; then answers run until each has had its quiet time, and another newcomer comes."""
    long = [body(prompts.text(case.arrival, (case.name, seed, "newcomer", n)), FEW, n) for n in range(2)]
    short = [prompts.text(case.prompt, (case.name, seed, "running", i)) for i in range(case.clients)]
    alone = await ask(server.endpoint, long[0])
    running = [TimedAnswer() for _ in short]
    tasks = [
        asyncio.create_task(ask(server.endpoint, body(text, case.answer, i), running[i]))
        for i, text in enumerate(short)
    ]
    try:
        await _until(tasks, lambda: all(len(a.arrivals) > LEAD + case.quiet for a in running))
        beside = TimedAnswer()
        coming = asyncio.create_task(ask(server.endpoint, long[1], beside))
        await _until([*tasks, coming], lambda: bool(beside.arrivals))
        # A gap that began while it came counts as a whole: its end is waited for.
        seen = [len(a.arrivals) for a in running]
        await _until(tasks, lambda: all(len(a.arrivals) > n for a, n in zip(running, seen, strict=True)))
        await coming
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _smoothness(alone, beside, running)


def _smoothness(alone: TimedAnswer, beside: TimedAnswer, running: Sequence[TimedAnswer]) -> ServingSample:
    """Time between the tokens of running answers before and while the newcomer's first token was awaited."""
    begun = max(a.arrivals[LEAD] for a in running)
    quiet: list[float] = []
    during: list[float] = []
    for a in running:
        for before, after in zip(a.arrivals, a.arrivals[1:], strict=False):
            if before >= begun and after <= beside.asked:
                quiet.append(after - before)
            elif after > beside.asked and before < beside.arrivals[0]:
                during.append(after - before)
    spans = {
        "quiet": tuple(quiet),
        "during": tuple(during),
        "newcomer alone": (alone.first,),
        "newcomer beside": (beside.first,),
    }
    return ServingSample(quotient(percentile(during, 99), percentile(quiet, 99)), spans, {})


async def _until(tasks: Sequence[asyncio.Task[TimedAnswer]], reached: Callable[[], bool]) -> None:
    """Wait for something that answers bring about; an answer that ends or fails before is an error."""
    while not reached():
        for task in tasks:
            if task.done():
                task.result()
                if not reached():
                    raise HetrunError(
                        "an answer ended before the arriving prompt had its first token; try a larger --ctx"
                    )
        await asyncio.sleep(LOOK_S)


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def quotient(above: float, below: float) -> float:
    """Of two times. Pieces that came together have no time between them: it counts as a microsecond."""
    return above / max(below, 1e-6)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that `percent` percent of all values do not exceed."""
    found = sorted(values)
    return found[max(0, math.ceil(len(found) * percent / 100) - 1)]
