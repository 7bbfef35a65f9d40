"""Measure the README's figures, in pairs with the last release: python -m tests.release.speed [--last REF]

First each model in turn with llama.cpp, and one within less memory than it needs; the results go to
docs/figures and into the README. Then this checkout and the last release in turn (A B B A) on the same files:
a figure that fell by more than 3 per cent beyond its spread is a fault. The last release is the newest tag
before this commit, or REF; it gets a checkout and an environment of its own. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.release.figures import BudgetCell, Figures, SpeedCell, read, write_readme
from tests.release.gate import say
from tests.release.machine import git, place
from tests.support.paths import ROOT

FALL = 0.03  # what a figure may lose beyond its spread
BUSY = 0.6  # a load average above which nothing is measured
PAIRS = 4
SWEEP = ROOT / "docs" / "pictures" / "sweep.svg"

Samples = dict[tuple[str, str], list[float]]  # by model and case


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """A model and how it is measured."""

    title: str
    shape: str = ""  # nothing: the small model
    quant: str = ""
    repeats: int = 5

    def options(self, models: Path) -> list[str]:
        """Of `hetrun bench`."""
        model = ["-m", str(self.file(models))] if self.shape else []
        return [*model, "-r", str(self.repeats), "--precision", "fast", "-o", "json"]

    def file(self, models: Path) -> Path:
        """A made model, written where it is not there."""
        path = models / f"{self.shape}-{self.quant.lower()}.gguf"
        if not path.exists():
            say(f"Making {path.name}")
            maker = (sys.executable, "-m", "tests.tools.make_model", "--shape", self.shape)
            call([*maker, "--quant", self.quant, "-o", str(path)], ROOT)
        return path


CASES = (
    SpeedCase("SmolLM2 135M, Q4_1, 98 MB"),
    SpeedCase("1B shape, Q4_K_M, 669 MB", "1b", "Q4_K_M", 3),
)
STREAMED = SpeedCase("1B shape, Q4_0, 632 MB", "1b", "Q4_0", 3)
BUDGETS = "15%,25%,35%,45%"


def call(command: Sequence[str], cwd: Path) -> str:
    """The output of a command, which must succeed; its own progress stays on stderr."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def bench(program: Sequence[str], cwd: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of `hetrun bench`, of one limit of memory or of several."""
    said = json.loads(call([*program, "bench", *options], cwd))
    rows: list[dict[str, Any]] = said["rows"] if isinstance(said, dict) else said
    return rows


OURS = (sys.executable, "-m", "hetrun")


def title(test: str) -> str:
    """A case's name in words: pp512 is a prompt, tg64@512 an answer."""
    if test.startswith("pp"):
        return f"prompt of {test[2:]} tokens"
    return f"answer after {test.partition('@')[2]} tokens"


def in_turn(case: SpeedCase, models: Path) -> Iterator[SpeedCell]:
    """Cells beside llama.cpp, for a prompt and an answer."""
    say(f"{case.title}: in turn with llama.cpp")
    for row in bench(OURS, ROOT, *case.options(models), "--vs", "llama.cpp"):
        peer = row["peer"]
        yield SpeedCell(
            model=case.title,
            what=title(row["test"]),
            samples=tuple(row["samples"]),
            of_limit=row["of_limit"],
            peer=peer["version"],
            peer_samples=tuple(peer["samples"]),
            peer_of_limit=peer["of_limit"],
            ratio=row["ratio"],
        )


def within_budgets(models: Path) -> Iterator[BudgetCell]:
    """Answers of a model that is larger than its memory; draws the picture, too."""
    say(f"{STREAMED.title}: less memory than it needs")
    options = ("-c", "2048", "--ram", BUDGETS, "-n", "32", "--picture", str(SWEEP))
    for row in bench(OURS, ROOT, *STREAMED.options(models), *options):
        if row["failed"]:
            raise SystemExit(f"{STREAMED.title} within {row['budget']}: {row['failed']}")
        if row["budget_bytes"] is None:
            continue  # the last one has no limit
        yield BudgetCell(row["budget_bytes"] / 2**30, tuple(row["samples"]), row["bound_tok_s"])


# --- the last release


def last_release() -> str:
    """The newest tag before this commit; nothing where there is none."""
    return git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")


def installed(ref: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A checkout of that release and its program."""
    commit = git("rev-parse", "--short=9", f"{ref}^{{commit}}")
    if not commit:
        raise SystemExit(f"there is no commit {ref}")
    tree = folder / f"last-{commit}"
    if not tree.exists():
        git("worktree", "prune")
        call(["git", "worktree", "add", "--detach", str(tree), commit], ROOT)
    program = tree / ".venv" / "bin" / "hetrun"
    if not program.exists():
        say(f"Installing {ref}")
        call([sys.executable, "scripts/install.py", "--venv", ".venv", "demo"], tree)
    return tree, (str(program),)


def pairs(ref: str, folder: Path) -> Mapping[tuple[str, str], list[float]]:
    """For each cell the ratios of this checkout to the last release, run by run."""
    tree, theirs = installed(ref, folder)
    ratios: Samples = defaultdict(list)
    for case in CASES:
        options = case.options(folder)
        for n in range(PAIRS):
            say(f"{case.title}: pair {n + 1} of {PAIRS} with {ref}")
            sides = [(OURS, ROOT), (theirs, tree)]
            found = [bench(*side, *options) for side in (sides if n % 2 == 0 else sides[::-1])]
            ours, last = found if n % 2 == 0 else found[::-1]
            for mine, other in zip(ours, last, strict=True):
                ratios[case.title, title(mine["test"])].append(mine["tok_s"] / other["tok_s"])
    return ratios


def fell(ratios: Sequence[float]) -> bool:
    """Whether a figure is worse than the last release's by more than its spread explains."""
    return median(ratios) + (max(ratios) - min(ratios)) / 2 < 1 - FALL


def compare(ref: str, folder: Path) -> list[str]:
    """The figures that fell; prints all."""
    faults = []
    for (model, what), ratios in pairs(ref, folder).items():
        text = f"{model}, {what}: {median(ratios):.3f} of {ref} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(text)
        if fell(ratios):
            faults.append(text)
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.release.speed", description=summary, epilog=rest)
    parser.add_argument("--last", default="", metavar="REF", help="the release to compare with")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "release", help="for models and the rest"
    )
    parser.add_argument("--busy", action="store_true", help="measure though other programs run, for a trial")
    given = parser.parse_args(argv)
    if os.getloadavg()[0] > BUSY and not given.busy:
        print(f"other programs run here (load average {os.getloadavg()[0]:.1f}): nothing is measured")
        return 1
    given.folder.mkdir(parents=True, exist_ok=True)
    here = place()
    cells = [cell for case in CASES for cell in in_turn(case, given.folder)]
    streamed = tuple(within_budgets(given.folder))
    print(Figures(here, tuple(cells), STREAMED.title, streamed).write())
    write_readme(read())
    ref = given.last or last_release()
    if not ref:
        print("there is no release before this one: nothing to compare with")
        return 0
    return 1 if compare(ref, given.folder) else 0


if __name__ == "__main__":
    sys.exit(main())
