"""All sorts of clients at once against `hetrun serve`, for many minutes: nothing breaks, nothing grows.

    python -m tests.tools.soak --minutes 20               a tiny model of random weights
    python -m tests.tools.soak --minutes 20 -m MODEL

Good requests of every kind, bad ones, clients that leave, that send or read slowly, and now and then 200
requests at once. The traffic is one process, and who asks for /health another one; this one looks at what the
server's processes hold. The exit status says whether the bars hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hetrun.config import Settings
from hetrun.tools.bench.serving.http_load import ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess, hetrun_serve
from tests.tools.soak_traffic import FLOOD, MOST_S, Told, Traffic, probed
from tests.tools.stress import MAY_GROW, Held, held, tiny_model

LOOK_S = 2.0
HEALTH_S = 0.1  # the bar for the 99th percentile of /health while a flood is answered
OWN = 8  # MiB
WARM = 0.2  # of the time, before growth counts


@dataclass(frozen=True, slots=True)
class Look:
    """What the server's processes hold at a time."""

    at: float
    held: Held


@dataclass(frozen=True, slots=True)
class Growth:
    """From the first quarter behind the warm-up to the last: memory in the middle, the others at least."""

    what: str
    first: int
    last: int
    bar: int

    @property
    def holds(self) -> bool:
        """No more than may be."""
        return self.last - self.first <= self.bar


def growth(looks: Sequence[Look]) -> list[Growth]:
    """What grew; descriptors and threads come and go with clients, so their least number counts."""
    kept = looks[int(len(looks) * WARM) :]
    first, last = _ends(kept)
    # What may be kept (responses, tokens of prompts) is full behind ten minutes: then it has to stop.
    middle_on, end = _ends(looks[len(looks) // 2 :])

    def middle(part: Sequence[Look], what: str) -> int:
        return int(statistics.median(getattr(look.held, what) for look in part)) >> 20

    def least(part: Sequence[Look], what: str) -> int:
        return min(int(getattr(look.held, what)) for look in part)

    return [
        # Kept prompts come and go: how many there are at the time of a look is chance.
        Growth("memory, MiB", middle(first, "memory"), middle(last, "memory"), MAY_GROW >> 20),
        Growth(
            "of it neither files nor keys and values, in the second half",
            middle(middle_on, "own"),
            middle(end, "own"),
            OWN,
        ),
        Growth("descriptors", least(first, "descriptors"), least(last, "descriptors"), 0),
        Growth("threads", least(first, "threads"), least(last, "threads"), 0),
    ]


def _ends(looks: Sequence[Look]) -> tuple[Sequence[Look], Sequence[Look]]:
    """The first quarter and the last."""
    quarter = max(1, len(looks) // 4)
    return looks[:quarter], looks[-quarter:]


def minutes(looks: Sequence[Look], what: str) -> list[int]:
    """What the processes held in the middle of each minute."""
    by_minute: dict[int, list[int]] = {}
    for look in looks:
        by_minute.setdefault(int((look.at - looks[0].at) / 60), []).append(getattr(look.held, what))
    return [int(statistics.median(held)) >> 20 for held in by_minute.values()]


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ranked = sorted(times)
    if not ranked:
        return {"count": 0}
    at = {f"p{p}": round(1000 * ranked[min(len(ranked) - 1, len(ranked) * p // 100)], 1) for p in (50, 99)}
    return {"count": len(ranked), **at, "max": round(1000 * ranked[-1], 1)}


def summary(told: Told, probes: Sequence[tuple[float, float]], looks: Sequence[Look]) -> dict[str, object]:
    """Everything as JSON, with the bars that do not hold."""
    flooded = [s for at, s in probes if any(begin <= at <= end for begin, end in told.floods)]
    health, grown = percentiles(flooded), growth(looks)
    broken = [f"{one.what}: {one.first} to {one.last}" for one in grown if not one.holds]
    broken += [f"surprise: {said}" for said in told.surprises]
    if told.server_errors:
        broken.append(f"{told.server_errors} answers with 5xx")
    if not told.floods or not flooded:
        broken.append("/health was not asked for while a flood was answered")
    elif health["p99"] > 1000 * HEALTH_S:
        broken.append(f"/health took {health['p99']} ms (p99) while {FLOOD} requests were answered")
    return {
        "answers": told.statuses,
        "server_errors": told.server_errors,
        "floods_s": [round(end - begin, 1) for begin, end in told.floods],
        "health_ms_in_floods": health,
        "health_ms": percentiles([s for _, s in probes]),
        "growth": [asdict(one) for one in grown],
        "memory_each_minute_MiB": minutes(looks, "memory"),
        "own_each_minute_MiB": minutes(looks, "own"),
        "broken": broken,
    }


def helper(task: str, server: ServerProcess, seconds: float) -> subprocess.Popen[str]:
    """One of the two other processes, a little less urgent than the server."""
    command = [
        sys.executable,
        "-m",
        "tests.tools.soak",
        "--task",
        task,
        str(server.endpoint.uds),
        str(seconds),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(1))


def under_traffic(
    server: ServerProcess, seconds: float, look: Callable[[], None]
) -> tuple[Told, list[tuple[float, float]]]:
    """All clients for so long, while `look` is called; what they have to say, and how long /health took."""
    helpers = [helper(task, server, seconds) for task in ("traffic", "probe")]
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError):  # a process may end between two looks at it
                look()
            time.sleep(LOOK_S)
        traffic, probe = (one.communicate(timeout=MOST_S + 60)[0] for one in helpers)
    finally:
        for one in helpers:
            one.kill()
    return Told(**json.loads(traffic)), json.loads(probe)


def run(settings: Settings, seconds: float) -> dict[str, object]:
    """The whole of it."""
    looks: list[Look] = []
    with tempfile.TemporaryDirectory(prefix="hetrun-soak-") as folder:
        server = hetrun_serve(settings, Path(folder))
        try:
            told, probes = under_traffic(
                server, seconds, lambda: looks.append(Look(time.monotonic(), held(server)))
            )
        finally:
            server.close()
    return summary(told, probes, looks)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("-m", "--model", type=Path, help="default: a tiny one with random weights")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--task", nargs=3, metavar=("NAME", "SOCKET", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        name, socket, seconds = args.task
        endpoint = ServerEndpoint(uds=Path(socket))
        if name == "probe":
            print(json.dumps(asyncio.run(probed(endpoint, float(seconds)))))
        else:
            traffic = Traffic(endpoint, seed=1)
            asyncio.run(traffic.run(float(seconds)))
            print(json.dumps(vars(traffic.told)))
        return 0
    with tiny_model() if args.model is None else nullcontext(args.model) as model:
        found = run(Settings.resolve(model=str(model)), 60 * args.minutes)
    print(json.dumps(found, indent=1))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
