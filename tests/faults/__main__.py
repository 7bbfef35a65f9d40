"""Fail every Nth call of an operation: python -m tests.faults [OPERATION [CALL...]] [--most N] [--json]

Without arguments every operation and every kind of call. Prints a table: how many calls of that kind one run
makes, how many of them were failed, one after another, and what became of the operation:

    refused        one clear error
    survived       the right answer all the same
    memory         Python's own MemoryError
    ended          the engine ended with a clear error; a new one answers
    ended in ggml  ggml ended the process: it does not look whether it got the memory that it asked for
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.injector import CALLS, build
from tests.faults.models import make
from tests.faults.operations import MAKERS
from tests.faults.trial import Wish, attempt, hub, table, with_hub


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", nargs="?", choices=MAKERS)
    parser.add_argument("calls", nargs="*", metavar="CALL", help=", ".join(CALLS))
    parser.add_argument("--most", type=int, default=0, help="of each kind of call fail about this number")
    parser.add_argument("--lasting", action="store_true", help="all calls after the Nth fail, too")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each operation and kind of call"
    )
    given = parser.parse_args()
    if unknown := set(given.calls) - CALLS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(CALLS)}")
    rows = []
    with TemporaryDirectory(prefix="faults-") as room:
        library, reason = build(Path(room))
        if library is None:
            print(reason, file=sys.stderr)
            return 2
        models = make(Path(room))
        with hub(models) as url:
            for operation in [given.operation] if given.operation else MAKERS:
                wish = Wish(operation, given.calls or list(CALLS), given.most, given.lasting)
                rows += attempt(wish, models, library, with_hub(url))
    print("\n".join(json.dumps(row.as_json()) for row in rows) if given.json else table(rows))
    faults = [f"{row.operation} {row.call}: {fault}" for row in rows for fault in row.faults]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
