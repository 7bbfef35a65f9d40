"""Structures that cannot be, or that would cost too much: one sentence, in time, and the process lives."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from hetrun.client.sampling_params import Structure
from hetrun.errors import OptionError
from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.system.subprocesses import python
from tests.sampling.grammars import grammars, of_schema, steps
from tests.support.limits import Within
from tests.support.schemas import Schema
from tests.support.tiers import exhaustive

Kind = Any  # of a structure


@pytest.fixture(scope="module")
def shared() -> Grammars:
    return grammars()


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (False, "false allows nothing"),
        ([], "it must be an object, or true"),
        ({"type": "strin"}, "strin is no type: there are string, number, "),
        (
            {"properties": {"a": {"type": "strin"}}},
            "json_schema at properties.a: strin is no type: ",
        ),
        ({"prefixItems": [{}, {"type": 5}]}, "json_schema at prefixItems[1]: type must be a string"),
        ({"enum": []}, "anyOf is empty"),
        ({"items": {"type": "object", "minProperties": 2}}, "minProperties above 1 needs keys that differ"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"pattern": "(a"}, "unclosed group, at character 1 of the pattern (a"),
        (
            {"$defs": {"x": {"type": "string", "pattern": "a(?=b)"}}, "$ref": "#/$defs/x"},
            "at character 2 of the pattern",
        ),
        ({"$ref": "http://example.com/schema.json"}, "nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        ({"$ref": "#/$defs/x"}, "Pointer '/$defs/x' does not exist"),
        ({"$ref": "#"}, "no text can satisfy it"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "no text can satisfy",
        ),
        ({"uniqueItems": True, "type": "array"}, 'not supported: ["uniqueItems"]'),
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
            "oneOf is supported where one option excludes the other",
        ),
        ({"type": "string", "format": "isbn"}, "Unknown format: isbn"),
        ({"type": 5}, "type must be a string"),
        ({"const": "\ud800"}, "surrogate"),
    ],
)
def test_a_schema_that_cannot_be_is_refused_in_one_sentence(
    shared: Grammars, schema: object, sentence: str
) -> None:
    text = json.dumps(schema, ensure_ascii=False)
    with pytest.raises(OptionError, match=r"^json_schema") as caught:
        shared.constraint(Structure("json_schema", text))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_options_of_llguidance_cannot_be_set_from_outside(shared: Grammars) -> None:
    """One of them lets keywords pass that are not supported."""
    with pytest.raises(OptionError, match="not supported"):
        shared.constraint(of_schema({"x-guidance": {"lenient": True}, "not": {}}))


# --- what strangers send: each ends in time, and this process lives


def nested(n: int) -> str:
    return '{"properties":{"a":' * n + "{}" + "}}" * n


def chain(n: int) -> Schema:
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(n)}
    return {"$defs": {**links, f"a{n}": {}}, "$ref": "#/$defs/a0"}


HOSTILE: dict[str, tuple[Kind, str]] = {
    "deep schema": ("json_schema", nested(10_000)),
    "not so deep schema": ("json_schema", nested(100)),
    "deep list": ("json_schema", "[" * 100_000),
    "deep enum": ("json_schema", '{"enum":[' + "[" * 500 + "]" * 500 + "]}"),
    "chain of references": ("json_schema", json.dumps(chain(5000))),
    "patterns that meet": (
        "json_schema",
        json.dumps({"type": "string", "allOf": [{"pattern": f"a.{{{i}}}$"} for i in range(40)]}),
    ),
    "remainders": ("json_schema", '{"type":"integer","multipleOf":99999989}'),
    "very many properties": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    ),
    "very many options": ("json_schema", json.dumps({"enum": [[i] * 9 for i in range(20_000)]})),
    "very long lists": (
        "json_schema",
        '{"type":"array","minItems":1000000,"items":{"minItems":1000000,"type":"array"}}',
    ),
    "very long texts": ("json_schema", '{"type":"string","minLength":1000000000}'),
    "powers of a regex": ("regex", "((a{1000}){1000}){1000}"),
    "a million times": ("regex", "(a|b|[c-z]x){0,1000000}"),
    "deep regex": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "long regex": ("regex", "ab" * 100_000),
    "many states": ("regex", "(a|b)*a(a|b){60}"),
    "deep lark": ("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep terminals": (
        "grammar",
        "start: T0\n" + "\n".join(f'T{i}: (T{i + 1} "b")*' for i in range(5000)) + '\nT5000: "a"',
    ),
    "intersections": ("grammar", "start: A\nA: " + " & ".join(f"/(.*)a.{{{i}}}/" for i in range(30))),
    "many rules": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
    ),
    "ambiguous": ("grammar", 'start: s\ns: s s s | "a" | ""'),
    "a file": ("grammar", "%import /etc/passwd\nstart: passwd"),
}


# Each of these takes all the time it is given, as the intersections do.
DEAR = ("patterns that meet", "remainders", "very many options")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=exhaustive) if name in DEAR else name for name in HOSTILE]
)
def test_what_strangers_send_ends_in_time(shared: Grammars, name: str, within: Within) -> None:
    """Two seconds of the processor, and on a busy machine more."""
    kind, text = HOSTILE[name]
    with within(20):
        try:
            list(steps(shared.constraint(Structure(kind, text)), 0, most=5))
        except OptionError as error:
            assert len(str(error)) < 400  # noqa: PT017 - it may as well succeed
            assert "\n" not in str(error)  # noqa: PT017


def test_the_child_that_tries_them_begins_without_numpy() -> None:
    loaded = "print('numpy' in sys.modules, 'llguidance' in sys.modules)"
    code = f"import sys, hetrun.sampling.grammar.sandbox; {loaded}"
    assert subprocess.run(python(code), capture_output=True, text=True, check=True).stdout == "False False\n"


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("regex", "(a", "regex: unclosed group, at character 1 of the pattern (a"),
        ("regex", "a\\", "regex: it ends with a backslash that escapes nothing"),
        ("regex", "(a)\\1", "backreferences are not supported"),
        ("regex", "[^\\s\\S]", "no text can satisfy it"),
        ("regex", "a\udc80", "character 2 is half of a surrogate pair"),
        ("grammar", 'start: "a" b', 'grammar, line 1, column 8: unknown name: "b"'),
        ("grammar", 'start: A\nA: A "b"', "grammar, line 2, column 4: circular reference"),
        ("grammar", "nothing", "grammar, line 1, column"),
        ("grammar", 'x: "a"', "no start rule found"),
    ],
)
def test_a_mistake_is_said_with_its_place(shared: Grammars, kind: Kind, text: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=f"^{kind}") as caught:
        shared.constraint(Structure(kind, text))
    assert sentence in str(caught.value)
