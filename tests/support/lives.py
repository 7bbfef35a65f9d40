"""An engine whose lives go as a file says: one word for each, in order, the last for all that follow.

The file is named by the option `plan`, which is a path. Each life adds its process to a second file.

    ok      loads, and is a FakeEngine
    wrong   cannot be loaded, because of what the user gave
    bug     cannot be loaded, because of a mistake of ours
    abort   dies while it loads, as a native assertion does
    endless loads for ever
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from hetrun.errors import ModelFileError
from tests.support.fakes import FakeEngine


def born(script: Path) -> list[int]:
    """The processes so far."""
    lives = script.with_suffix(".lives")
    return [int(pid) for pid in lives.read_text().split()] if lives.exists() else []


def engine(*, plan: Path, progress: Callable[[float], None]) -> FakeEngine:
    """What a worker is told to build."""
    words = plan.read_text().split()
    word = words[min(len(born(plan)), len(words) - 1)]
    with plan.with_suffix(".lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    if word == "wrong":
        raise ModelFileError(str(plan), "it is not a model any more")
    if word == "bug":
        raise ZeroDivisionError("a mistake")
    if word == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if word == "endless":
        threading.Event().wait()
    return FakeEngine(progress=progress)
