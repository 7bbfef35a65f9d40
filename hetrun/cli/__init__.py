"""The `hetrun` command: one function for each subcommand, everything heavy imported inside it.

stdout carries results only; progress and remarks go to stderr. Exit codes: 0 done, 1 our fault, 2 the user's
input was wrong, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

from hetrun.cli.exit_codes import OUR_FAULT, STOPPED, WRONG_INPUT
from hetrun.cli.output import say
from hetrun.errors import SystemFault, UserError

# What a disk, a quota or a file system says when it takes no more; nothing that a program could mend.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


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
    except SystemFault as e:
        say(str(e))
        return OUR_FAULT
    except (BrokenPipeError, SystemExit):
        # The program that read our output has closed it: no error (click makes it a SystemExit).
        # Python would complain at exit that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (KeyboardInterrupt, Abort):
        return STOPPED
    except OSError as e:
        if e.errno not in DISK:
            return _our_fault(e, verbose="-v" in arguments or "--verbose" in arguments)
        say(f"{e.filename or 'the output'} cannot be written: {e.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try once more, and complain
        return WRONG_INPUT
    except Exception as e:
        if _came_of_ctrl_c(e):
            return STOPPED
        return _our_fault(e, verbose="-v" in arguments or "--verbose" in arguments)


def _came_of_ctrl_c(error: Exception) -> bool:
    """Python 3.11 makes a RuntimeError of one that comes while a class is made, as on imports."""
    return isinstance(error.__cause__ or error.__context__, KeyboardInterrupt)


class RemarkHandler(logging.Handler):
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


REMARKS = RemarkHandler()


def say_more() -> Callable[[], None]:
    """What was decided, too; how to say as much as before again."""
    logger = logging.getLogger("hetrun")
    before = logger.level, REMARKS.level

    def as_before() -> None:
        logger.setLevel(before[0])
        REMARKS.setLevel(before[1])

    logger.setLevel(logging.INFO)
    REMARKS.setLevel(logging.INFO)
    return as_before


def _our_fault(error: Exception, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exception(error)
    hint = "" if verbose else "; run it again with -v and report what it prints"
    say(f"something went wrong inside hetrun: {type(error).__name__}: {error}{hint}")
    return OUR_FAULT
