"""Thousands of mutated models, each opened, planned, tokenised and run in a process that may die of it.

    python -m tests.hostile.fuzz --cases 20000 --jobs 2 --seed 1
    python -m tests.hostile.fuzz --replay MODEL       a file or folder that was kept, or any other

What is neither loaded nor refused with a sentence is a finding; its files are kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.hostile.mutations import Case, make_case
from tests.hostile.pool import Pool
from tests.hostile.trial import Outcome, attempt

ENDS = ("refused", "loaded", "nan", "finding")
KEPT = 3  # models of the same finding


@dataclass
class Report:
    """What was found so far."""

    folder: Path
    console: Console
    ends: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    findings: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak: int = 0

    def add(self, case: Case, outcome: Outcome, model: Path) -> None:
        """One case more; the files of a finding are kept."""
        self.ends[case.kind][outcome.end] += 1
        if outcome.end == "refused":
            self.refusals[outcome.stage] += 1
        if outcome.end != "finding":
            self.peak = max(self.peak, outcome.peak)
            return
        found = (outcome.stage, outcome.what)
        self.findings[found] += 1
        if self.findings[found] > KEPT:
            return
        kept = self.folder / f"{list(self.findings).index(found):03}-{self.findings[found]}"
        shutil.copytree(model, kept / "model", dirs_exist_ok=True)
        (kept / "case.txt").write_text(f"{outcome.stage}: {outcome.what}\n{outcome.trace}\n{pformat(case)}\n")
        if self.findings[found] == 1:
            self.console.print(
                f"{outcome.stage}: {outcome.what}\n  {kept / 'model' / case.seed.opened}", markup=False
            )

    def show(self) -> None:
        """The numbers by kind of mutation."""
        table = Table("mutation", *ENDS, "cases")
        for kind in sorted(self.ends):
            counts = self.ends[kind]
            table.add_row(kind, *(str(counts[e]) for e in ENDS), str(counts.total()))
        total = sum(self.ends.values(), Counter[str]())
        table.add_row("all", *(str(total[e]) for e in ENDS), str(total.total()), style="bold")
        self.console.print(table)
        stages = ", ".join(f"{n} {stage}" for stage, n in self.refusals.most_common())
        self.console.print(f"refused first by: {stages}; most memory of a case: {self.peak >> 20} MiB")
        for (stage, what), n in self.findings.most_common():
            self.console.print(f"{n:6} x {stage}: {what}", markup=False)


def fuzz(n: int, jobs: int, number: int, every: int, report: Report) -> None:
    """Draw `n` cases and try them all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(prefix="hetrun-fuzz-") as room,
        Progress(*columns, console=report.console) as progress,
    ):
        task = progress.add_task("cases", total=n)

        def done(case: Case, outcome: Outcome, model: Path) -> None:
            report.add(case, outcome, model)
            progress.advance(task)
            progress.update(task, description=f"{sum(report.findings.values())} findings")

        with Pool(Path(room), jobs, done) as pool:
            for i in range(n):
                pool.submit(make_case(Random(f"{number}/{i}")), check=every > 0 and i % every == 0)
            pool.drain()


def replay(path: Path) -> Outcome:
    """Try one model in this process, where a debugger can look at it."""
    return attempt(path, lambda stage: print(f"... {stage}", flush=True), check=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check", type=int, default=20, help="ask `hetrun check` about each Nth case; 0: none"
    )
    parser.add_argument(
        "--keep", type=Path, help="where findings go; a new folder for temporary files if not given"
    )
    parser.add_argument("--replay", type=Path, metavar="MODEL")
    given_ = parser.parse_args()
    if given_.replay:
        outcome = replay(given_.replay)
        print(f"{outcome.end} {outcome.stage}: {outcome.what}\n{outcome.trace}")
        return outcome.end == "finding"
    folder = given_.keep or Path(tempfile.mkdtemp(prefix="hetrun-findings-"))
    report = Report(folder, Console(width=150))
    try:
        fuzz(given_.cases, given_.jobs, given_.seed, given_.check, report)
    finally:
        report.show()
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
