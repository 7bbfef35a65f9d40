"""Memory: python -m tests.memory [MODE...] [--soak MINUTES] [--json]

Every documented mode runs first without a limit, and then in a control group of just its budget with swap
off. It must give the same answer, no process may be killed, and what is held must be within the budget. The
table has, in MiB: the budget; the peak that the kernel counted, pages of files included; what was fixed
(anonymous, shared, the kernel's own); what of libraries was mapped; how often the limit was met; how many
pages of files were read again because they had been taken back; processes killed; seconds in the group, and
without it.

--soak N runs traffic for N minutes in control groups, too: all sorts of clients at one model, and four
models opened and closed in turn; neither may grow. --soak 0 leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.memory.group import missing
from tests.memory.models import TINY, ModelFolder
from tests.memory.modes import MODES
from tests.memory.soak import SoakReport, soak_four, soak_one
from tests.memory.trial import MIB, MemoryRow, Mode, attempt

SOAK_MINUTES = 60.0
ONE_BUDGET, FOUR_BUDGET = 256 * MIB, 640 * MIB
WIDTH = 34


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.memory",
        description=summary,
        epilog=rest + "\nModes: " + "; ".join(mode.name for mode in MODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modes", nargs="*", metavar="MODE", help="the beginning of a mode's name")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="default: 60; with MODE: 0")
    parser.add_argument("--models", type=Path, help="a folder in which the models are kept")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each mode and soak")
    given = parser.parse_args()
    chosen = [m for m in MODES if not given.modes or any(m.name.startswith(name) for name in given.modes)]
    if not chosen:
        parser.error(f"no mode begins with {' or '.join(given.modes)}")
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that groups and servers go, too
    minutes = given.soak if given.soak is not None else 0.0 if given.modes else SOAK_MINUTES
    with TemporaryDirectory(prefix="hetrun-memory-") as room:
        models, env = ModelFolder(given.models or Path(room) / "models"), environment(Path(room))
        rows = list(_rows(chosen, models, env, given.json))
        soaks = _soaks(models, minutes, env, given.json) if minutes else []
    faults = [f"{row.mode}: {fault}" for row in rows for fault in row.faults]
    faults += [f"{soak.name}: {fault}" for soak in soaks for fault in soak.faults]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def environment(room: Path) -> dict[str, str]:
    """Of the commands: a home of their own, one thread, and plans that are the same every time."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HETRUN_", "XDG_", "HF_"))
    }
    run = room / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    own = {"HOME": str(room), "XDG_CACHE_HOME": str(room / "cache"), "XDG_RUNTIME_DIR": str(run)}
    mine = {"HETRUN_THREADS": "1", "HETRUN_PLANNER": "static", "HETRUN_NO_SERVER": "true"}
    return {**kept, **own, **mine, "HF_HUB_OFFLINE": "1"}


def _rows(
    chosen: Sequence[Mode], models: ModelFolder, env: Mapping[str, str], as_json: bool
) -> Iterator[MemoryRow]:
    if not as_json:
        print(f"{'mode':<{WIDTH}} budget   peak  fixed mapped  limit met   reread  kills  seconds  (free)")
    for mode in chosen:
        row = attempt(mode, models, env)
        print(json.dumps(row.as_json()) if as_json else line(row), flush=True)
        yield row


def line(row: MemoryRow) -> str:
    """For people."""
    if row.skipped:
        return f"{row.mode:<{WIDTH}} {row.skipped}"
    sizes = " ".join(f"{size / MIB:>6.1f}" for size in (row.budget, row.peak, row.fixed, row.mapped))
    counts = f"{row.failures:>10,} {row.refaults:>8,} {row.kills:>6}"
    wrong = "  FAULT" if row.faults else ""
    return f"{row.mode:<{WIDTH}} {sizes} {counts} {row.seconds:>8.1f} {row.seconds_free:>7.1f}{wrong}"


def _soaks(models: ModelFolder, minutes: float, env: Mapping[str, str], as_json: bool) -> list[SoakReport]:
    """Both at the same time."""
    model, *_ = paths = [models.find(name) for name in TINY]
    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(soak_one, model, ONE_BUDGET, minutes, env),
            pool.submit(soak_four, paths, FOUR_BUDGET, minutes, env),
        ]
        reports = [one.result() for one in started]
    for report in reports:
        if as_json:
            print(json.dumps(report.as_json()))
            continue
        print(
            f"\n{report.name}: {report.minutes:.0f} minutes, {report.requests:,} requests, "
            f"{report.openings:,} openings; budget {report.budget / MIB:.0f} MiB, "
            f"peak {report.peak / MIB:.1f}, "
            f"fixed {report.fixed / MIB:.1f}; limit met {report.failures:,} times, {report.kills} kills; "
            f"load average {report.load}"
        )
        print("\n".join(f"  {slope}" for slope in report.slopes))
    return reports


if __name__ == "__main__":
    sys.exit(main())
