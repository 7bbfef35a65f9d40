"""JSON that is given as a schema and is none."""

from __future__ import annotations

import json

import pytest

from hetrun.client.schema_words import RULES, fault_in_words


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


def test_what_is_around_a_schema_in_a_request_is_not_the_schema() -> None:
    fault = fault_in_words({"name": "person", "strict": True, "schema": {"type": "object"}})
    assert fault == "the schema itself is what stands under schema: leave out what is around it"
