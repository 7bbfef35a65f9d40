"""Crashes of one operation, at points that are drawn by a seed, and what the recovery made of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from tests.crashes.disk import Disk
from tests.crashes.models import FOLDER
from tests.crashes.operations import HUB_FILES
from tests.crashes.recorder import Event, Kind, read_log
from tests.loader.hub_stand_in import Repository, running

ROOT = Path(__file__).parents[2]
STEPS = (Kind.SYNC, Kind.RENAME, Kind.UNLINK, Kind.MARK, Kind.CREATE, Kind.TRUNCATE, Kind.PUNCH, Kind.MKDIR)
KILLED = -9


@dataclass
class CrashRow:
    """One operation and one kind of crash."""

    operation: str
    crash: str  # "kill" or "power"
    points: int = 0
    calls: int = 0  # that one run makes
    states: int = 0  # of them different ones
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)


class Process:
    """A child that does what lines of JSON say."""

    def __init__(self, operation: str, env: Mapping[str, str]) -> None:
        self._operation, self._env = operation, env
        self._child = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.crashes.child", self._operation]
        return subprocess.Popen(
            command, cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do: str, **wish: object) -> dict[str, Any]:
        """The answer; one that died of it is begun anew."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps({"do": do, **wish}) + "\n")
        self._child.stdin.flush()
        if line := self._child.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        ended = self._child.wait()
        self._child = self._begin()
        return {"faults": [f"the recovery ended with {ended}"], "status": ended}

    def close(self) -> None:
        """End it."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()


class Trial:
    """An operation that was done once, from beginning to end, and its crashes."""

    def __init__(self, operation: str, room: Path, env: Mapping[str, str], library: Path, seed: int) -> None:
        self._operation, self._room = operation, room
        self._rng = Random(f"{seed} {operation}")
        light = {**env, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HETRUN_THREADS": "1"}
        self._runner = Process(operation, light | {"LD_PRELOAD": str(library)})
        self._judge = Process(operation, light)
        self._begun = room / "begun"
        self._begun.mkdir()
        self._must(self._runner.ask("begin", folder=str(self._begun)))
        self._disk = Disk(self._begun)
        whole = self._must(self._runner.ask("run", folder=str(self._begun), log=str(room / "whole")))
        self._calls, self._seconds = whole["calls"], whole["seconds"]
        self._events = read_log((room / "whole").read_bytes())
        self._told = [event.name for event in self._events if event.kind is Kind.MARK]

    def _must(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer["status"]:
            raise RuntimeError(f"{self._operation} failed without a crash: {answer}")
        return answer

    def close(self) -> None:
        """End its processes."""
        self._runner.close()
        self._judge.close()

    # --- power cuts

    def cut_power(self, points: int) -> CrashRow:
        """States of a disk that lost its power, one for each point."""
        row, states = CrashRow(self._operation, "power", points, self._calls), set[str]()
        disk, done = deepcopy(self._disk), 0
        for point in sorted(chosen_points(self._events, points, self._rng)):
            for event in self._events[done:point]:
                disk.apply(event)
            done = point
            target = self._room / "state"
            said, inodes = disk.write_state(target, self._rng)
            states.add(_digest(target))
            where = f"power cut before call {point} ({said})"
            row.faults += self._judged(target, disk.marks, where, inodes)
        row.states = len(states)
        return row

    def _judged(
        self, folder: Path, told: Sequence[str], where: str, inodes: Mapping[int, int] | None = None
    ) -> list[str]:
        facts = {"told": list(told), "all_told": self._told, "inodes": inodes or {}}
        faults = self._judge.ask("judge", folder=str(folder), **facts)["faults"]
        shutil.rmtree(folder)
        return [f"{where}: {fault}" for fault in faults]

    # --- kills

    def kill(self, points: int) -> CrashRow:
        """The process killed before a call, in the middle of one, and at any time: a third of the points
        each."""
        row, states = CrashRow(self._operation, "kill", points, self._calls), set[str]()
        for number in range(points):
            folder, log = self._room / "killed", self._room / "log"
            folder.mkdir()
            self._must(self._runner.ask("begin", folder=str(folder)))
            wish, where = self._wish(number)
            self._runner.ask("run", folder=str(folder), log=str(log), **wish)
            told = [event.name for event in read_log(log.read_bytes()) if event.kind is Kind.MARK]
            states.add(_digest(folder))
            row.faults += self._judged(folder, told, where)
        row.states = len(states)
        return row

    def _wish(self, number: int) -> tuple[dict[str, Any], str]:
        if number % 3 == 2:
            after = self._rng.uniform(0.0, self._seconds)
            return {"kill_after_s": after}, f"killed after {1000 * after:.0f} ms"
        nth, middle = self._rng.randint(1, self._calls), number % 3 == 1
        how = "in the middle of" if middle else "before"
        return {"nth": nth, "middle": middle}, f"killed {how} call {nth} of {self._calls}"


def chosen_points(events: Sequence[Event], count: int, rng: Random) -> list[int]:
    """Numbers of calls before which the power fails: half of them beside steps of something."""
    steps = [i for i, event in enumerate(events) if event.kind in STEPS]
    beside = [rng.choice(steps) + rng.randint(0, 1) for _ in range(count // 2)]
    return beside + [rng.randint(0, len(events)) for _ in range(count - len(beside))]


def _digest(folder: Path) -> str:
    """What tells a state from others: all names and bytes."""
    found = sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        if path.is_symlink():
            found.update(os.readlink(path).encode())
        elif path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


@contextmanager
def environment(models: Path) -> Iterator[dict[str, str]]:
    """What processes of trials need: the models, and a hub that has them."""
    one = {"tiny.gguf": (models / "tiny.gguf").read_bytes(), "README.md": b"tiny"}
    files = {"o/one": one, "o/folder": {p.name: p.read_bytes() for p in (models / "folder").iterdir()}}
    digests = {repo: {n: sha256(b).hexdigest() for n, b in found.items()} for repo, found in files.items()}
    with running() as hub:
        hub.repositories.update({repo: Repository(found) for repo, found in files.items()})
        of_hub = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", HUB_FILES: json.dumps(digests)}
        yield {**os.environ, FOLDER: str(models), **of_hub}


def table(rows: Sequence[CrashRow]) -> str:
    """For people."""
    lines = [f"{'operation':<14} {'crash':<6} {'calls':>6} {'points':>6} {'states':>6} {'faults':>6}"]
    lines += [
        f"{r.operation:<14} {r.crash:<6} {r.calls:>6} {r.points:>6} {r.states:>6} {len(r.faults):>6}"
        for r in rows
    ]
    return "\n".join(lines)
