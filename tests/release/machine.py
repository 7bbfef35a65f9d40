"""Which machine, which commit, and when: what every figure is written beside."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime

from hetrun.planner.costmodel.store import cpu_facts
from hetrun.tools.doctor import FEATURES
from tests.run import commit
from tests.support.paths import ROOT


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when something was run."""

    cpu: str
    cores: int
    commit: str
    date: str
    load: float  # the average of a minute, before

    @property
    def key(self) -> str:
        """A name for a file: one for each kind of machine."""
        words = "".join(c if c.isalnum() else "-" for c in f"{self.cpu} {self.cores}".lower())
        return "-".join(filter(None, words.split("-")))

    def to_text(self) -> str:
        """As a table's heading."""
        cores = "one core" if self.cores == 1 else f"{self.cores} cores"
        return f"{cores} of {self.cpu}, {self.date}, commit {self.commit}, load average {self.load:.1f}"


def place() -> Place:
    """Here and now."""
    return Place(
        cpu=cpu(), cores=len(os.sched_getaffinity(0)), commit=commit(), date=today(), load=os.getloadavg()[0]
    )


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()


def cpu() -> str:
    """The CPU's name and what it multiplies with."""
    facts = cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    known = [feature for feature in FEATURES if feature in flags]
    return f"{facts.get('model name', facts['machine'])} ({', '.join(known) or 'no vector instructions'})"


def git(*arguments: str) -> str:
    """What git prints; nothing where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
