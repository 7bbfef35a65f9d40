"""Calls as JSON: an object with a name and arguments, several of them, or a list."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hetrun.text.tool_parsers.scanner import (
    MOST_NAME,
    SPACE,
    Calls,
    InvalidJson,
    NotACall,
    Reading,
    expect,
    skip_space,
    string,
    value,
)

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
OTHERS = ("id", "type")  # what a call may say besides
STRAY = SPACE + "}]`"  # what models write too much of behind a call


@dataclass
class _Half:
    """A call of which not everything was read."""

    name: str = ""
    arguments: str | None = None  # came before the name
    told: bool = False


def json_calls(calls: Calls, close: str = "", *, bare: bool = False, first: str = "") -> Reading[str]:
    """Calls until the closing mark; what was read beyond them.

    `bare` ones stand without a mark, where any other JSON might: only the tools of the request can be called,
    and nothing may stand there that no call has. `first` was read already.
    """
    before = calls.begun
    c = first or (yield from skip_space())
    array = c == "["
    if array:
        c = yield from skip_space()
    try:
        while c == "{":
            yield from _one(calls, bare)
            c = yield from skip_space()
            if c in ",;":
                c = yield from skip_space()
    except InvalidJson as broken:
        c = broken.character
    except NotACall:
        if calls.begun == before:
            raise
        return ""
    if calls.begun == before:
        raise NotACall
    if array and c == "]":
        if not close:
            return ""
        c = yield from skip_space()
    return (yield from closing(c, close)) if close else c


def closing(c: str, close: str) -> Reading[str]:
    """What follows a call's arguments up to its closing mark; another text is the answer's again."""
    while c in STRAY:
        c = yield
    return (yield from expect(close, c))


def _one(calls: Calls, bare: bool) -> Reading[None]:
    half = _Half()
    yield from _members(half, calls, bare)
    if half.told:
        return
    if not half.name or (bare and half.arguments is None):
        raise NotACall
    calls.begin(half.name)
    calls.say(half.arguments or "{}")


def _members(half: _Half, calls: Calls, bare: bool, inner: bool = False) -> Reading[None]:
    c = yield from skip_space()
    while c != "}":
        if c != '"':
            raise InvalidJson(c) if half.told else NotACall
        key = yield from string(MOST_NAME)
        if (yield from skip_space()) != ":":
            raise NotACall
        c = yield from skip_space()
        rest = ""
        if key in NAMES and c == '"' and not half.name:
            half.name = yield from string(MOST_NAME)
            _check_name(half.name, calls, bare)
            _tell_arguments(half, calls)
        elif key == "function" and c == "{" and not inner:
            yield from _members(half, calls, bare, inner=True)
        elif key in ARGUMENTS and not half.told:
            rest = yield from _arguments(c, half, calls)
        elif bare and key not in OTHERS:
            raise NotACall
        else:
            rest = yield from value(c, _ignore)
        c = rest if rest and rest not in SPACE else (yield from skip_space())
        if c == ",":
            c = yield from skip_space()


def _arguments(c: str, half: _Half, calls: Calls) -> Reading[str]:
    """The arguments: told as they come where the name is known."""
    if c == '"':  # JSON in a string, as OpenAI's own answers have it
        half.arguments = _unpacked((yield from string()))
        _tell_arguments(half, calls)
        return ""
    if not half.name:
        parts: list[str] = []
        rest = yield from value(c, parts.append)
        half.arguments = _filled("".join(parts))
        return rest
    half.told = True
    calls.begin(half.name)
    if c in "{[":
        return (yield from value(c, calls.say))
    scalar: list[str] = []
    rest = yield from value(c, scalar.append)
    calls.say(_filled("".join(scalar)))
    return rest


def _tell_arguments(half: _Half, calls: Calls) -> None:
    if half.name and half.arguments is not None and not half.told:
        half.told = True
        calls.begin(half.name)
        calls.say(half.arguments)


def _check_name(name: str, calls: Calls, bare: bool) -> None:
    if not name or (bare and name not in calls.tools):
        raise NotACall


def _unpacked(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return _filled(text)


def _filled(text: str) -> str:
    return "{}" if text.strip() == "null" else text


def _ignore(text: str) -> None:
    """What a call says besides its name and arguments."""
