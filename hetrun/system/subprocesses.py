"""Child processes of ours: how one begins and ends, and how one that may crash is asked about a file."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NoReturn

from hetrun.errors import BackendUnavailable, HetrunError, ModelFileError
from hetrun.system.run_queue import TimeLimit

if TYPE_CHECKING:
    import socket
    import subprocess

REFUSED, UNAVAILABLE = 3, 4  # exit codes of a child that says on stdout what is wrong
MOST_SAID = 64 << 10  # bytes of a child's log that are read
MOST_QUOTED = 200  # characters
TROUBLE = ("GGML_ASSERT", "rror", "failed")  # a line of a log that has one of these says what went wrong
AGAIN = "get or convert it again"


def python(code: str, *arguments: str) -> list[str]:
    """The command for a fresh interpreter with our module path; native libraries do not survive a fork.

    -P keeps the working directory out of the path: a json.py that lies there must not be imported.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]


def begin(
    code: str,
    out: int,
    env: Mapping[str, str] | None = None,
    own_session: bool = False,
    prefix: Sequence[str] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a child on `code`, in which {pipe} stands for its end of a pipe; the other end is ours.

    What it prints goes to `out`. In a session of its own it does not hear Ctrl-C, which goes to all of ours.
    `prefix` is a command that runs the one behind it.
    """
    import socket  # on use: whatever begins with a child of ours imports this module
    import subprocess

    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*prefix, *python(code.format(pipe=theirs.fileno()))],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=own_session,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def run(
    command: Sequence[str],
    seconds: float,
    *,
    given: bytes = b"",
    out: int | IO[bytes],
    err: int | IO[bytes],
) -> tuple[int, bytes]:
    """Run a command on `given` and return its exit code, and what it wrote if `out` is a pipe. TimeoutError,
    and its end, if it takes longer, without the time in which it had no core."""
    import subprocess
    import tempfile

    # From a file: `communicate` forgets the rest of what it sends when it is asked again.
    with tempfile.TemporaryFile() as source:
        source.write(given)
        source.seek(0)
        with subprocess.Popen(command, stdin=source, stdout=out, stderr=err) as process:
            limit = TimeLimit(seconds, process.pid)
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        said, _ = process.communicate(timeout=limit.wait_s())
                        return process.returncode, said or b""
            except BaseException:
                process.kill()
                raise


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """A process's exit code. TimeoutError if it takes longer, without the time in which it had no core."""
    import subprocess

    limit = TimeLimit(seconds, process.pid)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit.wait_s())


def ending(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), usually because memory ran out"
    names = {int(known): known.name for known in signal.Signals}
    return f"crashed ({names.get(-code, f'signal {-code}')})"


def ask(code: str, path: str, seconds: float, who: str) -> str:
    """What a child that runs `code` on a file answers; ModelFileError if the file is its end.

    `who` is the library that opens the file there, for messages.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryFile() as log:
        try:
            ended, raw = run(python(code, _for_a_child(path)), seconds, out=subprocess.PIPE, err=log)
        except TimeoutError:
            raise ModelFileError(path, f"{who} did not open it within {seconds:.0f} s; {AGAIN}") from None
        said = raw.decode(errors="replace")
        if ended == 0:
            return said
        if ended == UNAVAILABLE:
            raise BackendUnavailable(said)
        if ended == REFUSED:
            where, _, reason = said.partition("\0")
            quoted = _last_words(log, TROUBLE)
            raise ModelFileError(where, f"{reason} ({quoted})" if quoted else reason)
        raise ModelFileError(path, _reason(ended, log, who))


def _for_a_child(path: str) -> str:
    """A path through our own descriptors means other files there, or none."""
    return os.path.realpath(path) if path.startswith(("/proc/self/", "/dev/fd/", "/dev/std")) else path


def _reason(code: int, log: IO[bytes], who: str) -> str:
    if code == -signal.SIGKILL:
        return f"{who} {ending(code)} while opening the file: free some memory, or use a smaller model"
    quoted = _last_words(log, (*TROUBLE, "")) or "it said nothing"
    return f"{who} {ending(code)} while opening the file: {quoted}; {AGAIN}"


def _last_words(log: IO[bytes], signs: tuple[str, ...]) -> str:
    """The last line of a log that has the first sign that any line has."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - MOST_SAID))
    text = log.read().decode(errors="replace")
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    for sign in signs:
        for line in reversed(lines):
            if line and sign in line:
                # Neither the function's name nor where its source lay when it was compiled.
                return re.sub(r"^(\w+: |\S*/)(error loading model: (\w+: )?)?", "", line)[:MOST_QUOTED]
    return ""


def answer(work: Callable[[str], str]) -> NoReturn:
    """The child's own part: what `work` finds out of the file named on the command line, to stdout."""
    path, code = sys.argv[1], 0
    try:
        said = work(path)
    except ModelFileError as e:
        said, code = f"{e.path}\0{e.reason}", REFUSED
    except BackendUnavailable as e:
        said, code = str(e), UNAVAILABLE
    except HetrunError as e:
        said, code = f"{path}\0{e}", REFUSED
    sys.stdout.write(said)
    sys.stdout.flush()
    sys.exit(code)
