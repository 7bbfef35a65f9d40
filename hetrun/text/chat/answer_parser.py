"""One answer as it comes: thoughts, text and calls of tools."""

from __future__ import annotations

from typing import Protocol

from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import Piece, Prose, joined


class Divider(Protocol):
    """What takes thoughts out of an answer, and perhaps calls: `ThoughtSplitter`, `ChannelReader`, or a
    `CallReader` for a format with thoughts."""

    @property
    def begun(self) -> int:
        """Calls so far."""
        ...

    def open(self) -> None:
        """The prompt has begun a thought, in which the answer goes on."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        ...


class AnswerReader:
    """What an answer is made of. How it is cut into pieces changes when something comes, never what."""

    def __init__(self, divider: Divider | None, calls: CallReader | None) -> None:
        """`calls` are looked for in the text that the divider leaves."""
        self._divider = divider
        self._calls = calls

    @property
    def calls(self) -> int:
        """Calls of tools so far."""
        return sum(reader.begun for reader in (self._divider, self._calls) if reader)

    def open(self) -> None:
        """The prompt has begun a thought, in which the answer goes on."""
        if self._divider:
            self._divider.open()

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        return self._read(self._divider.push(text) if self._divider else [Prose(text)])

    def cut(self) -> None:
        """There is no more, because a limit was reached."""
        for reader in (self._divider, self._calls):
            if isinstance(reader, CallReader):
                reader.cut()

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        pieces = self._read(self._divider.finish() if self._divider else [])
        return pieces + (self._calls.finish() if self._calls else [])

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return joined(pieces)
        out: list[Piece] = []
        for piece in pieces:
            out += self._calls.push(piece.text) if isinstance(piece, Prose) else [piece]
        return out
