"""An hour of traffic in a control group: what the server and its workers hold must stay level.

One soak has all sorts of clients at one model, another opens and closes four models in turn. What each
process has of its own, its descriptors and its threads are looked at all the time; after the warm-up a line
through the means of equal stretches says how much they grow in an hour, and how far that is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hetrun.system.subprocesses import python
from hetrun.tools.bench.serving.http_load import CHAT, ConnectionLost, RequestRefused, ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess, tree
from tests.memory.group import MemoryGroup, limited
from tests.tools.soak import under_traffic

WARM = 0.25  # of the time, before growth counts
STRETCHES = 24  # of equal length, of which each gives one mean
SPREADS = 3.0  # standard errors within which a slope may be zero
LEVEL_MIB = (
    0.5  # between the ends, below which memory is level: an arena of the C library may grow by so much
)
LOOK_S = 0.5
ANSWER_TOKENS = 4
PATIENCE_S = 600.0  # a model is opened within, on a machine that is busy with other things


@dataclass(frozen=True, slots=True)
class Holding:
    """What one or several processes hold: bytes of their own, descriptors, threads."""

    own: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class SoakLook:
    """What the server's front, its other processes, and the group hold at a time."""

    at: float
    front: Holding
    others: Holding
    fixed: int  # bytes of the group that the kernel cannot take back


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth of something in an hour, and three standard errors of it."""

    what: str
    first: float
    last: float
    per_hour: float
    spread: float
    level: float  # between first and last

    @property
    def is_flat(self) -> bool:
        """Zero is within the spread, or the ends are as good as level."""
        return self.per_hour <= self.spread or self.last - self.first <= self.level

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.first:.2f} to {self.last:.2f}, {self.per_hour:+.2f} an hour "
            f"(within {self.spread:.2f})"
        )


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What came of one soak."""

    name: str
    minutes: float
    requests: int
    openings: int
    budget: int
    peak: int
    fixed: int
    failures: int
    kills: int
    load: float
    slopes: tuple[Slope, ...]
    faults: list[str]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def holding(pids: Sequence[int]) -> Holding:
    """Of all of them together."""
    own = descriptors = threads = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        own += int(status.get("RssAnon", "0 kB").split()[0]) << 10  # one that has just ended has none
        threads += int(status["Threads"])
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return Holding(own, descriptors, threads)


def look_at(server: ServerProcess, group: MemoryGroup) -> SoakLook:
    front, *others = tree(server.pid)
    return SoakLook(time.monotonic(), holding([front]), holding(others), group.fixed)


def slope(what: str, looks: Sequence[tuple[float, float]], level: float, least: bool = False) -> Slope:
    """The line through the means of equal stretches (or through the least of each: what comes and goes with
    clients); its spread allows for neighbours that are alike."""
    warm = looks[0][0] + WARM * (looks[-1][0] - looks[0][0])
    kept = [look for look in looks if look[0] >= warm]
    parts = np.array_split(np.array(kept), min(STRETCHES, max(3, len(kept) // 4)))
    hours = np.array([part[:, 0].mean() for part in parts]) / 3600
    values = np.array([part[:, 1].min() if least else part[:, 1].mean() for part in parts])
    away = hours - hours.mean()
    per_hour = float((away * values).sum() / (away**2).sum())
    rest = values - values.mean() - per_hour * away
    alike = float((rest[1:] * rest[:-1]).sum() / max((rest**2).sum(), 1e-12))
    alike = min(max(alike, 0.0), 0.9)
    variance = (rest**2).sum() / max(len(values) - 2, 1) * (1 + alike) / (1 - alike)
    spread = SPREADS * float(np.sqrt(variance / (away**2).sum()))
    quarter = max(1, len(values) // 4)
    return Slope(what, values[:quarter].mean(), values[-quarter:].mean(), per_hour, spread, level)


def slopes(looks: Sequence[SoakLook], workers_stay: bool) -> tuple[Slope, ...]:
    """Of the front, and of the workers where they are the same ones all the time."""

    def line(what: str, value: Callable[[SoakLook], float], level: float, least: bool = False) -> Slope:
        return slope(what, [(look.at, value(look)) for look in looks], level, least)

    found = [
        line("server, own memory, MiB", lambda look: look.front.own / 2**20, LEVEL_MIB),
        line("server, descriptors", lambda look: look.front.descriptors, 0, least=True),
        line("server, threads", lambda look: look.front.threads, 0, least=True),
        # Of models in turn: what is left when fewest are loaded is what is still held for those gone.
        line("group, fixed memory, MiB", lambda look: look.fixed / 2**20, 4 * LEVEL_MIB, not workers_stay),
    ]
    if workers_stay:
        found += [
            line("worker, own memory, MiB", lambda look: look.others.own / 2**20, LEVEL_MIB),
            line("worker, descriptors", lambda look: look.others.descriptors, 0, least=True),
            line("worker, threads", lambda look: look.others.threads, 0, least=True),
        ]
    return tuple(found)


def serve_in(
    group: MemoryGroup, folder: Path, options: Sequence[str], env: Mapping[str, str]
) -> ServerProcess:
    """`hetrun serve` in the group, on a socket in the folder."""
    endpoint = ServerEndpoint(uds=folder / "hetrun.sock")
    words = python("from hetrun.cli import main; main()", "serve", "--uds", str(endpoint.uds), *options)
    return ServerProcess(group.command(words), endpoint, env={**os.environ, **env})


def soak_one(model: Path, budget: int, minutes: float, env: Mapping[str, str]) -> SoakReport:
    """All sorts of clients, good and bad, at one model."""
    looks: list[SoakLook] = []
    with limited(budget) as group, tempfile.TemporaryDirectory(prefix="hetrun-soak-") as folder:
        server = serve_in(group, Path(folder), ["-m", str(model), "--ram", str(budget)], env)
        try:
            told, _ = under_traffic(server, 60 * minutes, lambda: looks.append(look_at(server, group)))
        finally:
            server.close()
        faults = [f"surprise: {said}" for said in told.surprises]
        if told.server_errors:
            faults.append(f"{told.server_errors} answers with 5xx")
        requests = sum(sum(kinds.values()) for kinds in told.statuses.values())
        return _report("one model, all sorts of clients", looks, group, requests, 1, faults)


def soak_four(models: Sequence[Path], budget: int, minutes: float, env: Mapping[str, str]) -> SoakReport:
    """Four models of which two have room: each request opens one and closes another."""
    looks: list[SoakLook] = []
    options = [
        "--models",
        ",".join(map(str, models)),
        "--models-max",
        "2",
        "--ram",
        str(budget),
        "--temp",
        "0",
    ]
    with limited(budget) as group, tempfile.TemporaryDirectory(prefix="hetrun-soak-") as folder:
        server = serve_in(group, Path(folder), options, env)
        try:
            turns = Turns(server.endpoint, [path.stem for path in models])

            async def looked() -> None:
                while True:
                    with suppress(OSError):  # a process may end between two looks at it
                        looks.append(look_at(server, group))
                    await asyncio.sleep(LOOK_S)

            asyncio.run(turns.run(60 * minutes, looked()))
        finally:
            server.close()
        return _report(
            "four models in turn",
            looks,
            group,
            turns.requests,
            turns.openings,
            turns.faults,
            workers_stay=False,
        )


class Turns:
    """Requests for models in an order in which none that is asked for is loaded."""

    def __init__(self, endpoint: ServerEndpoint, names: Sequence[str]) -> None:
        self.requests = self.openings = 0
        self.faults: list[str] = []
        self._endpoint, self._names = endpoint, names
        self._said: dict[str, str] = {}  # by each model the first time
        self._rng = random.Random(1)

    async def run(self, seconds: float, beside: Coroutine[object, object, object]) -> None:
        """Until the time is over; `beside` runs meanwhile."""
        looking = asyncio.ensure_future(beside)
        end, recent = time.monotonic() + seconds, [""] * 2
        try:
            while time.monotonic() < end:
                name = self._rng.choice([name for name in self._names if name not in recent])
                recent = [recent[1], name]
                self.openings += 1
                # Several at once: those that come while a model is loaded wait for it.
                await asyncio.gather(*(self._ask(name) for _ in range(self._rng.choice((1, 2, 4)))))
                if looking.done():
                    looking.result()
        finally:
            looking.cancel()

    async def _ask(self, name: str) -> None:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": "time and water"}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        self.requests += 1
        connection = await self._endpoint.connect()
        try:
            posting = connection.post(json.dumps(body).encode(), lambda event, at: None, CHAT)
            answer = await asyncio.wait_for(posting, PATIENCE_S)
            said = json.loads(answer)["choices"][0]["message"]["content"]
            if said != self._said.setdefault(name, said):
                self.faults.append(f"{name} says {said!r}, not {self._said[name]!r}")
        except (ConnectionLost, RequestRefused, TimeoutError, OSError) as error:
            self.faults.append(f"{name}: {error!r}")
        finally:
            connection.leave()


def _report(
    name: str,
    looks: Sequence[SoakLook],
    group: MemoryGroup,
    requests: int,
    openings: int,
    faults: list[str],
    workers_stay: bool = True,
) -> SoakReport:
    lines = slopes(looks, workers_stay)
    faults = faults[:20] + [f"grows: {line}" for line in lines if not line.is_flat]
    if group.kills:
        faults.append(f"{group.kills} processes were killed for memory")
    return SoakReport(
        name,
        round((looks[-1].at - looks[0].at) / 60, 2),
        requests,
        openings,
        group.limit,
        group.peak,
        max(look.fixed for look in looks),
        group.failures,
        group.kills,
        round(os.getloadavg()[1], 2),
        lines,
        faults,
    )
