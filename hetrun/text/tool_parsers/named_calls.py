"""Calls with the name in front of the arguments: Mistral's newer ones, DeepSeek's and Kimi's."""

from __future__ import annotations

from hetrun.text.tool_parsers.json_calls import closing, json_calls
from hetrun.text.tool_parsers.scanner import (
    MOST_NAME,
    SPACE,
    Calls,
    InvalidJson,
    NotACall,
    Reading,
    line_until,
    skip_space,
    until,
    value,
)

SEPARATOR = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_FUNCTIONS = "<|tool_call_argument_begin|>", "functions."
FENCE = "`json" + SPACE  # what may stand between a name and its arguments


def mistral_calls(calls: Calls) -> Reading[str]:
    """`[{"name": ..., "arguments": ...}]`, or `name[ARGS]{...}`, perhaps with `[CALL_ID]...` between them."""
    c = yield from skip_space()
    if c in "[{":
        return (yield from json_calls(calls, first=c))
    name, end = yield from line_until("[{")
    name, c = c + name, end
    while c == "[":
        tag, _ = yield from line_until("]", len("CALL_ID"))
        if tag == "ARGS":
            c = yield from skip_space()
            break
        if tag != "CALL_ID":
            raise NotACall
        _, c = yield from line_until("[")
    return (yield from _named(calls, name.strip(), c))


def deepseek_call(calls: Calls) -> Reading[str]:
    """`name<sep>{...}<end>`, or with the word function, and the name in front of fenced JSON."""
    parts: list[str] = []
    yield from until(SEPARATOR, parts.append, MOST_NAME)
    name = "".join(parts).strip()
    if name == "function":
        name, _ = yield from line_until("\n")
    while (c := (yield)) in FENCE:
        pass
    rest = yield from _named(calls, name.strip(), c)
    return (yield from closing(rest or " ", CALL_END))


def kimi_call(calls: Calls) -> Reading[str]:
    """`functions.name:0<mark>{...}<end>`: the number counts the calls of a conversation."""
    parts: list[str] = []
    yield from until(KIMI_ARGUMENTS, parts.append, MOST_NAME)
    name = "".join(parts).strip().removeprefix(KIMI_FUNCTIONS)
    before, colon, number = name.rpartition(":")
    rest = yield from _named(calls, before if colon and number.isdigit() else name, (yield from skip_space()))
    return (yield from closing(rest or " ", KIMI_CALL_END))


def _named(calls: Calls, name: str, c: str) -> Reading[str]:
    """A call whose arguments begin with this character."""
    if not name or c != "{":
        raise NotACall
    calls.begin(name)
    try:
        return (yield from value(c, calls.say))
    except InvalidJson as broken:
        return broken.character
