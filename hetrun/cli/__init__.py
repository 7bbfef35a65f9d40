"""The `hetrun` command: one function for each subcommand, everything heavy imported inside it.

stdout carries results only; progress and remarks go to stderr. Exit codes: 0 done, 1 our fault, 2 the user's
input was wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from hetrun.errors import UserError, printable

WRONG_INPUT, OUR_FAULT, STOPPED = 2, 1, 130


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal has every letter
    logging.getLogger("hetrun").addHandler(REMARKS)
    try:
        code = exit_code(sys.argv[1:])
    except KeyboardInterrupt:  # while it was imported
        code = STOPPED
    if code == STOPPED:
        _leave()
    sys.exit(code)


def _leave() -> NoReturn:
    """Who stops us does not wait for what other threads do, such as compiling a grammar."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(STOPPED)


def exit_code(arguments: list[str]) -> int:
    """The exit code of a command line; errors are one sentence on stderr."""
    from click import Abort, ClickException

    from hetrun.cli.app import run_command

    try:
        code = run_command(arguments)
        sys.stdout.flush()
        return code
    except ClickException as e:
        e.show()  # options that do not exist, arguments that are missing
        return WRONG_INPUT
    except UserError as e:
        if str(e) not in REMARKS.said:
            say(str(e))
        return WRONG_INPUT
    except (BrokenPipeError, SystemExit):
        # Whoever read our results has seen enough: no error (click makes a SystemExit of it).
        # Python would complain at exit that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (KeyboardInterrupt, Abort):
        return STOPPED
    except Exception as e:
        return _our_fault(e, verbose="-v" in arguments or "--verbose" in arguments)


class Remarks(logging.Handler):
    """Warnings as remarks of the command. What was said as one is not said again as an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.add(text := record.getMessage())
        say(text)
        if record.exc_info and record.exc_info[1]:
            import traceback  # on use: few warnings have one

            traceback.print_exception(record.exc_info[1])


REMARKS = Remarks()


def heed_sigterm() -> None:
    """From now on a polite end is like Ctrl-C: the command takes its unfinished file with it."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """A remark or an error, on one line of stderr."""
    print(f"hetrun: {printable(text)}", file=sys.stderr)


def in_json(value: object, indent: int | None = None) -> str:
    """JSON that can be read: only what a terminal would obey, or not show, is escaped."""
    import json

    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _our_fault(error: Exception, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exception(error)
    hint = "" if verbose else "; run it again with -v and report what it prints"
    say(f"something went wrong inside hetrun: {type(error).__name__}: {error}{hint}")
    return OUR_FAULT
