"""What a schema allows, in the notation of Gemma 4's calls: parts of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hetrun.text.tool_parsers.gemma4 import QUOTE, Part

Schema = Mapping[str, Any]

MARK: Part = {"mark": QUOTE}
TEXT: Part = [MARK, {"until": QUOTE}]
ANY = "any value"  # the name of a part
AS_IN_JSON = ("number", "boolean", "null")
# What is bound of values that are written as in JSON.
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
CHOICES = ("anyOf", "oneOf")
PLAIN_KEY = re.compile(r'[^\s:,\[\]{}<"]+')
MOST_DEPTH = 64  # of a schema; what is deeper may be any value


def arguments(tool: str, schema: Schema) -> Part:
    """The object that a call of a tool has: with no arguments but those that the schema names."""
    return _Notation(tool, schema).arguments(schema)


class _Notation:
    """The parts of one schema, of which those for its definitions have names."""

    def __init__(self, tool: str, whole: Schema) -> None:
        self._tool = tool
        self._whole = whole
        self._named: set[str] = set()
        self._depth = 0

    def arguments(self, schema: Schema) -> Part:
        """An object; its schema may be a choice or a reference."""
        if "properties" not in schema:
            if isinstance(schema.get("$ref"), str):
                return self._definition(schema["$ref"])
            if options := _choices(schema):
                return {"any": [self.arguments(each if isinstance(each, dict) else {}) for each in options]}
        return self._object({"additionalProperties": "patternProperties" in schema, **schema})

    def value(self, schema: object) -> Part:
        """A value by a schema."""
        if not isinstance(schema, dict) or self._depth == MOST_DEPTH:
            return self._any()
        self._depth += 1
        try:
            return self._value(schema)
        finally:
            self._depth -= 1

    def _value(self, schema: Schema) -> Part:
        if isinstance(schema.get("$ref"), str):
            return self._definition(schema["$ref"])
        if "const" in schema:
            return _constant(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return {"any": [_constant(each) for each in values]}
        if "properties" in schema:
            return self._object(schema)
        if options := _choices(schema):
            return {"any": [self.value(each) for each in options]}
        kinds = schema.get("type", "array" if "items" in schema else None)
        if kinds is None:
            return self._any()
        if isinstance(kinds, list):
            return {"any": [self._of_kind(kind, schema) for kind in kinds]}
        return self._of_kind(kinds, schema)

    def _of_kind(self, kind: object, schema: Schema) -> Part:
        match kind:
            case "string":
                return TEXT
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        return {"json": {"type": kind, **{key: schema[key] for key in BOUNDS if key in schema}}}

    def _array(self, schema: Schema) -> Part:
        some: Part = ["[", {"many": self.value(schema.get("items")), "between": ","}, "]"]
        return some if schema.get("minItems") else {"any": ["[]", some]}

    def _object(self, schema: Schema) -> Part:
        """What is named comes in this order; then what else may be there."""
        named, listed = schema.get("properties"), schema.get("required")
        properties = named if isinstance(named, dict) else {}
        required = listed if isinstance(listed, list) else []
        series: list[Part] = [
            {"always": key in required, "part": [_key(key), self.value(inner)]}
            for key, inner in properties.items()
        ]
        if others := schema.get("additionalProperties", not properties):
            other = [{"word": True}, ":", self.value(others)]
            series.append({"always": False, "part": {"many": other, "between": ","}})
        return ["{", {"series": series, "between": ","}, "}"]

    def _definition(self, place: str) -> Part:
        """A definition by its name, for it may hold itself; one that is elsewhere is any value."""
        found: Any = self._whole if place.startswith("#") else None
        for key in place.split("/")[1:]:
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            return self._any()
        return self._name(f"{place} of {self._tool}", found)

    def _any(self) -> Part:
        kinds = [*AS_IN_JSON, "string", "array", "object"]
        return self._name(ANY, {"anyOf": [{"type": kind} for kind in kinds]})

    def _name(self, name: str, schema: Schema) -> Part:
        if name in self._named:
            return {"named": name}
        self._named.add(name)
        depth, self._depth = self._depth, 0
        part = {"named": name, "as": self.value(schema)}
        self._depth = depth
        return part


def _choices(schema: Schema) -> list[Any]:
    """The schemas of which one holds."""
    whole = schema.get("allOf")
    if isinstance(whole, list) and len(whole) == 1:
        return whole
    found = (schema.get(key) for key in CHOICES)
    return next((options for options in found if isinstance(options, list) and options), [])


def _key(key: str) -> list[Part]:
    """A key and its colon; between marks where it would end too early without them."""
    return [key + ":"] if PLAIN_KEY.fullmatch(key) else [MARK, key, MARK, ":"]


def _constant(value: object) -> Part:
    """A value that is given."""
    match value:
        case str():
            return [MARK, value, MARK]
        case list():
            return ["[", *_with_commas([[_constant(each)] for each in value]), "]"]
        case dict():
            return ["{", *_with_commas([[*_key(k), _constant(v)] for k, v in value.items()]), "}"]
    return json.dumps(value)


def _with_commas(groups: list[list[Part]]) -> list[Part]:
    return [part for at, group in enumerate(groups) for part in ([",", *group] if at else group)]
