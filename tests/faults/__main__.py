"""Fail every Nth call of an operation: python -m tests.faults [OPERATION [CALL...]] [--lasting] [--json]

Without arguments every operation and every kind of call. Prints a table: how many calls of that kind one run
makes, how many of them were failed, one after another, and what became of the operation:

    refused        one clear error
    survived       the right answer all the same
    memory         Python's own MemoryError
    ended          the engine ended with a clear error; a new one answers
    ended in ggml  ggml or llama.cpp ended the process: it does not look whether it got the memory that
                   it asked for, or lets no one catch what C++ throws
    lost in ggml   refused, and llama.cpp has not given back a file or memory of its own
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cuda.emulated.kernels import has_compiler
from tests.faults.catalog import ALL_CALLS, GPU_OPERATIONS, MAKERS, calls_of
from tests.faults.injector import build
from tests.faults.models import make
from tests.faults.trial import Row, Wish, attempt, hub, table, with_hub


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", nargs="?", choices=MAKERS)
    parser.add_argument("calls", nargs="*", metavar="CALL", help=", ".join(ALL_CALLS))
    parser.add_argument("--most", type=int, default=0, help="of each kind of call fail about this number")
    parser.add_argument("--nth", type=int, action="append", help="fail this call only; may be repeated")
    parser.add_argument("--lasting", action="store_true", help="all calls after the Nth fail, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="operations at a time")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each operation and kind of call"
    )
    given = parser.parse_args()
    if unknown := set(given.calls) - set(ALL_CALLS):
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(ALL_CALLS)}")
    begin = time.perf_counter()
    with TemporaryDirectory(prefix="faults-") as room:
        library, reason = build(Path(room))
        if library is None:
            print(reason, file=sys.stderr)
            return 2
        rows = _run(given, make(Path(room)), library)
    print("\n".join(json.dumps(row.as_json()) for row in rows) if given.json else table(rows))
    faults = [f"{row.operation} {row.call}: {fault}" for row in rows for fault in row.faults]
    print("\n".join([*faults, _total(rows, time.perf_counter() - begin)]), file=sys.stderr)
    return 1 if faults else 0


def _total(rows: Sequence[Row], seconds: float) -> str:
    """What all of it was, and what it took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    tried, faults = sum(row.tried for row in rows), sum(len(row.faults) for row in rows)
    cpu, load = used.ru_utime + used.ru_stime, os.getloadavg()[0]
    return (
        f"{tried} failed calls, {faults} faults, {seconds:.0f} s, {cpu:.0f} s of CPU, load average {load:.1f}"
    )


def _run(given: argparse.Namespace, models: Path, library: Path) -> list[Row]:
    """The rows of all operations that were asked for, some at a time."""

    def one(operation: str) -> list[Row]:
        there = calls_of(operation, given.lasting)
        calls = [call for call in given.calls or there if call in there]
        if not calls:
            return []
        wish = Wish(operation, calls, given.most, given.lasting, given.nth or ())
        begin = time.perf_counter()
        rows = attempt(wish, models, library, with_hub(url))
        tried, faults = sum(row.tried for row in rows), sum(len(row.faults) for row in rows)
        seconds = time.perf_counter() - begin
        print(f"{operation}: {tried} failed calls, {faults} faults, {seconds:.0f} s", file=sys.stderr)
        return rows

    with hub(models) as url, ThreadPoolExecutor(given.jobs) as pool:
        wanted = [given.operation] if given.operation else list(MAKERS)
        if left_out := GPU_OPERATIONS.intersection(wanted if not has_compiler() else ()):
            print(f"without g++ there is no emulated GPU: {', '.join(sorted(left_out))}", file=sys.stderr)
            wanted = [name for name in wanted if name not in left_out]
        return [row for rows in pool.map(one, wanted) for row in rows if row.calls]


if __name__ == "__main__":
    sys.exit(main())
