"""Grammars to matchers of llguidance, or one sentence that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from hetrun.sampling.grammar.error_messages import GrammarFault, fault_of, refuse
from hetrun.sampling.grammar.to_lark import HEADER, SAFE_SCHEMA, LarkText, lark_of_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_STATES = 50_000  # of a lexer, some 2 kB each
MOST_ITEMS = 200_000  # of the parser for one mask: what a grammar of single characters may need


def make_tokenizer(pieces: Sequence[bytes], control: Collection[int]) -> LLTokenizer:
    """llguidance's view of a vocabulary, with one token more, which stands for every end."""
    from llguidance import LLTokenizer

    # Its type wants the wrapper class that comes with it, its code only these attributes.
    return LLTokenizer(cast(Any, _Pieces(pieces, control)))


class _Pieces:
    """What LLTokenizer asks for."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # it then adds a token of its own
    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], control: Collection[int]) -> None:
        self.tokens = list(pieces)
        self.special_token_ids = sorted(control)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("nothing is forced, so nothing is tokenised")


def compile_spelled(tokenizer: LLTokenizer, spelled: LarkText) -> tuple[LLMatcher, bytes]:
    """A matcher at its beginning and its first mask, or an OptionError."""
    matcher, mask, fault = _compiled(tokenizer, spelled.lark)
    if fault and spelled.schema is not None:
        place = _place_of(tokenizer, spelled.schema, fault)
        refuse(f"{spelled.kind} at {place}" if place else spelled.kind, GrammarFault(fault.reason))
    if fault:
        refuse(spelled.kind, fault if spelled.by_user else GrammarFault(fault.reason))
    return matcher, mask


def _compiled(tokenizer: LLTokenizer, lark: str) -> tuple[LLMatcher, bytes, GrammarFault | None]:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MOST_STATES, step_max_items=MOST_ITEMS)
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else bytes(matcher.compute_bitmask())
    message = matcher.get_error()
    return matcher, mask, fault_of(message, HEADER.count("\n")) if message else None


SUBSCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
MOST_PLACES = 200  # that are looked at


def _place_of(tokenizer: LLTokenizer, schema: dict[str, Any], fault: GrammarFault) -> str:
    """The innermost part of a schema that has this fault by itself: llguidance does not say where it was."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    names: list[str] = []
    left = MOST_PLACES if len(lark_of_schema(schema)) <= SAFE_SCHEMA else 0
    parts = _parts(schema)
    while left and (found := next(parts, None)):
        left -= 1
        name, part = found
        inner = _compiled(tokenizer, lark_of_schema({**shared, **part}))[2]
        if inner and inner.reason == fault.reason:
            names.append(name)
            parts = _parts(part)
    return ".".join(names)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within a schema, and what they are called there."""
    for key, value in schema.items():
        if key in SUBSCHEMAS:
            named = [(key, value)]
        elif key in BY_NAME and isinstance(value, dict):
            named = [(f"{key}.{name}", inner) for name, inner in value.items()]
        elif key in IN_LISTS and isinstance(value, list):
            named = [(f"{key}[{i}]", inner) for i, inner in enumerate(value)]
        else:
            continue
        yield from ((name, inner) for name, inner in named if isinstance(inner, dict))
