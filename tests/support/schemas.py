"""JSON schemas: one for each feature, and realistic ones by the hundred."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

Schema = dict[str, Any]


def obj(properties: Mapping[str, Any], *optional: str, **more: Any) -> Schema:  # noqa: ANN401 - JSON
    """An object with these properties and no others, all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
        **more,
    }


def arr(items: Any, least: int = 0, most: int = 3) -> Schema:  # noqa: ANN401 - JSON
    """A short list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TEXT = {"type": "string", "maxLength": 30}
COUNT = {"type": "integer", "minimum": 0, "maximum": 1000}
TREE = obj(
    {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    }
)
LINKED = obj({"head": COUNT, "tail": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}})

FEATURES: dict[str, Schema] = {
    "anything": {},
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "no length": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern inside": {"type": "string", "pattern": "[0-9]x", "maxLength": 10},
    "pattern and length": {"type": "string", "pattern": "^(ab|c)*$", "minLength": 3, "maxLength": 8},
    "pattern with classes": {"type": "string", "pattern": "^\\d+\\s\\w+$"},
    "pattern with unicode": {"type": "string", "pattern": "^[à-ü你好🙂]{1,4}$"},
    "minimum": {"type": "integer", "minimum": -3},
    "maximum": {"type": "integer", "maximum": 17},
    "both bounds": {"type": "integer", "minimum": -12, "maximum": 345},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "bounds of a number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "exclusive bounds of a number": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 500},
    "multiple of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1, "x"]}]},
    "enum that needs escapes": {"enum": ['"', "\\", "\n", "\t/", "é", "你好", "🙂", "\u0001", "</s>"]},
    "const": {"const": {"kind": "fixed", "list": [1, 2.5, "a b"]}},
    "list of bounded length": arr({"type": "boolean"}, 2, 4),
    "empty list": {"type": "array", "maxItems": 0},
    "list of lists": arr(arr(COUNT, 1, 2), 1, 2),
    "tuple": {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2},
    "tuple with a rest": {"type": "array", "prefixItems": [COUNT], "items": {"type": "null"}, "maxItems": 4},
    "required": obj({"a": COUNT, "b": TEXT}),
    "optional": obj({"a": COUNT, "b": COUNT, "c": COUNT}, "a", "c"),
    "all optional": obj({"a": COUNT, "b": COUNT}, "a", "b"),
    "nothing": {"type": "object", "additionalProperties": False},
    "more properties": {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
    "required without properties": {"type": "object", "required": ["x", "y"]},
    "map": {"type": "object", "additionalProperties": COUNT},
    "map by pattern": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": COUNT, "^s_": TEXT},
        "additionalProperties": False,
    },
    "not empty": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    "as many as are required": obj({"a": COUNT, "b": COUNT, "c": COUNT}, "c", minProperties=2),
    "nested": obj({"a": obj({"b": obj({"c": arr(obj({"d": TEXT}), 1, 2)})})}),
    "keys that need escapes": obj({'"': COUNT, "\\": COUNT, "a b": COUNT, "\n": COUNT, "": COUNT}),
    "unicode keys": obj({"größe": COUNT, "名前": TEXT, "🙂": {"type": "boolean"}}),
    "anyOf": {
        "anyOf": [obj({"t": {"const": "a"}, "x": COUNT}), obj({"t": {"const": "b"}, "y": TEXT}), COUNT]
    },
    "anyOf that share a beginning": {"anyOf": [arr(COUNT, 1), arr({"type": "string", "maxLength": 3}, 1)]},
    "oneOf that exclude each other": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 9}]},
    "oneOf by a tag": {"oneOf": [obj({"t": {"const": "a"}}), obj({"t": {"const": "b"}, "n": COUNT})]},
    "allOf": {
        "allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, {"required": ["b"]}]
    },
    "allOf of numbers": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}, {"multipleOf": 3}]},
    "allOf of texts": {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 8}]},
    "sibling of anyOf": {"type": "integer", "anyOf": [{"minimum": 10, "maximum": 20}, {"maximum": -5}]},
    "$ref": {"$defs": {"point": obj({"x": COUNT, "y": COUNT})}, **arr({"$ref": "#/$defs/point"}, 1)},
    "definitions": {"definitions": {"id": TEXT}, **obj({"a": {"$ref": "#/definitions/id"}})},
    "$ref to a property": obj({"a": COUNT, "b": {"$ref": "#/properties/a"}}),
    "recursive": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "linked list": {"$defs": {"list": LINKED}, "$ref": "#/$defs/list"},
    "mutually recursive": {
        "$defs": {
            "odd": arr({"$ref": "#/$defs/even"}, 0, 2),
            "even": obj({"odd": {"$ref": "#/$defs/odd"}}),
        },
        "$ref": "#/$defs/even",
    },
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "annotations": obj({"a": {"title": "A", "description": "the a", "examples": [1], "default": 2, **COUNT}}),
    "keywords of no one": {"type": "integer", "x-order": 3, "maximum": 9},
}

# --- realistic ones

SUBJECTS = (
    "a customer",
    "an invoice",
    "a recipe",
    "a book in a library",
    "a flight",
    "a patient's record",
    "a bug report",
    "a weather report",
    "a job offer",
    "a playlist",
    "a chess game",
    "a house for sale",
    "a football match",
    "a bank transfer",
    "a course at a university",
    "a call of a tool",
)

Make = Callable[[Random], Schema]


def _options(*words: str) -> Make:
    return lambda random: {"enum": sorted(random.sample(words, random.randint(2, len(words))))}


def _text(random: Random) -> Schema:
    return random.choice(
        [{"type": "string"}, {"type": "string", "minLength": 1, "maxLength": random.randint(10, 80)}]
    )


def _id(random: Random) -> Schema:
    patterns = ["^[A-Z]{3}-[0-9]{4}$", "^[a-f0-9]{8}$", "^[a-z][a-z0-9_]{2,15}$", "^#[0-9]+$"]
    return random.choice(
        [{"type": "string", "format": "uuid"}, {"type": "string", "pattern": random.choice(patterns)}]
    )


def _number(random: Random) -> Schema:
    least = random.choice([0, 0, 1, -50])
    bounds = random.choice(
        [{}, {"minimum": least}, {"minimum": least, "maximum": least + random.randint(1, 999)}]
    )
    return {"type": random.choice(["integer", "number"]), **bounds}


def _format(name: str) -> Make:
    return lambda random: {"type": "string", "format": name}


def _list_of(make: Make) -> Make:
    return lambda random: arr(make(random), random.randint(0, 1), random.randint(2, 6))


def _or_null(make: Make) -> Make:
    return lambda random: {"anyOf": [make(random), {"type": "null"}]}


FIELDS: dict[str, Make] = {
    "id": _id,
    "name": _text,
    "title": _text,
    "description": _text,
    "summary": _or_null(_text),
    "age": lambda random: {"type": "integer", "minimum": 0, "maximum": 120},
    "price": lambda random: {"type": "number", "minimum": 0},
    "quantity": _number,
    "rating": lambda random: {"type": "integer", "minimum": 1, "maximum": random.choice([5, 10])},
    "score": _number,
    "active": lambda random: {"type": "boolean"},
    "status": _options("open", "closed", "pending", "in progress", "cancelled"),
    "category": _options("food", "travel", "health", "work", "home", "sport"),
    "language": _options("en", "de", "fr", "ja", "zh"),
    "currency": _options("EUR", "USD", "GBP", "JPY"),
    "email": _format("email"),
    "url": _format("uri"),
    "ip": _format("ipv4"),
    "created_at": _format("date-time"),
    "birthday": _format("date"),
    "tags": _list_of(_text),
    "scores": _list_of(_number),
    "coordinates": lambda random: {**arr({"type": "number", "minimum": -180, "maximum": 180}, 2, 2)},
    "phone": lambda random: {"type": "string", "pattern": "^\\+[0-9]{2} [0-9]{3,10}$"},
    "labels": lambda random: {"type": "object", "additionalProperties": {"type": "string"}},
    "version": lambda random: {"const": f"{random.randint(1, 9)}.{random.randint(0, 9)}"},
    "größe": _number,
    "parent": _or_null(_id),
}


def realistic(random: Random, depth: int = 0) -> Schema:
    """An object such as people ask for."""
    properties: dict[str, Schema] = {}
    for name in random.sample(sorted(FIELDS), random.randint(2, 6 - depth)):
        properties[name] = FIELDS[name](random)
        if random.random() < 0.2:
            properties[name] |= {"description": f"the {name}"}
    if depth < 2 and random.random() < 0.5:
        inner = realistic(random, depth + 1)
        properties[random.choice(["details", "address", "owner"])] = inner
    if depth < 2 and random.random() < 0.4:
        properties[random.choice(["items", "steps", "events"])] = arr(
            realistic(random, depth + 1), 0, random.randint(2, 4)
        )
    optional = random.sample(sorted(properties), random.randint(0, len(properties) // 2))
    closed = {} if random.random() < 0.2 else {"additionalProperties": False}
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **closed}


def with_definitions(random: Random) -> Schema:
    """The same as libraries of data classes write it: parts by reference, some of them recursive."""
    part = realistic(random, 1)
    part["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]}
    parts = {"type": "array", "items": {"$ref": "#/$defs/Part"}, "maxItems": 3}
    return {
        "$defs": {"Part": part},
        "title": "Whole",
        **obj({"first": {"$ref": "#/$defs/Part"}, "parts": parts}),
    }


def tool_call(random: Random) -> Schema:
    """One of several tools, each with arguments of its own."""
    names = random.sample(["search", "get_weather", "send_mail", "open_file", "add"], random.randint(2, 4))
    return {"anyOf": [obj({"tool": {"const": name}, "arguments": realistic(random, 2)}) for name in names]}


def _all() -> Iterator[tuple[str, Schema]]:
    for name, schema in FEATURES.items():
        yield f"an example of {name}", schema
    random = Random(3)
    while True:
        make = random.choice([realistic, realistic, realistic, with_definitions, tool_call])
        yield random.choice(SUBJECTS), make(random)


def catalogue(n: int) -> list[tuple[str, Schema]]:
    """Distinct schemas, each with what it is of."""
    found: dict[str, tuple[str, Schema]] = {}
    for subject, schema in _all():
        if len(found) == n:
            break
        found.setdefault(json.dumps(schema), (subject, schema))
    return list(found.values())
