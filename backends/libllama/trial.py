"""A stranger's file is opened in a process of its own first: what llama.cpp does not like may end a process.

A file that passed is remembered by its path, size and time, so that the second start is quick.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from hetrun import child
from hetrun.backends.llamacpp import llama, native
from hetrun.config import dirs
from hetrun.errors import HetrunError, ModelFileError
from hetrun.quant import by_name
from hetrun.stamp import Stamp, unchanged
from hetrun.whole_backend import WholeSetup

log = logging.getLogger(__name__)

LEAST_S = 60.0  # that a file has to open
SLOWEST = 20e6  # bytes per second that a disk reads
REFUSED = 3  # the exit code of a child that says on stdout what is wrong
MOST_SAID = 64 << 10  # bytes of the child's log that are read
MOST_QUOTED = 200  # characters
TROUBLE = ("GGML_ASSERT", "rror", "failed")  # a line of a log that has one of these says what went wrong
AGAIN = "get or convert it again"


def check(files: Mapping[str, Stamp]) -> None:
    """Open the file, in so many parts, in another process, unless that was done before."""
    paths = [Path(path) for path in files]
    mark = _mark(
        [(path.resolve(), s.size, s.mtime_ns) for path, s in zip(paths, files.values(), strict=True)]
    )
    if mark.exists():
        return
    with unchanged(files), tempfile.TemporaryFile() as said:
        _try(paths[0], LEAST_S + sum(s.size for s in files.values()) / SLOWEST, said)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        log.debug("%s will be tried again the next time: %s", paths[0], e)


def _mark(facts: list[tuple[Path, int, int]]) -> Path:
    """The file whose presence says that these passed, with this version of llama.cpp."""
    known = repr((facts, native.library().version))
    return dirs().cache / "opened" / hashlib.sha256(known.encode()).hexdigest()


def _try(path: Path, limit: float, said: IO[bytes]) -> None:
    """Open it, which takes at most that many seconds; ModelFileError says how it ended."""
    try:
        ended = subprocess.run(
            child.python("from hetrun.backends.libllama.trial import main; main()", str(path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(str(path), f"llama.cpp did not open it within {limit:.0f} s; {AGAIN}") from None
    if ended.returncode == 0:
        return
    if ended.returncode == REFUSED:
        reason, quoted = ended.stdout.decode(errors="replace"), _last_words(said, TROUBLE)
        raise ModelFileError(str(path), f"{reason} ({quoted})" if quoted else reason)
    if ended.returncode == -signal.SIGKILL:
        raise ModelFileError(
            str(path), "llama.cpp was killed (SIGKILL) while it opened it, mostly for want of memory"
        )
    how = (
        f"crashed ({signal.Signals(-ended.returncode).name})"
        if ended.returncode < 0
        else f"ended with code {ended.returncode}"
    )
    quoted = _last_words(said, (*TROUBLE, "")) or "it said nothing"
    raise ModelFileError(str(path), f"llama.cpp {how} when it opened it: {quoted}; {AGAIN}")


def _last_words(said: IO[bytes], signs: tuple[str, ...]) -> str:
    """The last line of llama.cpp's log that has the first sign that any line has."""
    said.seek(max(0, said.seek(0, os.SEEK_END) - MOST_SAID))
    text = said.read().decode(errors="replace")
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    for sign in signs:
        for line in reversed(lines):
            if line and sign in line:
                # Neither the function's name nor where its source lay when it was compiled.
                return re.sub(r"^(\w+: |\S*/)(error loading model: (\w+: )?)?", "", line)[:MOST_QUOTED]
    return ""


def main() -> NoReturn:
    """The child: open the file named on the command line and take one token in."""
    path = Path(sys.argv[1])
    try:
        _open(path)
    except ModelFileError as e:
        _refuse(e.reason)
    except HetrunError as e:
        _refuse(str(e))
    sys.exit(0)


def _refuse(reason: str) -> NoReturn:
    sys.stdout.write(reason)
    sys.stdout.flush()
    sys.exit(REFUSED)


def _open(path: Path) -> None:
    from hetrun.backends.libllama.runner import LlamaRunner

    llama.library().llama_log_set(None, None)  # to stderr, for the parent to quote
    runner = LlamaRunner(path, WholeSetup(64, 1, 1, 16, 16, by_name("F16")), trial=True)
    one = np.zeros(1, np.int64)
    if np.isnan(runner.run(one, one, one, np.ones(1, np.bool_))).any():
        raise ModelFileError(str(path), f"its weights give results that are no numbers; {AGAIN}")
    runner.close()
