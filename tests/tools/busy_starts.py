"""Whether the planner ever loses to having none: `python -m tests.tools.busy_starts`.

Servers are started one after the other, beside busy programs or none, in turn as hetrun would run by itself
and on each backend alone. Each reads fresh prompts, and what counts are the tokens a second that it says
itself, from the third prompt on. A start of `hetrun` is set against the better of the other two starts in
its round. What the log says of a step that does not end is counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

HETRUN = [str(Path(sys.executable).with_name("hetrun"))]
LOOP = [sys.executable, "-c", "while True: pass"]
LENGTHS = (240, 240, 500, 240, 500, 500, 240, 500)
SKIPPED = 2  # prompts
WATCHDOG = ("Stacks of all threads", "stuck", "It is being restarted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", help="by default SmolLM2")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--loops", type=int, default=6, help="busy programs beside")
    parser.add_argument("--backends", nargs="*", default=["llamacpp", "amx"])
    parser.add_argument("--again", action="store_true", help="times are kept from one start to the next")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path, help="folder where the servers' logs are kept")
    options = parser.parse_args()
    rows: list[Row] = []
    with busy(options.loops), tempfile.TemporaryDirectory() as folder:
        for number in range(options.starts):
            found = {}
            for backend in ["", *options.backends]:
                place = Path(folder) / (f"{backend}-all" if options.again else f"{backend}-{number}")
                found[backend] = start(options.model, backend, place)
                if options.logs:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(place / "log", options.logs / f"{number}-{backend or 'hetrun'}.log")
            rows.append(row(number, found, options.backends))
            print(rows[-1], file=sys.stderr, flush=True)
    ratios = sorted(row.ratio for row in rows)
    words = sum(row.words for row in rows)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    print(
        f"{len(rows)} starts beside {options.loops} busy programs: ratio to the better backend "
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), {words} words of the watchdog, "
        f"load {os.getloadavg()[0]:.1f}",
        file=sys.stderr if options.json else sys.stdout,
    )
    return 0


class Start:
    """What one server did."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.words = 0
        self.reason = ""
        self.changes: list[str] = []


def start(model: str | None, backend: str, place: Path) -> Start:
    """One server, all prompts."""
    found, port = Start(), free_port()
    place.mkdir(parents=True, exist_ok=True)
    command = [*HETRUN, "serve", "-v", "--port", str(port)]
    command += ["-m", model] if model else []
    command += ["--backend", backend] if backend else []
    environ = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
    with open(place / "log", "wb") as log, ExitStack() as ends:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        ends.callback(end, server)
        wait_for(port, server)
        for number, length in enumerate(LENGTHS):
            found.speeds.append(speed(port, prompt(length, number)))
        found.reason = str(ask(port, "/plan").get("reason", ""))
    text = (place / "log").read_text(errors="replace")
    found.words = sum(text.count(word) for word in WATCHDOG)
    found.changes = [x.partition("plan in force: ")[2] for x in text.splitlines() if "plan in force: " in x]
    return found


def prompt(length: int, seed: int) -> list[int]:
    """Tokens that no cache has seen."""
    chance = random.Random(time.time_ns() + seed)
    return [chance.randrange(300, 40000) for _ in range(length)]


def speed(port: int, tokens: Sequence[int]) -> float:
    """Tokens of the prompt a second, as the server says."""
    answer = ask(port, "/v1/completions", {"prompt": list(tokens), "max_tokens": 4, "temperature": 0})
    timings = answer["timings"]
    assert isinstance(timings, dict)
    return float(timings["prompt_per_second"])


def ask(port: int, path: str, body: object = None) -> dict[str, object]:
    """A request of this machine's server, and its answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        found = json.load(reply)
    assert isinstance(found, dict)
    return found


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until it answers."""
    while server.poll() is None:
        try:
            ask(port, "/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the server ended by itself")


def end(server: subprocess.Popen[bytes]) -> None:
    """It keeps what it measured."""
    server.terminate()
    server.wait(60)


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """While other programs compute."""
    programs = [subprocess.Popen(LOOP) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@dataclass
class Row:
    """One round."""

    start: int
    speeds: dict[
        str, float
    ]  # median tokens a second from the third prompt on, by backend; "" is hetrun's own
    each: dict[str, list[float]]
    ratio: float
    words: int
    changes: list[str]
    load: float

    def __str__(self) -> str:
        words = ", ".join(f"{name or 'hetrun'} {value:.0f}" for name, value in self.speeds.items())
        return f"start {self.start}: {words} tokens/s, ratio {self.ratio:.2f}, {self.changes}"


def row(number: int, found: dict[str, Start], backends: Sequence[str]) -> Row:
    """What a round came to."""
    speeds = {name: median(s.speeds[SKIPPED:]) for name, s in found.items()}
    ratio = speeds[""] / max(speeds[b] for b in backends)
    each = {name: s.speeds for name, s in found.items()}
    own = found[""]
    return Row(number, speeds, each, ratio, own.words, own.changes, os.getloadavg()[0])


if __name__ == "__main__":
    sys.exit(main())
