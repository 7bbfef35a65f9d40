"""`python -m tests.cuda STAGE`: see docs/gpu.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.cuda.needs import FLAGS, needs
from tests.cuda.rows import Table

STAGES = ("pack", "check", "conformance", "speed", "beyond")


def main(argv: list[str] | None = None) -> int:
    """Run a stage; 1 where a bar was missed or something is not there."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("-o", "--output", type=Path, help="a folder for the lines as JSON; of pack the file")
    parser.add_argument("--models", type=Path, help="a folder for models that are made; 60 GB at most")
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
        table = Table(given.stage, given.output)
        _run(given.stage, models, table)
    for line in table.missed:
        print(f"missed: {line.what}", file=sys.stderr)
    return 1 if table.missed else 0


def _check(models: Path) -> int:
    found = list(needs(models))
    for need in found:
        print(f"{need.what:<20} {need.missing or need.found}")
    return 1 if any(need.missing for need in found) else 0


def _run(stage: str, models: Path, table: Table) -> None:
    """Stages are imported when they run: what one lacks does not stop the others."""
    if stage == "conformance":
        from tests.cuda.conformance import conformance, kernels

        conformance(table)
        kernels(table)
    elif stage == "speed":
        from tests.cuda.speed import speed

        speed(models, table)
    else:
        from tests.cuda.beyond import beyond

        beyond(models, table)


if __name__ == "__main__":
    sys.exit(main())
