"""Text on standard input: a prompt, or what a prompt is about."""

from __future__ import annotations

import select
import sys

from hetrun.cli.output import say
from hetrun.errors import UserError
from hetrun.system.units import format_bytes

MOST_PROMPT = 64 << 20  # bytes: far more than any context holds
PATIENCE_S = 3.0  # without a byte on an open pipe, before the command says what it waits for


def has_text() -> bool:
    """Whether standard input may have text: it is open, and no terminal."""
    try:
        return sys.stdin is not None and not sys.stdin.isatty()
    except ValueError:  # it was closed
        return False


def read_text() -> str:
    """All of it, without the line end that a shell adds; UserError where it is no text."""
    _say_what_is_awaited()
    raw = sys.stdin.buffer.read(MOST_PROMPT + 1)
    if len(raw) > MOST_PROMPT:
        raise UserError(f"the prompt on stdin is longer than {format_bytes(MOST_PROMPT)}")
    try:
        return raw.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise UserError(
            f"the prompt on stdin is not UTF-8 text: byte {e.start} is {raw[e.start]:#x}"
        ) from None


def text_beside_a_prompt() -> str:
    """What was piped in addition to a prompt; nothing where stdin is closed, empty, or cannot be read."""
    if not has_text():
        return ""
    try:
        text = read_text()
    except OSError:
        return ""
    return text if text.strip() else ""


def _say_what_is_awaited() -> None:
    """A program that starts others often leaves them an open pipe without a writer."""
    try:
        ready, _, _ = select.select([sys.stdin.buffer], [], [], PATIENCE_S)
    except (OSError, ValueError):  # it is no file of the system's
        return
    if not ready:
        say("waiting for text on standard input; run it with < /dev/null if there is none")
