"""The whole checklist through one command in one process, which must survive it: JSON for each case.

python -m tests.hostile.all_cases run
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hetrun import cli
from tests.hostile import cases_folder, cases_gguf
from tests.hostile.checklist import Case, good_gguf, write_folder
from tests.hostile.trees import write_gguf

CASES = (*cases_gguf.CASES, *cases_folder.CASES)


def arguments(command: str, path: Path, weights: bool = False) -> list[str]:
    """The command line for a model."""
    if command == "check":
        return ["check", *([] if weights else ["--structure"]), str(path)]
    return ["run", "-m", str(path), "-n", "1", "--threads", "1", "Hello"]


def cpu() -> float:
    """Seconds that this process and its children computed; the machine may be busy with other things."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def memory(line: str) -> float:
    """MiB of this process, now (VmRSS) or at most (VmHWM) since that was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{line}:")[2].split()[0]) / 1024


def go(command: str, path: Path, weights: bool = False) -> dict[str, object]:
    """What comes of it, in what time, and how much memory beyond what was in use."""
    out, err = io.StringIO(), io.StringIO()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is in use now
    before, began = memory("VmRSS"), cpu()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.exit_code(arguments(command, path, weights))
    return {
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": cpu() - began,
        "mib": memory("VmHWM") - before,
    }


def main() -> None:
    command = sys.argv[1]
    with TemporaryDirectory() as name:
        good = Path(name) / "good.gguf"
        good.write_bytes(write_gguf(good_gguf()))
        for path in (good, write_folder(Path(name)), good):  # what a process that lives on has loaded anyway
            assert go(command, path)["code"] == 0
    for case in CASES:
        if command == "check" or not case.weights:
            with TemporaryDirectory() as name:
                print(json.dumps({"case": case.name, **_tried(command, case, Path(name))}), flush=True)


def _tried(command: str, case: Case, folder: Path) -> dict[str, object]:
    print(json.dumps({"begin": case.name}), flush=True)  # known, should it be the last
    return {"folder": str(folder), "says": case.says, **go(command, case.make(folder), case.weights)}


if __name__ == "__main__":
    main()
