"""A process of a trial: does one operation again and again, each time in a fork, or judges what is left.

Commands come as lines of JSON, and each gets one as its answer.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.crashes.operations import OPERATIONS, Crash, Operation
from tests.crashes.recorder import Recorder

LIMIT_S = 60.0  # of one run or judgement: longer means that something waits for what never comes


def forked(work: Callable[[], object], kill_after_s: float = 0.0) -> dict[str, Any]:
    """Do something in another process, which may be killed meanwhile; how it ended, and after how long."""
    began = time.monotonic()
    if not (pid := os.fork()):
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if kill_after_s:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"status": status, "seconds": time.monotonic() - began}


def run(operation: Operation, wish: Mapping[str, Any]) -> dict[str, Any]:
    """The operation, recorded, until it ends or is killed."""
    folder, log = Path(wish["folder"]), Path(wish["log"])
    calls = log.with_suffix(".calls")

    def work() -> None:
        recorder = Recorder()
        with recorder.recording(folder, log, wish.get("nth", 0), wish.get("middle", False)):
            operation.run(folder, recorder.mark)
        calls.write_text(str(recorder.calls))

    found = forked(work, wish.get("kill_after_s", 0.0))
    return found | {"calls": 0 if found["status"] else int(calls.read_text())}


def judge(operation: Operation, wish: Mapping[str, Any]) -> dict[str, Any]:
    """What is wrong with what a crash has left."""
    inodes = {int(before): now for before, now in wish.get("inodes", {}).items()}
    crash = Crash(Path(wish["folder"]), wish["told"], wish["all_told"], inodes)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        faults = list(operation.judge(crash))
    except Exception as error:
        faults = [f"{error!r} {_place(error)}"]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"faults": faults}


def _place(error: BaseException) -> str:
    """Where in our code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))


def main() -> None:
    operation = OPERATIONS[sys.argv[1]]
    logging.getLogger().addHandler(logging.NullHandler())
    operation.load()
    with ExitStack() as stack:
        out = stack.enter_context(os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            wish = json.loads(line)
            if wish["do"] == "begin":
                answer = forked(partial(operation.begin, Path(wish["folder"])))
            else:
                answer = (run if wish["do"] == "run" else judge)(operation, wish)
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
