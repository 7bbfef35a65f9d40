"""Whether JSON that is given as a schema is one: `{"name": "string"}` has none of JSON Schema's words.

The standard ignores words that it does not know, so such a schema allows every answer. Servers accept it, as
OpenAI's does; in a command or a file it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

# What says which values are allowed, in the drafts from 4 on, and OpenAPI's.
RULES = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength "
    "pattern format maxItems minItems uniqueItems maxContains minContains maxProperties minProperties "
    "required dependentRequired allOf anyOf oneOf not if then else dependentSchemas dependencies "
    "prefixItems items additionalItems contains properties patternProperties additionalProperties "
    "propertyNames unevaluatedItems unevaluatedProperties contentSchema nullable $ref $dynamicRef "
    "$recursiveRef".split()
)
NOTES = frozenset(
    "title description default deprecated readOnly writeOnly examples example definitions "
    "contentEncoding contentMediaType".split()
)
TYPES = {
    **{name: name for name in ("string", "number", "integer", "boolean", "array", "object", "null")},
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"},
    **{"list": "array", "dict": "object", "date": "string"},
}
OF_VALUES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
SLIP = 0.75  # how alike two words are of which one may be a slip in the other
MOST_SHOWN = 3  # properties of the example
LONGEST_SHOWN = 30  # characters of a property's name
LONGEST_LIST = 120  # characters of the names of properties
MOST_DEPTH = 50  # of schemas within schemas that are looked at
# The words under which schemas stand: by name, in a list, alone.
MAPS = frozenset(("properties", "patternProperties", "dependentSchemas"))
LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
SINGLE = frozenset(
    ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
)
# With these, properties may be required elsewhere, or the object be another value.
NO_OTHERS = frozenset(
    "allOf anyOf oneOf not if dependentRequired dependentSchemas dependencies $ref const enum".split()
)


def fault_in_words(schema: object) -> str | None:
    """What is wrong with a schema that has none of JSON Schema's words, and what was probably meant."""
    if not isinstance(schema, Mapping):
        return None
    if not RULES.isdisjoint(schema):
        return next(_slips(schema, ""), None) or next(_faults_within(schema, "", MOST_DEPTH), None)
    if all(name in NOTES or name.startswith(("$", "x-")) for name in schema):
        return None  # {} and a title allow everything, and say no more than that
    if isinstance(schema.get("schema"), Mapping):
        return "the schema itself is what stands under schema: leave out what is around it"
    return (
        "it has none of JSON Schema's words (type, properties, enum, anyOf, $ref, ...) and would allow every "
        f"answer; did you mean {json.dumps(_likely(schema), ensure_ascii=False)}?"
    )


def remark_in_words(schema: object) -> str | None:
    """What to add to a schema with properties of which none is required."""
    if not isinstance(schema, Mapping) or "minProperties" in schema:
        return None
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties or schema.get("required"):
        return None
    if not NO_OTHERS.isdisjoint(schema):
        return None  # what is beside the properties may require some
    names = json.dumps(list(properties), ensure_ascii=False)
    add = f'"required": {names}' if len(names) <= LONGEST_LIST else "a list of names under required"
    return (
        f"no property of the schema is required, so the model may leave all of them out; to have them: {add}"
    )


def _faults_within(schema: Mapping[str, object], where: str, depth: int) -> Iterator[str]:
    """What stands in the place of a schema and is none: `{"properties": {"name": "string"}}`."""
    for place, inner in _inner(schema, where):
        if isinstance(inner, Mapping):
            yield from _slips(inner, f"{place}.")
            if depth:
                yield from _faults_within(inner, f"{place}.", depth - 1)
        elif not isinstance(inner, bool):
            given, meant = (json.dumps(value, ensure_ascii=False) for value in (inner, _meant(inner)))
            given = given if len(given) <= LONGEST_SHOWN else "what is there"
            yield f"{place} must be a schema, not {given}; did you mean {meant}?"


def _slips(schema: Mapping[str, object], where: str) -> Iterator[str]:
    """Slips in JSON Schema's words, which the standard ignores, and in names that are required."""
    for word in schema:
        if word not in RULES | NOTES and (close := get_close_matches(word, RULES, n=1, cutoff=SLIP)):
            yield f"{where}{word} is no word of JSON Schema; did you mean {close[0]}?"
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return
    known = [name for name in properties if isinstance(name, str)]
    for name in required:
        if isinstance(name, str) and name not in properties:
            if close := get_close_matches(name, known, n=1, cutoff=SLIP):
                yield f"{where}required has {name}, and properties has {close[0]}: is it the same?"


def _inner(schema: Mapping[str, object], where: str) -> Iterator[tuple[str, object]]:
    """The schemas within a schema that values are held against, and where each is."""
    for word, held in schema.items():
        if word in MAPS and isinstance(held, Mapping):
            yield from ((f"{where}{word}.{name}", inner) for name, inner in held.items())
        elif word in LISTS and isinstance(held, list):
            yield from ((f"{where}{word}[{i}]", inner) for i, inner in enumerate(held))
        elif word in SINGLE and not isinstance(held, list):
            yield f"{where}{word}", held


def _meant(value: object) -> dict[str, object]:
    if isinstance(value, list) and 0 < len(value) <= MOST_SHOWN and all(isinstance(v, str) for v in value):
        return {"enum": value}
    return {"type": _type_of(value)}


def _likely(schema: Mapping[str, object]) -> dict[str, object]:
    """A schema of objects with these properties; an example if they are too many."""
    names = [name for name in schema if len(name) <= LONGEST_SHOWN and name.isprintable()]
    if not 0 < len(schema) == len(names) <= MOST_SHOWN:
        names = names[:1] or ["name"]
    properties = {name: {"type": _type_of(schema.get(name))} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def _type_of(value: object) -> str:
    return (
        TYPES.get(value.lower(), "string") if isinstance(value, str) else OF_VALUES.get(type(value), "string")
    )
