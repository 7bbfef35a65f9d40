"""Calls between tags: JSON, or a tag for each argument, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hetrun.text.tool_parsers.json_calls import closing, json_calls
from hetrun.text.tool_parsers.scanner import (
    MOST_NAME,
    Calls,
    NotACall,
    Reading,
    expect,
    line_until,
    skip_space,
    until,
)
from hetrun.text.tool_parsers.tags import CLOSE, FUNCTION, FUNCTION_TAGS, KEY, KEY_END, VALUE, VALUE_END, Tags

Types = Mapping[str, Mapping[str, frozenset[str]]]  # of the arguments of tools, by their names
PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
WORDS = {"True": True, "False": False, "None": None}  # Python's, where JSON is meant


def tagged_calls(calls: Calls, types: Types) -> Reading[str]:
    """What follows `<tool_call>`, in any of its formats: the first character tells which."""
    c = yield from skip_space()
    if c in "[{":
        return (yield from json_calls(calls, CLOSE, first=c))
    if c != "<":
        return (yield from _glm_call(c, calls, types))
    if (yield from expect(FUNCTION, c)):
        raise NotACall
    rest = yield from named_call(calls, types, FUNCTION_TAGS)
    return rest or (yield from closing(" ", CLOSE))


def call_in(tags: Tags) -> Callable[[Calls, Types], Reading[str]]:
    """What reads calls between these tags."""
    return lambda calls, types: named_call(calls, types, tags)


def named_call(calls: Calls, types: Types, tags: Tags) -> Reading[str]:
    """`<function=NAME>`, of which the beginning was read, `<parameter=KEY>`s and `</function>`."""
    name = yield from _name(tags)
    arguments = _Object(calls, types.get(name, {}))
    arguments.begin(name)
    while True:
        c = yield from skip_space()
        tag = c + ((yield) if c == "<" else "")
        if tag != tags.key[:2]:
            arguments.end()
            return (yield from expect(tags.end[2:])) if tag == tags.end[:2] else tag
        other = yield from expect(tags.key[2:])
        key = "" if other else (yield from _name(tags))
        if not key:
            arguments.end()
            return other
        yield from arguments.read(key, tags.value_end)


def _name(tags: Tags) -> Reading[str]:
    """A name up to what ends it; nothing where the line ends before that."""
    name, end = yield from line_until(f"{tags.close[0]}\n")
    if end != tags.close[0] or (tags.close[1:] and (yield from expect(tags.close[1:]))):
        return ""
    return name.strip()


def _glm_call(c: str, calls: Calls, types: Types) -> Reading[str]:
    """`NAME`, pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`."""
    name, end = yield from line_until("\n< ")
    name = (c + name).strip()
    if end == " " or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise NotACall
    arguments = _Object(calls, types.get(name, {}))
    c = end if end == "<" else (yield from skip_space())
    while c == "<":
        tag = c + (yield)
        if tag == CLOSE[:2]:
            if rest := (yield from expect(CLOSE[2:])):
                return arguments.unfinished(rest)
            arguments.begin(name)
            arguments.end()
            return ""
        if tag != KEY[:2] or (yield from expect(KEY[2:])):
            return arguments.unfinished(tag)
        key: list[str] = []
        yield from until(KEY_END, key.append, MOST_NAME)
        if (yield from expect(VALUE, (yield from skip_space()))):
            return arguments.unfinished("")
        arguments.begin(name)
        yield from arguments.read("".join(key).strip(), VALUE_END)
        c = yield from skip_space()
    return arguments.unfinished(c)


class _Object:
    """Arguments that come one by one, as one JSON object."""

    def __init__(self, calls: Calls, types: Mapping[str, frozenset[str]]) -> None:
        self._calls = calls
        self._types = types
        self._open = False
        self._keys: set[str] = set()

    def begin(self, name: str) -> None:
        if not name:
            raise NotACall
        if not self._open:
            self._open = True
            self._calls.begin(name)
            self._calls.say("{")

    def end(self) -> None:
        self._calls.say("}")

    def unfinished(self, rest: str) -> str:
        """Something else comes where more of the call should: what it has ends here, or it is none."""
        if not self._open:
            raise NotACall
        self.end()
        return rest

    def read(self, key: str, mark: str) -> Reading[None]:
        """One argument up to the mark: a text as it comes, of another type when it is complete."""
        types = self._types.get(key, frozenset())
        self._calls.say(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        if types == {"string"}:
            self._calls.say('"')
            yield from until(mark, _Trimmed(self).say)
            self._calls.say('"')
            return
        parts: list[str] = []
        yield from until(mark, parts.append)
        self._calls.say(as_json("".join(parts), types))

    def say_text(self, text: str) -> None:
        self._calls.say(json.dumps(text, ensure_ascii=False)[1:-1])


class _Trimmed:
    """A text without the line end at its beginning and the one at its end."""

    def __init__(self, target: _Object) -> None:
        self._target = target
        self._begun = False
        self._held = ""

    def say(self, text: str) -> None:
        for c in text:
            if c == "\n" and not self._begun:
                self._begun = True
                continue
            self._begun = True
            self._target.say_text(self._held)
            self._held = c if c == "\n" else ""
            if not self._held:
                self._target.say_text(c)


def as_json(text: str, types: frozenset[str]) -> str:
    """What a model wrote for an argument of these types, as JSON; of no known type, it may be anything."""
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        found = WORDS[text.strip()] if types and text.strip() in WORDS else json.loads(text)
        if not isinstance(found, str) and (
            "string" not in types or any(_is(found, kind) for kind in types - {"string"})
        ):
            return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _is(found: object, kind: str) -> bool:
    if isinstance(found, bool):
        return kind == "boolean"
    return isinstance(found, PYTHON_TYPES.get(kind, ()))


def types_of(tools: Mapping[str, Mapping[str, Any]]) -> Types:
    """The types of each argument, as far as the schemas of tools say them."""
    return {name: _types_of(schema) for name, schema in tools.items()}


def _types_of(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {key: kinds(inner) for key, inner in properties.items() if isinstance(inner, dict)}


def kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows, as far as it says."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return frozenset({"string"})
    return frozenset()
