"""Answers that are messages with headers (gpt-oss' harmony, Muse's): thoughts, text for people, and calls."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from hetrun.text.detokenizer import StopStrings
from hetrun.text.tool_parsers.dialect import ASSISTANT, MESSAGE, START, Dialect, Header, Kind
from hetrun.text.tool_parsers.harmony import CHANNEL, FUNCTIONS, HARMONY
from hetrun.text.tool_parsers.json_calls import STRAY
from hetrun.text.tool_parsers.parts import GAP, Piece, Prose, Thought, joined
from hetrun.text.tool_parsers.scanner import Calls, InvalidJson, Reading, value

TO = "to="
MOST_HEADER = 512  # characters: a name of 256 and some words
BETWEEN_MARKS = re.compile(f"({'|'.join(map(re.escape, HARMONY.marks))})")  # others have fewer in headers


def header_of(written: str) -> Header:
    """What a header says; it may name several channels, of which the last one counts."""
    role = channel = recipient = ""
    place = START
    for part in BETWEEN_MARKS.split(written):
        if part in HARMONY.marks:
            place = part
            continue
        words = part.split()
        recipient = next((word.removeprefix(TO) for word in words if word.startswith(TO)), recipient)
        word = next((word for word in words[:1] if not word.startswith(TO)), "")
        if place == CHANNEL:
            channel = word or channel
        elif place == START:
            role = word or role
    return Header(role or ASSISTANT, channel, recipient)


class ChannelReader:
    """Takes an answer's text piece by piece and gives what is certain of it.

    A header is looked for where one may stand: at the beginning, after a message, and within one that has no
    end. What begins like one and is none is text, as it was written; but one that the answer's end cuts off
    says nothing, and is left out. A last message (`final`) may speak of marks: only an end that a header or
    nothing follows ends it.
    """

    def __init__(
        self,
        tools: Collection[str] | None = (),
        most: int | None = None,
        raw: bool = False,
        dialect: Dialect = HARMONY,
        resumed: bool = False,
    ) -> None:
        """`tools`: None where calls stay text. `most` calls are given at most; `raw`: all but calls stays as
        it was written; `resumed`: the answer continues a message, whose beginning the client has."""
        self._resumed = resumed
        self._dialect, self._ends, self._all_marks = dialect, dialect.ends, dialect.marks
        self._calls = Calls(tools or (), most)
        self._looks = tools is not None
        self._raw = raw
        self._marks = StopStrings(dialect.marks)
        self._state = 0
        self._held = ""  # may begin a mark
        self._place: Literal["begin", "header", "body", "after"] = "begin"
        self._end: list[str] = []  # an end that may be none, and space
        self._lead = ""  # at the beginning: may be TO
        self._header: list[str] = []  # as it was written
        self._size = 0  # of it
        self._kind: Kind = "text"  # of the message, and
        self._last = False  # whether it is of the last channel
        self._written = raw  # whether it is given as it was written, with its marks
        self._fresh = False  # whether nothing of it was told
        self._space: list[str] = []  # that may be at the end of a thought
        self._said: set[Kind] = set()
        self._value: Reading[str] | None = None  # the arguments of a call

    @property
    def begun(self) -> int:
        """Calls so far."""
        return self._calls.begun

    def open(self) -> None:
        """The prompt has begun a thought."""
        self._place, self._kind = "body", "text" if self._raw else "thought"
        self._fresh = not self._resumed

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        at = 0
        while at < len(text):
            at = self._step(text, at)
        return self._taken()

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        if self._value is not None:
            self._value.close()
            self._value = None
        held, self._held = self._held, ""
        match self._place:
            case "begin":
                self._stray(self._lead + held)
            case "body":
                self._text(held)
            case "header" if self._raw or not any(part in self._all_marks for part in self._header):
                self._header.append(held)
                self._no_header()
            case "after" if self._raw:
                self._stray(held)
        self._close()
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._calls.pieces = joined(self._calls.pieces), []
        return pieces

    # --- characters

    def _step(self, text: str, at: int) -> int:
        """Take some of a text; where the rest begins."""
        c = text[at]
        if self._value is not None:
            self._send(self._value, c)
        elif self._held or c == "<":
            self._take(c)
        elif self._place == "body" and self._kind == "call" and self._fresh:
            self._begin_arguments(c)
        elif self._place == "begin":
            self._begin(c)
        else:
            # No mark begins before the next of these: all of it at once.
            end = text.find("<", at)
            end = len(text) if end < 0 else end
            self._text(text[at:end])
            return end
        return at + 1

    def _take(self, c: str) -> None:
        """A character that a mark may begin with, or go on."""
        self._held += c
        self._state = self._marks.after(self._state, c)
        found = self._marks.found[self._state]
        hold = len(found) if found is not None else self._marks.depth[self._state]
        said = self._held[: len(self._held) - hold]
        self._held = self._held[len(said) :]
        if said:
            self._text(said)
        if found is not None:
            self._held, self._state = "", 0
            self._mark(found)

    def _begin_arguments(self, c: str) -> None:
        """JSON is read as such, and may have marks in its texts; anything else goes on to the next mark."""
        if c.isspace():
            return
        self._fresh = False
        if c in "{[":
            self._value = value(c, self._calls.say)
            next(self._value)
        else:
            self._text(c)

    def _send(self, reading: Reading[str], c: str) -> None:
        try:
            reading.send(c)
        except StopIteration:
            self._complete()
        except InvalidJson as broken:
            self._complete()
            self._take(broken.character)

    def _complete(self) -> None:
        """Arguments have come to their end, with or without a mark."""
        self._value, self._place, self._end = None, "after", [""]

    # --- texts and marks, wherever they stand

    def _text(self, text: str) -> None:
        match self._place:
            case "begin":
                for c in text:
                    self._begin(c)
            case "body":
                self._say(text)
            case "header":
                self._header.append(text)
                self._size += len(text)
                if self._size > MOST_HEADER or "\n" in text:
                    self._no_header()
            case "after":
                rest = text.lstrip(STRAY if self._kind == "call" else None)
                if len(rest) < len(text):
                    self._end.append(text[: len(text) - len(rest)])
                if rest:
                    self._stray(rest)

    def _begin(self, c: str) -> None:
        """The beginning, where the rest of a header may stand: the recipient, or a mark."""
        if self._place != "begin":
            self._text(c)
        elif not self._lead and c.isspace():
            self._end.append(c)
        elif not TO.startswith(self._lead + c):
            self._stray(self._lead + c)
        else:
            self._lead += c
            if self._lead == TO:
                self._place, self._header, self._size = "header", [TO], len(TO)

    def _mark(self, mark: str) -> None:
        match self._place:
            case "header":
                self._mark_in_header(mark)
            case "body":
                if mark in self._ends:
                    self._end_message(mark)
                elif mark in (START, CHANNEL) and not self._last:
                    self._open(mark)
                else:
                    self._text(mark)
            case "begin" if self._lead:
                self._stray(self._lead)
                self._mark(mark)
            case _ if mark in self._ends:
                self._end.append(mark)
            case _:
                self._open(mark)

    def _mark_in_header(self, mark: str) -> None:
        if mark in self._ends or mark == START:
            self._no_header()
            self._mark(mark)
            return
        self._header.append(mark)
        self._size += len(mark)
        if mark == MESSAGE:
            self._message()
        elif self._size > MOST_HEADER:
            self._no_header()

    # --- messages

    def _open(self, mark: str) -> None:
        """A header begins."""
        self._place, self._header, self._size = "header", [], 0
        if mark == START:
            self._header, self._size = [mark], len(mark)
        else:
            self._mark_in_header(mark)

    def _message(self) -> None:
        """A header is complete."""
        written, self._header = "".join(self._header), []
        end, self._end = "" if self._kind == "call" else "".join(self._end), []
        found = header_of(written)
        kind = self._dialect.kind(found)
        self._close()
        ours = found.role == ASSISTANT
        called = ours and self._looks and kind == "call"
        self._place, self._fresh = "body", True
        self._last = ours and self._dialect.is_last(found)
        self._written = not called and (self._raw or not ours or kind == "call")
        # Where a call stands between tags, who looks for these in texts finds it.
        tagged = called and self._dialect.tagged
        self._kind = "text" if self._written or tagged else kind
        if self._raw:
            self._tell("text", end)
        if called and not tagged:
            self._calls.begin(found.recipient.removeprefix(FUNCTIONS))
        elif self._written:
            self._tell("text", written)

    def _end_message(self, mark: str) -> None:
        """The end of a message, unless text follows."""
        self._place = "after"
        self._close()
        if self._written and self._kind != "call":
            self._tell("text", mark)
        else:
            self._end.append(mark)

    def _close(self) -> None:
        """Nothing more comes of a message: a call without arguments has none."""
        self._space = []
        if self._kind == "call" and self._fresh:
            self._fresh = False
            self._calls.say("{}")

    def _no_header(self) -> None:
        """What began like a header is none."""
        header, self._header = self._header, []
        self._stray("".join(header))

    def _stray(self, text: str) -> None:
        """Text where a header was looked for: it goes on with a text, but not with what has ended."""
        self._place, self._lead = "body", ""
        end, self._end = self._end, []
        if self._kind == "text":
            text = "".join(end) + text
        elif end:
            self._kind, self._last, self._fresh, self._written = "text", False, True, self._raw
        if text:
            self._say(text)

    def _say(self, text: str) -> None:
        """More of a message. Space around a thought is none."""
        if self._kind == "text":
            self._tell("text", text)
            return
        if self._fresh:
            text = text.lstrip()
        said = text.rstrip()
        if said:
            self._tell(self._kind, "".join((*self._space, said)))
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _tell(self, kind: Kind, text: str) -> None:
        if not text:
            return
        fresh, self._fresh = self._fresh, False
        if kind == "call":
            self._calls.say(text)
            return
        if fresh and kind in self._said and not self._raw:
            text = GAP + text
        self._said.add(kind)
        self._calls.pieces.append(Prose(text) if kind == "text" else Thought(text))
