"""Kills and power cuts: python -m tests.crashes [OPERATION...] [--points N] [--seed S] [--json]

Operations are killed (kill -9) at N points in all, spread evenly, and lose their power at as many: the disk
then forgets what was not synced, by the rules of `disk.py`. After each the recovery runs in another process.
Prints a table: the calls on files that one run makes, the points that were tried, how many different states
they left, and the faults: what was acknowledged and is lost, what is trusted and wrong, what is no sentence.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.crashes.models import make, make_mixture
from tests.crashes.operations import OPERATIONS
from tests.crashes.recorder import build
from tests.crashes.trial import CrashRow, Trial, environment, table


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.crashes",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument(
        "--points", type=int, default=500, help="kills, and as many power cuts (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row of the table")
    given = parser.parse_args()
    if unknown := set(given.operations) - OPERATIONS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(OPERATIONS)}")
    rows = list[CrashRow]()
    with TemporaryDirectory(prefix="crashes-") as room:
        library, reason = build(Path(room))
        if library is None:
            print(reason, file=sys.stderr)
            return 2
        (models := Path(room, "models")).mkdir()
        names = given.operations or list(OPERATIONS)
        if "repack" in names:
            make_mixture(models)
        with environment(make(models)) as env:
            for number, name in enumerate(names):
                points = given.points * (number + 1) // len(names) - given.points * number // len(names)
                began = time.monotonic()
                (place := Path(room, name)).mkdir()
                trial = Trial(name, place, env, library, given.seed)
                rows += [trial.cut_power(points), trial.kill(points)]
                trial.close()
                said = [f"{name}: {fault}" for row in rows[-2:] for fault in row.faults]
                print("\n".join([*said, f"{name}: {time.monotonic() - began:.0f} s"]), file=sys.stderr)
    print("\n".join(json.dumps(row.as_json()) for row in rows) if given.json else table(rows))
    return 1 if any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
