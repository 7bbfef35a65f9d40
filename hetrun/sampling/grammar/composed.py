"""A structure that was put together of parts, such as calls of tools, in llguidance's Lark.

A text stands for itself and a list is a sequence. An object has one key that says what it is:

    {"mark": TEXT}          this text, as the model's own token where it is a control token
    {"json": SCHEMA}        a value
    {"until": TEXT}         any text, up to the first place where this one ends
    {"any": [PART, ...]}    one of them
    {"maybe": PART}         this or nothing
    {"many": PART, "between": PART}    once or more
    {"any_times": PART}     never or more
    {"series": [{"always": true, "part": PART}, ...], "between": PART}    each once, in this order; those
                            that are not `always` there may be left out
    {"named": NAME, "as": PART}    a part that {"named": NAME} stands for elsewhere, also in itself
    {"word": true}          letters, digits and lines below
    {"space": true}         some space, or none
    {"free": true}          any text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hetrun.sampling.grammar.gbnf import TokenOf

Part = Any  # JSON
Schema = dict[str, Any]


def lark_of_parts(
    part: Part,
    token_of: TokenOf,
    json_of: Callable[[Mapping[str, Any]], str],
) -> tuple[str, list[Schema]]:
    """Rules, and the schemas in them in their order."""
    writer = _PartWriter(token_of, json_of)
    start = writer.item(part)
    return "\n".join([f"start: {start}", *writer.lines]), writer.schemas


class _PartWriter:
    """Gives every part but the simplest a rule of its own."""

    def __init__(self, token_of: TokenOf, json_of: Callable[[Mapping[str, Any]], str]) -> None:
        self._token_of = token_of
        self._json_of = json_of
        self._names: dict[tuple[str, str], str] = {}
        self._by_name: dict[str, str] = {}  # rules of parts with names
        self._written: set[str] = set()  # names of which the rule was written
        self.lines: list[str] = []
        self.schemas: list[Schema] = []

    def item(self, part: Part) -> str:
        """A part as it stands in a rule."""
        match part:
            case "":
                return '""'
            case str():
                return json.dumps(part, ensure_ascii=False)
            case list():
                return self._rule(" ".join(map(self.item, part)) or '""')
            case {"mark": str() as text}:
                return self._mark(text)
            case {"json": schema}:
                self.schemas.append(schema)
                return self._rule(self._json_of(schema))
            case {"until": str() as text}:
                return self._until(text)
            case {"any": options}:
                return self._rule(" | ".join(map(self.item, options)))
            case {"maybe": inner}:
                return f"{self._rule(self.item(inner))}?"
            case {"many": inner, "between": between}:
                one = self._rule(self.item(inner))
                return f"{one} {self._rule(f'{self.item(between)} {one}')}*"
            case {"any_times": inner}:
                return f"{self._rule(self.item(inner))}*"
            case {"series": members, "between": between}:
                return self._series(members, self.item(between))
            case {"named": str() as name, "as": inner}:
                return self._define(name, inner)
            case {"named": str() as name}:
                return self._name(name)
            case {"word": True}:
                return self._rule("/[A-Za-z_][A-Za-z0-9_]*/")
            case {"space": True}:
                return self._rule(r"/[ \t\r\n]*/")
            case {"free": True}:
                return self._rule(r"/(.|\n)*/")
        raise ValueError(f"no part of a structure: {part!r}")

    def _series(self, members: list[dict[str, Any]], between: str) -> str:
        """Rules for each end of it: at its beginning, and after something that was not left out."""
        parts = [(bool(member["always"]), self._rule(self.item(member["part"]))) for member in members]
        first = later = '""'
        for always, part in reversed(parts):
            more = self._rule(f"{between} {part}")
            first = self._rule(f"{part} {later}" if always else f"{part} {later} | {first}")
            later = self._rule(f"{more} {later}" if always else f"{more}? {later}")
        return first

    def _define(self, name: str, part: Part) -> str:
        rule = self._name(name)
        if name not in self._written:
            self._written.add(name)
            self.lines.append(f"{rule}: {self.item(part)}")
        return rule

    def _name(self, name: str) -> str:
        return self._by_name.setdefault(name, f"named{len(self._by_name)}")

    def _mark(self, text: str) -> str:
        token = self._token_of(text.encode())
        return self.item(text) if token is None else f"<[{token}]>"

    def _until(self, text: str) -> str:
        token = self._token_of(text.encode())
        if token is not None:
            return self._rule(rf"{self.item({'free': True})} <[{token}]>")
        escaped = re.escape(text).replace("/", r"\/").replace("\n", "n")
        return self._rule(rf"/(.|\n)*{escaped}/", "[lazy]")

    def _rule(self, text: str, kind: str = "") -> str:
        """The name of a rule with this text."""
        key = (text, kind)
        if key not in self._names:
            self._names[key] = f"part{len(self._names)}"
            self.lines.append(f"{self._names[key]}{kind}: {text}")
        return self._names[key]
