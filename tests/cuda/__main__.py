"""`python -m tests.cuda STAGE`: see docs/testing-on-a-gpu.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from math import inf
from pathlib import Path

from tests.cuda.needs import FLAGS, needs
from tests.cuda.rows import Table

STAGES = (
    "pack",
    "check",
    "smoke",
    "peer",
    "kernels",
    "sides",
    "conformance",
    "model",
    "speed",
    "beyond",
    "disk",
)


def main(argv: list[str] | None = None) -> int:
    """Run a stage; 1 where a bar was missed or something is not there."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("-o", "--output", type=Path, help="a folder for the lines as JSON; of pack the file")
    parser.add_argument("--models", type=Path, help="a folder for models that are made; 60 GB at most")
    parser.add_argument(
        "--only", default="", help="kernels, model, speed and beyond: what has this in its name"
    )
    parser.add_argument("--budget", type=float, default=inf, help="seconds after which nothing new begins")
    parser.add_argument("--cpu", choices=sorted(FLAGS), default="v4", help="what pack builds ggml for")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12", help="what runs a pack")
    parser.add_argument("--keep", type=Path, help="a folder for what pack builds and fetches")
    given = parser.parse_args(argv)
    if given.stage == "pack":
        from tests.cuda.pack import main as pack

        return pack(given.output, given.cpu, given.python, given.keep)
    with tempfile.TemporaryDirectory() as temporary:
        models: Path = given.models or Path(temporary)
        models.mkdir(parents=True, exist_ok=True)
        if given.stage == "check":
            return _check(models)
        table = Table(given.stage, given.output, given.budget)
        _run(given.stage, models, table, given.only)
    for line in table.missed:
        print(f"missed: {line.what}", file=sys.stderr)
    for what in table.left_out:
        print(f"not run: {what}", file=sys.stderr)
    return 1 if table.missed or table.left_out else 0


def _check(models: Path) -> int:
    found = list(needs(models))
    for need in found:
        print(f"{need.what:<20} {need.missing or need.found}")
    return 1 if any(need.missing for need in found) else 0


def _run(stage: str, models: Path, table: Table, only: str) -> None:
    """Stages are imported when they run: what one lacks does not stop the others."""
    if stage == "conformance":
        from tests.cuda.conformance import conformance, kernels

        conformance(table)
        kernels(table)
    elif stage == "smoke":
        from tests.cuda.smoke import smoke

        smoke(table)
    elif stage == "kernels":
        from tests.cuda.kernel_times import kernel_times

        kernel_times(table, only)
    elif stage == "sides":
        from tests.cuda.sides import measure

        measure(table)
    elif stage == "peer":
        from tests.cuda.peer import build_here

        build_here(table)
    elif stage == "model":
        from tests.cuda.mixture import chosen_mixtures, mixture
        from tests.cuda.model import chosen_cases, model

        if bars := chosen_cases(only):
            model(models, table, bars=bars)
        for case, bar in chosen_mixtures(only).items():
            mixture(models, table, case, bar)
    elif stage == "speed":
        from tests.cuda.models import chosen
        from tests.cuda.speed import MODELS, speed

        speed(models, table, chosen(MODELS, only))
    elif stage == "disk":
        from tests.cuda.disk import MODELS as LARGEST, disk
        from tests.cuda.models import chosen

        disk(models, table, chosen(LARGEST, only))
    else:
        from tests.cuda.beyond import MODELS as LARGER, beyond
        from tests.cuda.models import chosen

        beyond(models, table, chosen(LARGER, only))


if __name__ == "__main__":
    sys.exit(main())
