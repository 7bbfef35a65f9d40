"""Calls as Python writes them, in a list: LFM2's."""

from __future__ import annotations

import ast
import json

from hetrun.text.tool_parsers.scanner import Calls, NotACall, Reading

NAME = "lfm2"
BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
MOST = 1 << 16  # characters of a list of calls
MOST_DEPTH = 100  # of what is within each other: the compiler's own limit is a crash away
JSON_WORDS = {"true": True, "false": False, "null": None}


def python_calls(calls: Calls) -> Reading[str]:
    """`[name(key=value, ...), ...]` and the mark that ends it; known as calls once all of it was read."""
    text = yield from _until_end()
    for name, arguments in _parsed(text):
        calls.begin(name)
        calls.say(arguments)
    return ""


def _until_end() -> Reading[str]:
    text: list[str] = []
    size, seen = 0, ""
    while seen != END:
        c = yield
        text.append(c)
        size += 1
        if size > MOST:
            raise NotACall
        seen = (seen + c)[-len(END) :]
    return "".join(text).removesuffix(END)


def _parsed(text: str) -> list[tuple[str, str]]:
    """Names and arguments as JSON."""
    if _depth(text) > MOST_DEPTH:
        raise NotACall
    try:
        body = ast.parse(text.strip(), mode="eval").body
        found = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        made = [_call(each) for each in found]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None
    if not made:
        raise NotACall
    return made


def _depth(text: str) -> int:
    depth = most = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        most = max(most, depth)
    return most


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError
    arguments: dict[str, object] = {}
    for each in node.keywords:
        value = _value(each.value)
        if each.arg is not None:
            arguments[each.arg] = value
        elif isinstance(value, dict):  # **{...}
            arguments |= value
        else:
            raise ValueError
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> object:
    """A constant; words may be JSON's."""
    match node:
        case ast.Name(id=word) if word in JSON_WORDS:
            return JSON_WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            found = ast.literal_eval(node)
    if not isinstance(found, str | int | float | bool | None):
        raise ValueError
    return found


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value
