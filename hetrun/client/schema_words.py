"""Whether JSON that is given as a schema is one: `{"name": "string"}` has none of JSON Schema's words.

The standard ignores words that it does not know, so such a schema allows every answer. Servers accept it, as
OpenAI's does; somebody who types it, or writes it into a file, is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

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
MOST_SHOWN = 3  # properties of the example
LONGEST_SHOWN = 30  # characters of a property's name


def fault_in_words(schema: object) -> str | None:
    """What is wrong with a schema that has none of JSON Schema's words, and what was probably meant."""
    if not isinstance(schema, Mapping) or not RULES.isdisjoint(schema):
        return None
    if all(name in NOTES or name.startswith(("$", "x-")) for name in schema):
        return None  # {} and a title allow everything, and say no more than that
    if isinstance(schema.get("schema"), Mapping):
        return "the schema itself is what stands under schema: leave out what is around it"
    return (
        "it has none of JSON Schema's words (type, properties, enum, anyOf, $ref, ...) and would allow every "
        f"answer; did you mean {json.dumps(_likely(schema), ensure_ascii=False)}?"
    )


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
