"""Schemas, regular expressions and Lark grammars as masks: whatever they leave over gives a right text."""

from __future__ import annotations

import json
from datetime import date
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from hetrun.client.sampling_params import Structure
from hetrun.errors import OptionError
from hetrun.sampling.grammar import compiler, token_mask as masks
from hetrun.sampling.grammar.token_mask import Grammars
from tests.sampling.grammars import (
    CONTROL,
    EMPTY,
    END,
    OTHER_END,
    PIECES,
    TWICE,
    at_end,
    grammars,
    of_schema,
    steps,
    text_of,
    write,
)
from tests.support.schemas import FEATURES
from tests.support.tiers import exhaustive


@pytest.fixture(scope="module")
def shared() -> Grammars:
    return grammars()


# --- schemas

FORMATS = FormatChecker(formats=["email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    return not isinstance(value, str) or bool(
        date.fromisoformat(value.replace("0000-", "2000-"))
    )  # Python has no year 0


@pytest.mark.parametrize(("seeds", "least"), [(12, 3), pytest.param(25, 10, marks=exhaustive)])
@pytest.mark.parametrize("name", FEATURES)
def test_whatever_is_allowed_satisfies_the_schema(
    shared: Grammars, name: str, seeds: int, least: int
) -> None:
    schema, whole = FEATURES[name], 0
    for seed in range(seeds):
        constraint = shared.constraint(of_schema(schema))
        tokens = list(steps(constraint, seed))
        if constraint.finished:
            Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text_of(tokens)))
            whole += 1
    assert whole > least


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None], "b": {"": "x y"}}, [], "é🙂", True])
def test_compact_json_and_pythons_own_are_allowed(shared: Grammars, value: object) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        constraint = shared.constraint(of_schema({}))
        write(constraint, json.dumps(value, ensure_ascii=False, separators=separators))
        assert constraint.finished or constraint.allowed()[END]


@pytest.mark.parametrize("text", ["\n", " ", "{\n", "{ ", "[ ", "[1 ", '{"a" ', '{"a":  ', "[1,  "])
def test_blanks_are_not_written_for_ever(shared: Grammars, text: str) -> None:
    constraint = shared.constraint(of_schema({}))
    write(constraint, text[:-1])
    assert not constraint.allowed()[ord(text[-1])]


# --- regular expressions and Lark


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("[0-9]+(\\.[0-9]{2})?", "12.50"),
        ("^(yes|no)$", "no"),
        ("a/b", "a/b"),
        ("(?i)abc", "aBc"),
        (".é.", "xéy"),
    ],
)
def test_a_regular_expression_is_matched_as_a_whole(shared: Grammars, regex: str, text: str) -> None:
    constraint = shared.constraint(Structure("regex", regex))
    write(constraint, text)
    assert constraint.finished or constraint.allowed()[END]


def test_a_regular_expression_goes_no_further(shared: Grammars) -> None:
    constraint = shared.constraint(Structure("regex", "ab?"))
    assert {PIECES[t] for t in np.flatnonzero(constraint.allowed())} == {b"a", b"ab"}
    constraint.accept(TWICE[0])
    assert set(np.flatnonzero(constraint.allowed())) == {ord("b"), END, OTHER_END}
    constraint.accept(ord("b"))
    assert at_end(constraint)


def test_lark_is_taken_as_it_is(shared: Grammars) -> None:
    schema = '{"type": "object", "properties": {"x": {"const": 1}}}'
    lark = f'start: "call " NAME "(" %json {schema} ")"\nNAME: /[a-z]+/'
    constraint = shared.constraint(Structure("grammar", lark))
    write(constraint, 'call f({"x":1})')
    assert at_end(constraint)


def test_a_grammar_may_name_a_control_token(shared: Grammars) -> None:
    constraint = shared.constraint(Structure("grammar", 'start: <s> "a"'))
    assert set(np.flatnonzero(constraint.allowed())) == {CONTROL}
    constraint.accept(CONTROL)
    assert set(np.flatnonzero(constraint.allowed())) == set(TWICE)


# --- the constraint


def test_no_token_without_a_text_is_ever_allowed(shared: Grammars) -> None:
    constraint = shared.constraint(of_schema(FEATURES["more properties"]))
    for _ in steps(constraint, 5):
        mask = constraint.allowed()
        assert len(mask) == len(PIECES)
        assert not mask[[EMPTY, CONTROL]].any()
        assert mask[END] == mask[OTHER_END]
        assert len(set(mask[TWICE])) == 1


def test_an_end_is_no_part_of_a_text() -> None:
    """Also where a file does not call it a control token: the answer would stop in the middle of a string."""
    ends = {PIECES.index(b"abc")}
    constraint = Grammars(PIECES, set(), ends).constraint(of_schema({"type": "string"}))
    write(constraint, '"')
    assert not constraint.allowed()[sorted(ends)].any()
    write(constraint, 'abc"')
    assert at_end(constraint)


def test_the_end_may_come_where_the_text_may_end(shared: Grammars) -> None:
    constraint = shared.constraint(Structure("regex", "[0-9]*"))
    assert constraint.allowed()[[END, OTHER_END]].all()
    constraint.accept(OTHER_END)
    assert at_end(constraint)
    assert set(np.flatnonzero(constraint.allowed())) == {END, OTHER_END}
    constraint.rollback(1)
    assert not at_end(constraint)
    assert constraint.allowed()[ord("7")]


def test_it_is_finished_as_soon_as_nothing_may_follow(shared: Grammars) -> None:
    constraint = shared.constraint(of_schema({"const": {"a": 1}}))
    write(constraint, '{"a":1')
    assert not at_end(constraint)
    constraint.accept(ord("}"))
    assert at_end(constraint)


@pytest.mark.parametrize("name", ["nested", "recursive", "map by pattern", "anyOf", "optional", "string"])
def test_tokens_are_taken_back_exactly(shared: Grammars, name: str) -> None:
    random, constraint = Random(name), shared.constraint(of_schema(FEATURES[name]))
    masks = [constraint.allowed()]
    tokens: list[int] = []
    for token in steps(constraint, 1, most=60):
        tokens.append(token)
        masks.append(constraint.allowed())
        if random.random() < 0.4:
            n = random.randint(0, len(tokens))
            constraint.rollback(n)
            assert np.array_equal(constraint.allowed(), masks[len(tokens) - n])
            for again in tokens[len(tokens) - n :]:
                constraint.begin()
                constraint.accept(again)
            assert np.array_equal(constraint.allowed(), masks[-1])


def test_more_than_was_accepted_cannot_be_taken_back(shared: Grammars) -> None:
    constraint = shared.constraint(of_schema({}))
    constraint.accept(ord("["))
    with pytest.raises(ValueError, match="cannot take back 2 tokens, 1 were accepted"):
        constraint.rollback(2)


def test_a_clone_goes_its_own_way(shared: Grammars) -> None:
    one = shared.constraint(of_schema(FEATURES["anyOf"]))
    write(one, '{"t":"')
    other = one.clone()
    write(one, 'a","x":5}')
    write(other, "b")
    assert one.finished
    assert not other.finished
    other.rollback(1)
    assert other.allowed()[ord("a")]


def test_dear_masks_are_worked_out_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = grammars(), grammars()
    expected, constraint = one.constraint(of_schema({})), other.constraint(of_schema({}))
    for token in steps(expected, 7, most=100):
        with monkeypatch.context() as patch:
            patch.setattr(masks, "DEAR", -1.0)
            constraint.accept(token)
            constraint.begin()
            assert constraint.finished == expected.finished
            assert np.array_equal(constraint.allowed(), expected.allowed())
    assert "threads" in other.__dict__
    other.threads.shutdown()


def test_the_last_structures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = compiler.compile_spelled

    def counted(tokenizer: Any, spelled: Any) -> Any:  # noqa: ANN401 - passed on
        compiled.append(spelled.lark)
        return original(tokenizer, spelled)

    monkeypatch.setattr(masks, "compile_spelled", counted)
    some = grammars()
    for _ in range(3):
        some.constraint(of_schema({"const": 0}))
    assert len(compiled) == 1
    for i in range(masks.MOST_KEPT):
        some.constraint(of_schema({"const": i}))
    some.constraint(of_schema({"const": 1}))
    assert len(compiled) == masks.MOST_KEPT
    some.constraint(of_schema({"enum": ["x" * masks.MOST_KEPT_TEXT]}))
    some.constraint(of_schema({"const": 1}))  # beside one so large there was no room
    assert len(compiled) == masks.MOST_KEPT + 2


def test_what_becomes_too_complex_in_the_middle_is_an_error(shared: Grammars) -> None:
    """And the next request with the same grammar does not inherit it."""
    rules = "\n".join(f'r{i}: r{i + 1}? "x"' for i in range(1200)) + '\nr1200: "a"'
    structure = Structure("grammar", f'start: "zz" r0\n{rules}')
    for _ in range(2):
        constraint = shared.constraint(structure)
        with pytest.raises(OptionError, match=r"^grammar, after \d tokens of the answer: ") as caught:  # noqa: PT012
            for byte in b"zzax":
                constraint.accept(byte)
                constraint.allowed()
        assert "\n" not in str(caught.value)


def test_a_token_that_is_not_allowed_is_an_error(shared: Grammars) -> None:
    constraint = shared.constraint(of_schema({"type": "null"}))
    with pytest.raises(OptionError, match="after 1 token of the answer"):
        constraint.accept(ord("x"))
