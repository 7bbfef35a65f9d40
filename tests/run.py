"""The suite in its tiers: python -m tests.run [--quick | --all] [--random SEED] [--log FILE] [PYTEST OPTIONS]

    (nothing)   the whole behaviour, each thing once, by two workers
    --quick     the part of it that takes a minute
    --all       every row of every table too, then what wants the machine to itself, and the programs that
                loop: hours

`--random` shuffles modules and the tests in them. `--log` adds a line of JSON to a file: commit, load,
seconds and counts of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.examples import TIER

ROOT = Path(__file__).resolve().parents[1]
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b")
MOST_WORKERS = 8  # each may hold torch and a model

# What `--all` runs after the tests. Each ends with 0 where all is well.
LOOPS = (
    ("20,000 mutated files", "tests.hostile.fuzz", "--cases", "20000", "--jobs", "2"),
    ("batches that are killed", "tests.tools.batch_kills", "--kills", "20", "--requests", "600"),
    ("workers that are killed", "tests.tools.kill_test", "--seconds", "120"),
    ("many requests at once", "tests.tools.stress"),
    ("ten minutes of traffic", "tests.tools.soak", "--minutes", "10"),
    ("a second type checker reaches every folder", "tests.tools.types_reach", "basedpyright"),
    ("every Python that is here", "tests.tools.pythons"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One call of pytest."""

    name: str
    select: str
    workers: int
    paths: tuple[str, ...] = ()

    def command(self, options: list[str]) -> list[str]:
        spread = ["-n", str(self.workers), "--dist", "worksteal"] if self.workers else []
        return [sys.executable, "-m", "pytest", "-q", *spread, "-m", self.select, *options, *self.paths]


def workers() -> int:
    """One per core, and two where there is one: most tests wait for something now and then."""
    return min(max(2, len(os.sched_getaffinity(0))), MOST_WORKERS)


def phases(tier: str) -> list[Phase]:
    """What a tier runs."""
    match tier:
        case "quick":
            return [Phase("quick tests", "not slow and not exhaustive", workers(), ("tests/unit",))]
        case "all":
            return [Phase("side by side", "not alone", workers()), Phase("alone", "alone", 0)]
    return [Phase("side by side", "not exhaustive", workers())]


def counted(line: str) -> Counter[str]:
    """The counts of pytest's closing line; empty for any other line."""
    if " in " not in line:
        return Counter()
    return Counter(
        {what.rstrip("s") if what == "errors" else what: int(n) for n, what in COUNTED.findall(line)}
    )


def follow(command: list[str]) -> tuple[int, Counter[str]]:
    """Run pytest, let everybody read along, and keep its counts."""
    counts: Counter[str] = Counter()
    if sys.stdout.isatty():
        command = [*command, "--color=yes"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            counts = counted(re.sub(r"\x1b\[[0-9;]*m", "", line)) or counts
    return process.returncode, counts


def commit() -> str:
    """The commit, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.run",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiers = parser.add_mutually_exclusive_group()
    tiers.add_argument("--quick", dest="tier", action="store_const", const="quick", default="test")
    tiers.add_argument("--all", dest="tier", action="store_const", const="all")
    parser.add_argument("--random", type=int, metavar="SEED", help="a random order, the seed's own")
    parser.add_argument("--log", type=Path, metavar="FILE", help="add what came of the run to a file")
    given, options = parser.parse_known_args(argv)
    if given.random is not None:
        options += ["--random-order-bucket=module", f"--random-order-seed={given.random}"]
    load, began, counts, failed = os.getloadavg(), time.monotonic(), Counter[str](), []
    if given.tier == "all":
        os.environ[TIER] = "all"  # more examples of each property
    seconds: dict[str, float] = {}
    for phase in phases(given.tier):
        start = time.monotonic()
        status, found = follow(phase.command(options))
        seconds[phase.name] = round(time.monotonic() - start, 1)
        counts += found
        if status and not (status == 5 and phase.name == "alone"):  # 5: no test is chosen
            failed.append(phase.name)
    for name, *command in LOOPS if given.tier == "all" else ():
        print(f"{name}: python -m {' '.join(command)}", flush=True)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode:
            failed.append(name)
    row = {
        "commit": commit(),
        "tier": given.tier,
        "random": given.random,
        "load_before": [round(x, 2) for x in load],
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "seconds": round(time.monotonic() - began, 1),
        "phases": seconds,
        **counts,
    }
    if given.log:
        with given.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
    took = ", ".join(f"{name} {s:.0f} s" for name, s in seconds.items())
    print(f"\n{took}; load average {load[0]:.1f} before and {row['load_after'][0]} after")
    if failed:
        print(f"failed: {', '.join(failed)}")
    broken = counts["failed"] + counts["error"]
    print(f"tests: {counts['passed']} passed, {broken} failed, {counts['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
