"""What has a limit of time, on a busy machine: python -m tests.busy [CHECK...] [--factor 2] [--json]

Each check runs once as the machine is, and then beside programs that use the cores, until the minutes are
over. Its answers must be the same, none may be lost or refused, and nothing may be said to take too long.
Prints a table: seconds without and with the busy programs, and how many alarms and lost answers there were.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from hetrun.config import demo_model
from hetrun.tools.bench.cpu_load import others
from tests.busy.checks import BEFORE, CHECKS
from tests.busy.rig import Lost, Rig, rig
from tests.busy.table import CheckRow, attempt, table


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.busy",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("check", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--factor", type=float, default=2.0, help="busy programs for each core (2)")
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat the round until these are over")
    parser.add_argument("-m", "--model", help="a GGUF file; by default the demonstration model")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each check")
    given = parser.parse_args()
    if unknown := set(given.check) - CHECKS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(CHECKS)}")
    model = given.model or demo_model()
    if model is None:
        print("the demonstration model is not here: give one with -m", file=sys.stderr)
        return 2
    rows = [CheckRow(name) for name in CHECKS if not given.check or name in given.check]
    programs = round(given.factor * len(os.sched_getaffinity(0)))
    with TemporaryDirectory(prefix="busy-") as folder, rig(Path(folder) / "home", str(model)) as found:
        notes = compare(found, rows, programs, given.minutes)
    faults = [fault for row in rows for fault in row.faults]
    if given.json:
        print("\n".join(json.dumps(row.as_json()) for row in rows))
        print(json.dumps({"busy_programs": programs, "notes": notes, "faults": faults}))
    else:
        print("\n".join([f"beside {programs} busy programs", table(rows), *notes]))
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def compare(found: Rig, rows: list[CheckRow], programs: int, minutes: float) -> list[str]:
    """Fill the rows; returns figures that nothing is judged by."""
    notes, end = list[str](), 0.0
    for busy in (False, True):
        with others(programs) if busy else nullcontext():
            end = monotonic() + 60 * minutes
            while True:
                tell(f"{'busy' if busy else 'quiet'}, load {os.getloadavg()[0]:.1f}")
                go_round(found, rows, busy=busy)
                notes += [f"{'busy' if busy else 'quiet'}: {note}" for note in found.notes]
                found.notes.clear()
                if not busy or monotonic() >= end:
                    break
    return notes


def go_round(found: Rig, rows: list[CheckRow], *, busy: bool) -> None:
    """Each check once; those that need a server follow its start."""
    alone = {check.__name__ for check in BEFORE}
    for row in rows:
        if row.check not in alone and not found.port:
            try:
                found.start()
            except Lost as lost:
                row.lost.append(str(lost))
                return
        attempt(found, row, busy=busy)
        tell(f"{row.check}: {row.busy_s if busy else row.quiet_s:.1f} s {'; '.join(row.faults)}".rstrip())
    if found.port:
        found.stop()


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
