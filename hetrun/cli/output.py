"""What the command says: results as JSON, remarks on stderr."""

from __future__ import annotations

import sys
from threading import RLock

from hetrun.errors import printable
from hetrun.system.terminal_text import visible


class AnswerText:
    """The text on stdout that comes piece by piece, and remarks of other threads that come meanwhile."""

    def __init__(self) -> None:
        self._lock = RLock()  # of the terminal: a signal's handler may say something, too
        self._open = False  # the last line is not ended
        self._apart = False  # it is where remarks come, too: both are a terminal

    def write(self, text: str) -> None:
        """The next piece, at once."""
        if not text:
            return
        is_terminal = sys.stdout.isatty()
        with self._lock:
            self._open = not text.endswith("\n")
            self._apart = is_terminal and sys.stderr.isatty()
            sys.stdout.write(visible(text) if is_terminal else text)
            sys.stdout.flush()

    def end(self) -> None:
        """No more pieces: the last line ends, if it has not."""
        with self._lock:
            was_open, self._open = self._open, False
            if was_open:
                sys.stdout.write("\n")

    def remark(self, line: str) -> None:
        """A line of stderr; it does not continue a line of the text."""
        if not self._apart:
            print(line, file=sys.stderr)
            return
        with self._lock:
            begin = "\n" if self._open else ""
            self._open = False
            print(f"{begin}{line}", file=sys.stderr)


ANSWER = AnswerText()


def say(text: str) -> None:
    """A remark or an error, on one line of stderr."""
    ANSWER.remark(f"hetrun: {printable(text)}")


def in_json(value: object, indent: int | None = None) -> str:
    """JSON that can be read: only what a terminal would obey, or not show, is escaped."""
    import json

    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
