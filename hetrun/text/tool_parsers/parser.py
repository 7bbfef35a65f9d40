"""One answer as it comes: text, and calls of tools in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hetrun.text.tool_parsers.formats import Format
from hetrun.text.tool_parsers.json_calls import json_calls
from hetrun.text.tool_parsers.lookahead import Margin
from hetrun.text.tool_parsers.parts import Piece, Prose, joined
from hetrun.text.tool_parsers.scanner import Calls, NotACall, Reading
from hetrun.text.tool_parsers.tagged_calls import types_of


class CallReader:
    """Takes an answer's text piece by piece and gives what is certain of it.

    Text that may begin a call is held back. Once the name of a call is known, and its arguments begin, it is
    a call and stays one: arguments then come as the model writes them, and what is cut off stays cut off.
    What ends before that, or turns out to be something else, is text as it was written. Space around calls
    is none.
    """

    def __init__(
        self, format: Format, tools: Mapping[str, Mapping[str, Any]] | None = None, most: int | None = None
    ) -> None:
        """`tools` are the schemas of arguments by names, `most` the calls that are given at most."""
        self._format = format
        self._types = types_of(tools or {})
        self._calls = Calls(_names(tools), most)
        self._margin = Margin([*format.bodies, *format.noise])
        self._fresh = True  # nothing but space has come
        self._body: Reading[str] | None = None
        self._raw: list[str] = []  # what a call was read from that may turn out to be none
        self._before = 0  # calls and thoughts that had begun before this one

    @property
    def begun(self) -> int:
        """Calls so far."""
        return self._calls.begun

    def open(self) -> None:
        """The prompt has begun a thought, in which the answer goes on."""
        if self._format.opened is not None:
            self._fresh = False
            self._open(self._format.opened(self._calls, self._types), "")

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        if self._body is not None or self._fresh or not self._margin.quick(text):
            for c in text:
                self._take(c)
        return self._taken()

    def cut(self) -> None:
        """There is no more, because a limit was reached: after a call, half a mark of the next one is no
        text."""
        if not self._calls.begun:
            return
        self._margin.drop()
        if self._body is not None and self._begun == self._before:
            self._body.close()
            self._body = None

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        self._margin.finish()
        if self._body is not None:
            self._body.close()
            self._body = None
            if self._begun == self._before:
                self._margin.say("".join(self._raw))
        pieces = self._taken()
        return pieces if self._calls.begun else joined([*pieces, *map(Prose, self._margin.space)])

    @property
    def _begun(self) -> int:
        return self._calls.begun + self._calls.thoughts

    def _taken(self) -> list[Piece]:
        self._text()
        pieces, self._calls.pieces = joined(self._calls.pieces), []
        return pieces

    def _text(self) -> None:
        """Text that became certain, in its place among the calls."""
        self._calls.pieces += map(Prose, self._margin.certain)
        self._calls.spoken = self._calls.spoken or bool(self._margin.certain)
        self._margin.certain = []

    def _take(self, c: str) -> None:
        if self._body is not None:
            self._send(self._body, c)
            return
        if self._fresh and not c.isspace():
            self._fresh = False
            if self._format.bare and c == "{":
                self._open(json_calls(self._calls, bare=True), "")
                self._take(c)
                return
        found = self._margin.take(c)
        if found is not None and found not in self._format.noise:
            self._open(self._format.bodies[found](self._calls, self._types), found)

    def _open(self, body: Reading[str], mark: str) -> None:
        self._text()
        self._before = self._begun
        self._raw = [*self._margin.space, mark]
        self._margin.space = []
        self._body = body
        next(body)

    def _send(self, body: Reading[str], c: str) -> None:
        undecided = self._begun == self._before
        if undecided:
            self._raw.append(c)
        try:
            body.send(c)
        except StopIteration as done:
            self._body, rest = None, done.value
        except NotACall:
            self._body, rest = None, ""
            if undecided:
                # Nothing that was read is read again, but for the last character: no text takes long.
                self._margin.say("".join(self._raw[:-1]))
                rest = c
        else:
            return
        for c in rest:
            self._take(c)


def _names(tools: Mapping[str, Mapping[str, Any]] | None) -> Collection[str]:
    return frozenset(tools or ())
