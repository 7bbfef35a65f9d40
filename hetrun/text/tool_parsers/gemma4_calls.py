"""What Gemma 4 writes between its marks: calls, whose arguments become JSON as they come, and thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from hetrun.text.tool_parsers.gemma4 import CALL_END, CALLED, CHANNEL, CHANNEL_END, QUOTE, THINKING
from hetrun.text.tool_parsers.json_calls import closing
from hetrun.text.tool_parsers.lookahead import Margin
from hetrun.text.tool_parsers.parts import GAP
from hetrun.text.tool_parsers.scanner import (
    MOST_NAME,
    SPACE,
    Calls,
    InvalidJson,
    NotACall,
    Reading,
    expect,
    line_until,
    raw_string,
    skip_space,
    string,
    until,
)
from hetrun.text.tool_parsers.tagged_calls import WORDS, Types

Say = Callable[[str], None]

ENDS = ",]}<\n"  # of a value that no mark ends
AS_IN_JSON = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")


def gemma4_call(calls: Calls, types: Types) -> Reading[str]:
    """What follows `<|tool_call>`: `call:NAME{...}<tool_call|>`."""
    if (yield from expect(CALLED, (yield from skip_space()))):
        raise NotACall
    name, end = yield from line_until("{<\n")
    if end != "{" or not name.strip():
        raise NotACall
    calls.begin(name.strip())
    try:
        yield from _members(calls.say)
    except InvalidJson as broken:
        return (yield from closing(broken.character, CALL_END))
    return (yield from closing(" ", CALL_END))


def gemma4_thought(calls: Calls, types: Types) -> Reading[str]:
    """What follows `<|channel>`, if that is a thought; models write that mark twice now and then."""
    while (c := (yield)) == CHANNEL[0]:
        if (yield from expect(CHANNEL, c)):
            raise NotACall
    if (yield from expect(THINKING, c)):
        raise NotACall
    return (yield from opened_thought(calls, types))


def opened_thought(calls: Calls, types: Types) -> Reading[str]:
    """The rest of a thought. Space around it is none; texts before and after it are apart."""
    calls.begin_thought()
    thinking = _Thinking(calls)
    try:
        while not thinking.take((yield)):
            pass
    except GeneratorExit:  # the answer ends here, and what may begin a mark does not
        thinking.finish()
        raise
    c = yield from skip_space()
    return GAP + c if calls.spoken else c


class _Thinking:
    """A thought up to its mark, or as much of it as there is."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._margin = Margin([CHANNEL_END])
        self._begun = False

    def take(self, c: str) -> bool:
        """Take a character; whether it ends the thought."""
        ended = self._margin.take(c) is not None
        self._tell()
        return ended

    def finish(self) -> None:
        self._margin.finish()
        self._tell()

    def _tell(self) -> None:
        if self._margin.certain:
            self._calls.think("".join(self._margin.certain))
            self._begun = True
        elif not self._begun:
            self._margin.space = []  # before the first word
        self._margin.certain = []


def _members(say: Say) -> Reading[None]:
    """An object of which the first brace was read. What it holds is kept in a list: no depth is too much."""
    say("{")
    inside, first = ["}"], True  # what ends each list and object, and whether nothing is in the last one
    c = yield from skip_space()
    while inside:
        if c == inside[-1]:
            say(inside.pop())
            if not inside:
                return
            c = yield from skip_space()
        else:
            before = "" if first else ", "
            if inside[-1] == "}":
                key = yield from _key(c)
                say(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
                c = yield from skip_space()
            elif c != "}":
                say(before)
            if c in "{[":
                say(c)
                inside.append("}" if c == "{" else "]")
                first, c = True, (yield from skip_space())
                continue
            rest = yield from _value(c, say)
            c = rest if rest and rest not in SPACE else (yield from skip_space())
        first = False
        if c == ",":
            c = yield from skip_space()
        elif c not in "]}":
            raise InvalidJson(c)


def _key(c: str) -> Reading[str]:
    """A key and its colon. It has no quotes, but what has some is read."""
    if c in QUOTE[0] + '"':
        if c == '"':
            key = yield from string(MOST_NAME)
        else:
            yield from _quote(c)
            parts: list[str] = []
            yield from until(QUOTE, parts.append, MOST_NAME)
            key = "".join(parts)
        if (c := (yield from skip_space())) != ":":
            raise InvalidJson(c)
        return key
    key, end = "", c
    if c not in ":" + ENDS:
        key, end = yield from line_until(":" + ENDS)
    if end != ":":
        raise InvalidJson(end)
    return (c + key).strip()


def _value(c: str, say: Say) -> Reading[str]:
    """A value that is no list and no object, as JSON; the character after it, if it was needed."""
    if c == QUOTE[0]:
        yield from _quote(c)
        say('"')
        yield from until(QUOTE, lambda text: say(json.dumps(text, ensure_ascii=False)[1:-1]))
        say('"')
        return ""
    if c == '"':
        say(c)
        yield from raw_string(say)
        return ""
    parts: list[str] = []
    while c not in ENDS:
        parts.append(c)
        c = yield
    text = "".join(parts).strip()
    if not text:
        raise InvalidJson(c)
    say(_scalar(text))
    return c


def _quote(c: str) -> Reading[None]:
    if other := (yield from expect(QUOTE, c)):
        raise InvalidJson(other)


def _scalar(text: str) -> str:
    """What stands without marks: JSON's numbers and words, Python's words, or a text that lacks its marks."""
    if AS_IN_JSON.fullmatch(text):
        return text
    return json.dumps(WORDS.get(text, text), ensure_ascii=False)
