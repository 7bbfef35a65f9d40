"""Errors in Python's terms: the core names options as the command line does, programs use keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from hetrun.config import OPTIONS
from hetrun.errors import HetrunError
from hetrun.option_types import WordChoice

NUMBER = r"\d[\d.,]*\d|\d"
# How an option's value is written in a message, by the function that parses it.
VALUES = {
    "integer": NUMBER,
    "answer_length": NUMBER,
    "number": NUMBER,
    "size": rf"(?:{NUMBER})(?: ?[KMGT]i?B)?",
    "memory": rf"(?:{NUMBER})(?: ?[KMGT]i?B|%)?",
    "speculation": r"draft:\S+|off|lookup|mtp|auto",
    "names": r"[a-z][a-z0-9-]*",
}
NAMES = ("path", "template", "text", "host")  # of options with arbitrary values: only the flag is replaced


@contextmanager
def in_python() -> Iterator[None]:
    """Errors that leave this context say `ctx=...` instead of `--ctx`."""
    try:
        yield
    except HetrunError as error:
        error.args = tuple(python_words(part) if isinstance(part, str) else part for part in error.args)
        raise


def python_words(text: str) -> str:
    """A message with Python's keywords instead of the command line's flags."""
    for pattern, write in _rules():
        text = pattern.sub(write, text)
    return text


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


@cache
def _rules() -> tuple[Rule, ...]:
    """Replacements, applied in this order."""
    rules: list[Rule] = [(re.compile(r"(?<!\S)-m MODEL\b"), lambda found: 'LLM("MODEL")')]
    for name, option in OPTIONS.items():
        flag = option.flags[-1]
        rules.append((re.compile(rf"\b{name} \({flag}\)"), _plain(name)))
        rules.append(_rule(name, flag))
    return tuple(rules)


def _plain(name: str) -> Callable[[re.Match[str]], str]:
    return lambda found: name


def _rule(name: str, flag: str) -> Rule:
    parse = OPTIONS[name].parse
    kind = getattr(parse, "__qualname__", "").partition(".")[0]
    value = "|".join(map(re.escape, parse.allowed)) if isinstance(parse, WordChoice) else VALUES.get(kind)
    following = f"(?: ({value})(?![\\w-]))?" if value else "()"
    pattern = re.compile(rf"(?<![\w-]){flag}(?![\w-]){following}")

    def write(found: re.Match[str]) -> str:
        if kind in NAMES:
            return name
        if kind == "boolean":
            return f"{name}=True"
        return f"{name}={_literal(kind, found[1])}" if found[1] else f"{name}=..."

    return pattern, write


def _literal(kind: str, value: str) -> str:
    if re.fullmatch(NUMBER, value) and kind != "names":
        return value
    return f'["{value}"]' if kind == "names" else f'"{value}"'
