"""Compiling in a child process first what may take all time, memory or stack.

What passes the trial costs as much here as it did there, so it may be compiled in this process.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from hetrun.errors import OptionError
from hetrun.sampling.grammar.to_lark import LarkText
from hetrun.system.subprocesses import REFUSED, python, run
from hetrun.system.threads import with_stack

SECONDS = 1.5  # of processor time, to compile and to find the place of a fault
PATIENCE_S = 30.0  # by the clock on the wall, without the time in which it had no core
MOST_MEMORY = 1 << 30  # of address space, 100 MiB of it the interpreter's
STACK = 32 << 20  # bytes, of the thread that compiles; half of that in a child


def try_out(spelled: LarkText, n_tokens: int, control: Mapping[int, str]) -> None:
    """Compile in a child; OptionError if that fails, or is the child's end.

    A grammar may name the control tokens, and others by their numbers.
    """
    asked = {"spelled": asdict(spelled), "n_tokens": n_tokens, "control": list(control.items())}
    too_much = OptionError(f"{spelled.kind}: it takes too much time or memory to compile; make it simpler")
    try:
        ended, said = run(
            python("from hetrun.sampling.grammar.sandbox import main; main()"),
            PATIENCE_S,
            given=json.dumps(asked).encode(),
            out=subprocess.PIPE,
            err=subprocess.DEVNULL,
        )
    except TimeoutError:
        raise too_much from None
    if ended == REFUSED:
        raise OptionError(said.decode())
    if ended:
        raise too_much


def main() -> None:
    """The child's own part."""
    from hetrun.sampling.grammar.compiler import compile_spelled, make_tokenizer

    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, also in the middle of a call
    pieces, control = _sketch(asked["n_tokens"], dict(asked["control"]))
    try:
        with_stack(
            STACK // 2, lambda: compile_spelled(make_tokenizer(pieces, control), LarkText(**asked["spelled"]))
        )
    except OptionError as error:
        sys.stdout.write(str(error))
        sys.stdout.flush()
        sys.exit(REFUSED)


def _sketch(n_tokens: int, control: Mapping[int, str]) -> tuple[list[bytes], set[int]]:
    """A vocabulary that compiles the same grammars: the real one's size and names, and every byte."""
    pieces = [b""] * n_tokens
    for token, text in control.items():
        pieces[token] = text.encode()
    free = (token for token in range(n_tokens) if token not in control)
    for byte, token in zip(range(256), free, strict=False):
        pieces[token] = bytes([byte])
    return pieces, set(control)
