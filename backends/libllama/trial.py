"""A stranger's file is opened in a process of its own first: what llama.cpp does not like may end a process.

A file that passed is remembered by its path, size and time, so that the second start is quick.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from hetrun import child
from hetrun.backends.llamacpp import llama, native
from hetrun.config import dirs
from hetrun.errors import ModelFileError
from hetrun.quant import by_name
from hetrun.stamp import Stamp, unchanged
from hetrun.whole_backend import WholeSetup

log = logging.getLogger(__name__)

LEAST_S = 60.0  # that a file has to open
SLOWEST = 20e6  # bytes per second that a disk reads


def check(files: Mapping[str, Stamp]) -> None:
    """Open the file, in so many parts, in another process, unless that was done before."""
    paths = [Path(path) for path in files]
    mark = _mark(
        [(path.resolve(), s.size, s.mtime_ns) for path, s in zip(paths, files.values(), strict=True)]
    )
    if mark.exists():
        return
    seconds = LEAST_S + sum(s.size for s in files.values()) / SLOWEST
    with unchanged(files):
        code = "from hetrun.backends.libllama.trial import main; main()"
        child.ask(code, str(paths[0]), seconds, "llama.cpp")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        log.debug("%s will be tried again the next time: %s", paths[0], e)


def _mark(facts: list[tuple[Path, int, int]]) -> Path:
    """The file whose presence says that these passed, with this version of llama.cpp."""
    known = repr((facts, native.library().version))
    return dirs().cache / "opened" / hashlib.sha256(known.encode()).hexdigest()


def main() -> NoReturn:
    """The child: open the file and take one token in."""
    child.answer(_open)


def _open(path: str) -> str:
    from hetrun.backends.libllama.runner import LlamaRunner

    llama.library().llama_log_set(None, None)  # to stderr, for the parent to quote
    runner = LlamaRunner(Path(path), WholeSetup(64, 1, 1, 16, 16, by_name("F16")), trial=True)
    one = np.zeros(1, np.int64)
    if np.isnan(runner.run(one, one, one, np.ones(1, np.bool_))).any():
        raise ModelFileError(path, f"its weights give results that are no numbers; {child.AGAIN}")
    runner.close()
    return ""
