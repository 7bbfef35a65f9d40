"""Run the release gate: python -m tests.release [--only LINE...] [--skip LINE...] [--again] [--list] [--json]

Every line is a command that must exit with 0. What passed for this commit on this machine is not run again
(--again: it is). Outputs and outcomes are kept in build/release; docs/release.md gets the table with --sign,
which needs all lines. Some lines take hours, and speed wants the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.release import checklist, gate
from tests.release.machine import place
from tests.release.steps import STEPS, Step, chosen
from tests.support.paths import ROOT


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.release",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="LINE", help="run these")
    parser.add_argument("--skip", nargs="+", default=[], metavar="LINE", help="do not run these")
    parser.add_argument("--again", action="store_true", help="also what passed for this commit")
    parser.add_argument("--list", action="store_true", help="show the lines and run none")
    parser.add_argument("--sign", action="store_true", help="write the table to docs/release.md")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each line of the gate")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", metavar="FOLDER")
    given = parser.parse_args(argv)
    try:
        given.steps = chosen(given.only, given.skip)
    except ValueError as error:
        parser.error(str(error))
    return given


def listed(steps: Sequence[Step]) -> str:
    """The lines with their minutes."""
    wide = max(len(step.name) for step in STEPS)
    return "\n".join(
        f"{step.name:{wide}}  {step.minutes:4} min  {step.bar}{' (nothing else may run)' * step.alone}"
        for step in steps
    )


def main(argv: Sequence[str] | None = None) -> int:
    given = options(argv)
    if given.list:
        print(listed(given.steps))
        return 0
    records, failed = gate.Records(given.out, place()), []
    for outcome in gate.run(given.steps, records, given.again):
        print(json.dumps(asdict(outcome)) if given.json else outcome.to_text(), flush=True)
        if not outcome.passed:
            failed.append(outcome.name)
    outcomes = {step.name: found for step in STEPS if (found := records.read(step))}
    if given.sign:
        checklist.write(checklist.table(STEPS, outcomes, records.here))
    missing = [step.name for step in STEPS if step.name not in outcomes]
    words = [f"failed: {', '.join(failed)}"] * bool(failed) + [f"not run: {', '.join(missing)}"] * bool(
        missing
    )
    gate.say("; ".join(words) or "every line passed")
    return 1 if failed or (missing and not (given.only or given.skip)) else 0


if __name__ == "__main__":
    sys.exit(main())
