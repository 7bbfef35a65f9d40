"""Running the lines of the gate, and keeping what came of each beside the commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.release.machine import Place, today
from tests.release.steps import Step
from tests.support.paths import ROOT

LINES = 30  # of a failed line's output, shown


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a line."""

    name: str
    passed: bool
    seconds: float
    date: str
    commit: str
    load: float  # the average of a minute, before
    last: str  # what it said at the end

    def to_text(self) -> str:
        """One line for people."""
        word = "passed" if self.passed else "FAILED"
        return f"{self.name}: {word} after {self.seconds:.0f} s, load {self.load:.1f} before; {self.last}"


class Records:
    """Outcomes and outputs, in a folder for each commit and machine."""

    def __init__(self, folder: Path, here: Place) -> None:
        self.here = here
        self.folder = folder / f"{here.commit}-{here.key}"

    def log(self, step: Step) -> Path:
        """Where a line's output goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{step.name.replace(' ', '-')}.log"

    def read(self, step: Step) -> Outcome | None:
        """What came of it before, if it was run."""
        path = self.log(step).with_suffix(".json")
        try:
            return Outcome(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, step: Step, outcome: Outcome) -> None:
        """Keep it."""
        path = self.log(step).with_suffix(".json")
        path.write_text(json.dumps(asdict(outcome), indent=1) + "\n", "utf-8")


def run(steps: Sequence[Step], records: Records, again: bool) -> Iterator[Outcome]:
    """The outcome of each line, as it is there. What passed for this very commit is not run again."""
    clean = not records.here.commit.endswith("-dirty")
    for step in steps:
        before = None if again or not clean else records.read(step)
        if before and before.passed:
            yield before
            continue
        outcome = attempt(step, records)
        records.write(step, outcome)
        yield outcome


def attempt(step: Step, records: Records) -> Outcome:
    """Run one line, its output in a file."""
    load, began, path = os.getloadavg()[0], time.monotonic(), records.log(step)
    say(f"{step.name}: about {step.minutes} min; {path}")
    with path.open("w", encoding="utf-8") as log:
        status = subprocess.run(step.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = path.read_text("utf-8", errors="replace").splitlines()
    if status.returncode:
        say("\n".join(lines[-LINES:]))
    return Outcome(
        name=step.name,
        passed=status.returncode == 0,
        seconds=round(time.monotonic() - began, 1),
        date=today(),
        commit=records.here.commit,
        load=round(load, 2),
        last=closing(lines),
    )


def closing(lines: Sequence[str]) -> str:
    """The last words of an output, but for empty lines; rows of JSON are counted."""
    rows = [line for line in lines if line.startswith("{")]
    if rows and lines[-1].startswith("{"):
        return f"{len(rows)} rows"
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def say(text: str) -> None:
    """To stderr, at once."""
    print(text, file=sys.stderr, flush=True)
