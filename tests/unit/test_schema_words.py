"""JSON that is given as a schema and is none."""

from __future__ import annotations

import json

import pytest

from hetrun.client.schema_words import RULES, fault_in_words, remark_in_words


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"title": "Person"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "description": "anything"},
        {"type": "object"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"enum": [1, 2], "name": "numbers"},
        '{"name": "string"}',  # a text is read elsewhere
    ],
    ids=json.dumps,
)
def test_what_json_schema_knows_is_a_schema(schema: object) -> None:
    assert fault_in_words(schema) is None


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"name": "string"}, {"name": "string"}),
        (
            {"title": "str", "year": "int", "seen": True},
            {"title": "string", "year": "integer", "seen": "boolean"},
        ),
        ({"tags": [], "of": {}}, {"tags": "array", "of": "object"}),
        ({"a": "Ann", "b": 1, "c": 1, "d": 1}, {"a": "string"}),
        ({"x" * 31: 1}, {"name": "string"}),
    ],
)
def test_an_example_of_an_answer_is_answered_with_its_schema(
    schema: dict[str, object], meant: dict[str, str]
) -> None:
    fault = fault_in_words(schema)
    assert fault is not None
    proposed = json.loads(fault.partition("did you mean ")[2].removesuffix("?"))
    assert proposed["properties"] == {name: {"type": kind} for name, kind in meant.items()}
    assert proposed["required"] == list(meant)
    assert not RULES.isdisjoint(proposed)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"type": "object", "properties": {"name": "string"}},
            'properties.name must be a schema, not "string"; did you mean {"type": "string"}?',
        ),
        (
            {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, "int"]}}}},
            'properties.a.items.anyOf[1] must be a schema, not "int"; did you mean {"type": "integer"}?',
        ),
        (
            {"properties": {"size": ["S", "L"]}},
            'properties.size must be a schema, not ["S", "L"]; did you mean {"enum": ["S", "L"]}?',
        ),
        (
            {"additionalProperties": "x" * 40},
            'additionalProperties must be a schema, not what is there; did you mean {"type": "string"}?',
        ),
    ],
)
def test_what_stands_in_the_place_of_a_schema_is_named(schema: dict[str, object], said: str) -> None:
    assert fault_in_words(schema) == said


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"type": "object", "propertys": {}},
            "propertys is no word of JSON Schema; did you mean properties?",
        ),
        (
            {"properties": {"a": {"tpye": "string"}}},
            "properties.a.tpye is no word of JSON Schema; did you mean type?",
        ),
        (
            {"properties": {"legs": {"type": "integer"}}, "required": ["leg"]},
            "required has leg, and properties has legs: is it the same?",
        ),
        ({"properties": {"legs": {}}, "required": ["eyes"]}, None),
        ({"type": "object", "propertyOrdering": ["a"], "enumNames": [], "x-typ": 1, "id": "a"}, None),
    ],
)
def test_slips_in_words_and_required_names(schema: dict[str, object], said: str | None) -> None:
    assert fault_in_words(schema) == said


def test_values_and_words_that_are_properties_are_no_schemas() -> None:
    schema = {
        "properties": {
            "properties": {"const": {"properties": {"a": "string"}}},
            "items": {"enum": [{"items": "string"}]},
            "free": True,
        },
        "additionalProperties": False,
        "examples": [{"properties": {"name": "Ann"}}],
    }
    assert fault_in_words(schema) is None
    deep: dict[str, object] = {"not": "string"}
    for _ in range(900):
        deep = {"not": deep}
    assert fault_in_words(deep) is None  # left to the compiler


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"name": {}, "age": {}}}, 'to have them: "required": ["name", "age"]'),
        ({"properties": {"name": {}}, "required": []}, 'to have them: "required": ["name"]'),
        ({"properties": {"n" * 130: {}}}, "to have them: a list of names under required"),
        ({"properties": {"name": {}}, "required": ["name"]}, None),
        ({"properties": {"name": {}}, "minProperties": 1}, None),
        ({"properties": {"name": {}}, "anyOf": [{"required": ["name"]}]}, None),
        ({"type": "object"}, None),
        (True, None),
    ],
    ids=str,
)
def test_properties_of_which_none_is_required(schema: object, said: str | None) -> None:
    remark = remark_in_words(schema)
    if said is None:
        assert remark is None
    else:
        assert remark is not None
        assert remark.startswith("no property of the schema is required")
        assert remark.endswith(said)


def test_what_is_around_a_schema_in_a_request_is_not_the_schema() -> None:
    fault = fault_in_words({"name": "person", "strict": True, "schema": {"type": "object"}})
    assert fault == "the schema itself is what stands under schema: leave out what is around it"
