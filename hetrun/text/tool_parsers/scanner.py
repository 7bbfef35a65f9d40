"""Reading character by character in coroutines: each is sent one at a time, and keeps its place meanwhile.

How a text is cut into pieces therefore changes nothing, and each character is looked at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from hetrun.text.tool_parsers.parts import GAP, Arguments, CallStart, Piece, Thought

T = TypeVar("T")
Reading = Generator[None, str, T]

MOST_NAME = 256  # characters of a tool's name; requests may name tools with 64
SPACE = " \t\r\n"


class NotACall(Exception):
    """What looked like a call is none, and is text."""


class InvalidJson(Exception):
    """A value goes on with something that no JSON has there, such as the mark that ends the call."""

    def __init__(self, character: str) -> None:
        super().__init__(character)
        self.character = character


@dataclass
class Calls:
    """The calls of one answer, and thoughts among them. What is said of calls beyond `most` is not heard."""

    tools: Collection[str] = ()  # that the request has
    most: int | None = None
    begun: int = 0
    thoughts: int = 0  # that have begun
    spoken: bool = False  # some of the answer was text
    pieces: list[Piece] = field(default_factory=list)
    _thought: bool = False  # something was thought
    _apart: bool = False  # and what comes now belongs to another thought

    def begin(self, name: str) -> None:
        self.begun += 1
        if self._heard:
            self.pieces.append(CallStart(self.begun - 1, name))

    def say(self, text: str) -> None:
        """More of the arguments."""
        if self._heard:
            self.pieces.append(Arguments(self.begun - 1, text))

    def think(self, text: str) -> None:
        """More of a thought."""
        if self._apart:
            self.pieces.append(Thought(GAP))
        self._thought, self._apart = True, False
        self.pieces.append(Thought(text))

    def begin_thought(self) -> None:
        """Another thought begins, apart from what was thought before."""
        self.thoughts += 1
        self._apart = self._thought

    @property
    def _heard(self) -> bool:
        return self.most is None or self.begun <= self.most


def skip_space() -> Reading[str]:
    """The next character that is no space."""
    while (c := (yield)) in SPACE:
        pass
    return c


def line_until(ends: str, most: int = MOST_NAME) -> Reading[tuple[str, str]]:
    """A short text, and which of these characters ended it."""
    text: list[str] = []
    while (c := (yield)) not in ends:
        text.append(c)
        if len(text) > most:
            raise NotACall
    return "".join(text), c


def expect(text: str, first: str | None = None) -> Reading[str]:
    """Read this text; what was read instead, where it is another."""
    read = ""
    while read != text:
        if first is None:
            first = yield
        read += first
        first = None
        if not text.startswith(read):
            return read
    return ""


def until(mark: str, say: Callable[[str], None], most: int | None = None) -> Reading[None]:
    """Everything in front of a mark, which must not begin like its own end."""
    matched = told = 0
    while matched < len(mark):
        c = yield
        if c != mark[matched] and matched:
            say(mark[:matched])
            told += matched
            matched = 0
        if c == mark[matched]:
            matched += 1
        else:
            say(c)
            told += 1
        if most is not None and told > most:
            raise NotACall


def string(most: int | None = None) -> Reading[str]:
    """The rest of a JSON string, whose opening quote was read, decoded."""
    raw: list[str] = []
    while (c := (yield)) != '"':
        raw.append(c)
        if c == "\\":
            raw.append((yield))
        if most is not None and len(raw) > most:
            raise NotACall
    try:
        return str(json.loads(f'"{"".join(raw)}"', strict=False))
    except ValueError:
        raise NotACall from None


def value(c: str, say: Callable[[str], None]) -> Reading[str]:
    """A JSON value that begins with this character, as it stands; the character behind it, if it was needed.

    Brackets and strings are looked at; the program that gets the arguments parses the rest. Line ends in a
    string, which models write and JSON does not have, are escaped.
    """
    if c == '"':
        say(c)
        yield from raw_string(say)
        return ""
    if c not in "{[":
        return (yield from _scalar(c, say))
    depth = 1
    say(c)
    while depth:
        c = yield
        if c == "<":
            raise InvalidJson(c)
        say(c)
        if c == '"':
            yield from raw_string(say)
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
    return ""


def raw_string(say: Callable[[str], None]) -> Reading[None]:
    """The rest of a JSON string, as it stands."""
    while (c := (yield)) != '"':
        say(c if c >= " " else json.dumps(c)[1:-1])
        if c == "\\":
            say((yield))
    say(c)


def _scalar(c: str, say: Callable[[str], None]) -> Reading[str]:
    if not (c.isalnum() or c == "-"):
        raise InvalidJson(c)
    while c.isalnum() or c in "+-.":
        say(c)
        c = yield
    return c
