"""Our C libraries under sanitizers: python -m tests.sanitizers [--seconds N] [--sanitizer S] [--level L]
[--json]

Compiles each library with AddressSanitizer and UndefinedBehaviorSanitizer into a copy of the checkout. There
it runs the tests that use the libraries, and makes inputs of any layouts and sizes, each judged by the
ordinary libraries or by numpy, with every set of instructions that this CPU has. What threads share is run
by programs of C under ThreadSanitizer, and once more under AddressSanitizer, which then also looks for
leaks.

A line for each library: the inputs, the hours, and what was found. How an input is repeated stands beside a
finding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sanitizers.builds import ADDRESS, LEVELS, THREAD, Build, compile_all, cpu, levels, missing
from tests.sanitizers.checkout import copy_checkout
from tests.sanitizers.fuzz import BY_NAME
from tests.sanitizers.races import PROGRAMS
from tests.sanitizers.trial import TESTS, Row, Wish, fuzz, races, run_tests

DENIABLE = ("portable",)  # beside the best: sets of instructions that the tests are run with as well
RACE_SHARE = 30  # each program of threads gets one part in this number of the time


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitizers",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=3600, help="of fuzzing (3600)")
    parser.add_argument("--inputs", type=int, default=0, help="of each case, at most")
    parser.add_argument("--seed", type=int, default=1, help="the inputs follow from it (1)")
    parser.add_argument("--sanitizer", choices=[ADDRESS, THREAD], action="append", help="one of them only")
    parser.add_argument("--level", choices=LEVELS, action="append", help="these instructions only")
    parser.add_argument("--case", choices=BY_NAME, action="append", help="these inputs only")
    parser.add_argument(
        "--part", choices=["tests", "fuzz", "threads"], action="append", help="this part only"
    )
    parser.add_argument("--optimise", default="-O1", help="of the libraries (-O1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    return parser.parse_args(arguments)


def checked(given: argparse.Namespace) -> list[Row]:
    """All parts that were asked for."""
    parts, rows = given.part or ["tests", "fuzz", "threads"], list[Row]()
    sanitizers = given.sanitizer or [ADDRESS, THREAD]
    here = [name for name in levels()[0] if name in (given.level or LEVELS)]
    if ADDRESS in sanitizers and {"tests", "fuzz"} & {*parts}:
        rows += _python_parts(given, parts, here)
    for sanitizer in sanitizers if "threads" in parts else ():
        say(f"{len(PROGRAMS)} programs of threads with {sanitizer}")
        rows += races(max(1.0, given.seconds / RACE_SHARE), given.seed, sanitizer)
    return rows


def _python_parts(given: argparse.Namespace, parts: Sequence[str], here: Sequence[str]) -> list[Row]:
    rows = list[Row]()
    for most in [None, *(DENIABLE if "tests" in parts and not given.level else ())]:
        say(f"compiling with {ADDRESS}, {most or 'all'} instructions")
        libraries = compile_all(Build(optimise=given.optimise, most=most), jobs=given.jobs)
        with TemporaryDirectory(prefix="sanitizers-") as room:
            where = copy_checkout(Path(room), libraries)
            if "tests" in parts:
                say(f"{len(TESTS)} files of tests with {most or 'all'} instructions")
                rows += [_at(row, most) for row in run_tests(where)]
            if "fuzz" in parts and most is None:
                say(f"fuzzing for {given.seconds:.0f} s with {', '.join(here)}")
                rows += fuzz(where, Wish(given.seconds, given.inputs, given.seed, given.case or (), here))
            if any(row.faults for row in rows):
                kept = Path("build", "sanitizers", "checkout")
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(where, kept, symlinks=True)
                say(f"the copy with the libraries that found something is in {kept}")
    return rows


def _at(row: Row, most: str | None) -> Row:
    row.library += f" ({most})" if most else ""
    return row


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'what':<8} {'library or file':<44} {'sanitizer':<18} {'inputs':>8} {'seconds':>7}  findings"]
    for row in rows:
        found = f"{len(row.faults)} FOUND" if row.faults else "0"
        counts = f"{row.inputs:>8} {row.seconds:>7.0f}"
        lines.append(f"{row.what:<8} {row.library:<44} {row.sanitizer:<18} {counts}  {found}")
    name, _ = cpu()
    here, absent = levels()
    inputs, hours = sum(row.inputs for row in rows), sum(row.seconds for row in rows) / 3600
    lines.append(f"{inputs} inputs in {hours:.2f} hours, {sum(len(row.faults) for row in rows)} findings")
    lines.append(
        f"{name}: run with {', '.join(here)}; it does not have, so not run: {', '.join(absent) or 'none'}"
    )
    return "\n".join(lines)


def main() -> int:
    given = parsed()
    for sanitizer in given.sanitizer or [ADDRESS, THREAD]:
        if reason := missing(sanitizer):
            say(reason)
            return 2
    rows = checked(given)
    if given.json:
        name, (here, absent) = cpu()[0], levels()
        print("\n".join(json.dumps(row.as_json()) for row in rows))
        print(json.dumps({"cpu": name, "levels": here, "not_run": absent, "faults": []}))
    else:
        print(table(rows))
    faults = [f"{row.what} {row.library}: {fault}" for row in rows for fault in row.faults]
    say("\n".join(faults))
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
