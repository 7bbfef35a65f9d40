"""Every kind of structure in one language: llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetrun.client.sampling_params import Structure
from hetrun.sampling.grammar.composed import lark_of_parts
from hetrun.sampling.grammar.error_messages import GrammarFault, refuse
from hetrun.sampling.grammar.gbnf import TokenOf, is_gbnf
from hetrun.sampling.grammar.lark import lark_of_gbnf
from hetrun.system.strict_json import fault_in_json

MOST_DEPTH = 120  # of lists and objects in a schema; llguidance's JSON reader ends at 128
SAFE_SCHEMA = 1 << 15  # characters of a schema that no trial precedes
SAFE_REFS = 64

# The model chooses its tokens: to force them, llguidance would call the model's tokenizer, from any thread.
HEADER = '%llguidance {"no_forcing": true}\n'
# On one line, with or without a space behind separators: where all whitespace may stand between two values, a
# small model may write it for ever.
JSON_OPTIONS = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class LarkText:
    """A structure as a grammar in Lark."""

    kind: str
    lark: str
    schema: dict[str, Any] | None = None  # what it was made of, if it was one
    by_user: bool = False  # the user wrote it: its line numbers mean something to the user

    @property
    def risky(self) -> bool:
        """Whether compiling may cost more than llguidance's limits allow, or all of the stack.

        Intersections of patterns and remainders of large numbers have no limit there, and long chains of
        references go deep. Ordinary schemas have little or none of these.
        """
        if self.schema is None or len(self.lark) > SAFE_SCHEMA:
            return True
        costly = re.search(r'"(pattern|patternProperties|multipleOf)"', self.lark)
        return costly is not None or self.lark.count('"$ref"') > SAFE_REFS


def spell(structure: Structure, token_of: TokenOf) -> LarkText:
    """A structure in Lark, or an OptionError."""
    kind, text = structure.kind, structure.text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(
            kind,
            GrammarFault(
                f"character {error.start + 1} is half of a surrogate pair, which is not a character"
            ),
        )
    if kind == "json_schema":
        schema = _read_schema(text)
        return LarkText(kind, lark_of_schema(schema), schema)
    if kind == "parts":
        lark, schemas = lark_of_parts(json.loads(text), token_of, json_of_schema)
        for schema in schemas:
            _check_schema(kind, schema)
        return LarkText(kind, HEADER + lark, {"anyOf": schemas})
    if kind == "regex":
        return LarkText(kind, _lark_of_regex(text))
    if is_gbnf(text):
        return LarkText(kind, HEADER + lark_of_gbnf(text, token_of))
    return LarkText(kind, HEADER + text, by_user=True)


def lark_of_schema(schema: dict[str, Any]) -> str:
    """A grammar of the texts that satisfy a schema."""
    return f"{HEADER}start: {json_of_schema(schema)}"


def json_of_schema(schema: Mapping[str, Any]) -> str:
    """The same as a part of a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _lark_of_regex(text: str) -> str:
    """A grammar of one regular expression, which the whole answer must match."""
    from llguidance import regex_to_lark

    if (len(text) - len(text.rstrip("\\"))) % 2:
        refuse("regex", GrammarFault("it ends with a backslash that escapes nothing"))
    return f"{HEADER}start: /{regex_to_lark(text, '')}/"


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        refuse("json_schema", GrammarFault(f"it is nested deeper than {MOST_DEPTH} levels"))
    except ValueError as error:
        refuse("json_schema", GrammarFault(f"it is not JSON: {fault_in_json(error)}"))
    if schema is False:
        refuse("json_schema", GrammarFault("false allows nothing"))
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        refuse("json_schema", GrammarFault("it must be an object, or true"))
    _check_schema("json_schema", schema)
    return schema


def _check_schema(what: str, schema: Mapping[str, Any]) -> None:
    for depth, values in enumerate(_levels(schema), 1):
        if depth > MOST_DEPTH:
            refuse(what, GrammarFault(f"it is nested deeper than {MOST_DEPTH} levels"))
        if any(isinstance(value, dict) and _wants_distinct_keys(value) for value in values):
            refuse(
                what, GrammarFault("minProperties above 1 needs keys that differ: name as many in required")
            )


def _levels(value: object) -> Iterator[list[Any]]:
    """The lists and objects at each depth."""
    level: list[Any] = [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        yield level
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]


def _wants_distinct_keys(schema: dict[str, Any]) -> bool:
    """llguidance counts a key that comes twice as two; a reader of the JSON will not."""
    least, required = schema.get("minProperties"), schema.get("required")
    return isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0)
