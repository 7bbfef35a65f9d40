"""Short functions for JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping

Json = dict[str, object]
Schemas = Mapping[str, Json]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
NULL: Json = {"type": "null"}
ANYTHING: Json = {}


def integer(least: int, most: int | None = None) -> Json:
    """An integer within limits."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def number(least: float, most: float) -> Json:
    """A number within limits."""
    return {"type": "number", "minimum": least, "maximum": most}


def string(least: int = 0, most: int | None = None) -> Json:
    """A string with limits on its length."""
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


def array(items: Json, least: int = 0, most: int | None = None) -> Json:
    """A list with limits on its length."""
    return {"type": "array", "items": items, "minItems": least} | ({} if most is None else {"maxItems": most})


def const(value: object) -> Json:
    """This value only."""
    return {"const": value}


def enum(*values: object) -> Json:
    """One of these values."""
    return {"enum": list(values)}


def either(*schemas: Json) -> Json:
    """A value that matches one or several of these schemas."""
    return {"anyOf": list(schemas)}


def optional(schema: Json) -> Json:
    """The same or null, which means the same as a missing field."""
    if not schema:
        return schema
    match schema:
        case {"type": str(kind)}:
            return schema | {"type": [kind, "null"]}
        case {"enum": [*values]}:
            return enum(*values, None)
        case {"anyOf": [*schemas]}:
            return schema | {"anyOf": [*schemas, NULL]}
    return either(schema, NULL)


def struct(required: Schemas, more: Schemas | None = None) -> Json:
    """An object with required and optional fields."""
    fields = {**required, **(more or {})}
    return {"type": "object", "required": list(required), "properties": fields}


def mapping(values: Json) -> Json:
    """An object with any fields."""
    return {"type": "object", "additionalProperties": values}


def ref(name: str) -> Json:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def described(schema: Json, text: str) -> Json:
    """The same with a description."""
    return schema | {"description": text}
