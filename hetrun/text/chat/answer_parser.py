"""One answer as it comes: thoughts, text and calls of tools."""

from __future__ import annotations

from hetrun.text.chat.reasoning import ThoughtSplitter
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import Piece, Text, joined


class AnswerReader:
    """What an answer is made of. How it is cut into pieces changes when something comes, never what."""

    def __init__(self, thoughts: ThoughtSplitter | None, calls: CallReader | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def calls(self) -> int:
        """Calls of tools so far."""
        return self._calls.begun if self._calls else 0

    def open(self) -> None:
        """The prompt has begun a thought, in which the answer goes on."""
        if self._thoughts:
            self._thoughts.open()

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        return self._read(self._thoughts.push(text) if self._thoughts else [Text(text)])

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        pieces = self._read(self._thoughts.finish() if self._thoughts else [])
        return pieces + (self._calls.finish() if self._calls else [])

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return joined(pieces)
        out: list[Piece] = []
        for piece in pieces:
            out += self._calls.push(piece.text) if isinstance(piece, Text) else [piece]
        return out
