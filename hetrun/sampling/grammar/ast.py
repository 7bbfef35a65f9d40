"""What the rules of a grammar are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

LAST = 0x10FFFF  # the last character
NO_CHARACTERS = ((0, 0), (0xD800, 0xDFFF))  # the NUL is in no text, and half a surrogate pair is nothing

Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set; the ranges are sorted and apart."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Token:
    """One token by its number, or any but that one."""

    id: int
    other: bool = False


@dataclass(frozen=True, slots=True)
class RuleRef:
    """Whatever a rule allows."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A number of times; most None: without end."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A node without references and tokens that is matched as a regular expression."""

    node: Node
    regex: str


Node: TypeAlias = Chars | Token | RuleRef | Seq | Alt | Repeat | Lexeme
Rules: TypeAlias = dict[str, Node]

EMPTY = Seq(())
NO_SIZES: Mapping[str, int] = {}
ROOT = "root"  # the rule with which every answer begins


def chars(ranges: Iterable[tuple[int, int]], negated: bool = False) -> Chars:
    """A set of characters from ranges in any order."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    if negated:
        ends = [-1, *(end for pair in joined for end in pair), LAST + 1]
        joined = [(a + 1, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=True) if a + 1 < b]
    return Chars(tuple(pair for low, high in joined for pair in _real(low, high)))


def _real(low: int, high: int) -> Iterator[tuple[int, int]]:
    for first, last in NO_CHARACTERS:
        if low < first <= high:
            yield low, first - 1
        if first <= high and low <= last:
            low = last + 1
    if low <= high:
        yield low, high


def inner(node: Node) -> tuple[Node, ...]:
    """The nodes directly within a node."""
    match node:
        case Seq(parts):
            return parts
        case Alt(options):
            return options
        case Repeat(repeated):
            return (repeated,)
    return ()


def size_of(node: Node, rules: Mapping[str, int] = NO_SIZES) -> int:
    """How many nodes it is, with those of the rules whose sizes are given."""
    if isinstance(node, RuleRef):
        return rules.get(node.name, 1)
    return 1 + sum(size_of(part, rules) for part in inner(node))


def refs(node: Node) -> Iterator[str]:
    """The names of the rules that a node uses."""
    todo = [node]
    while todo:
        found = todo.pop()
        if isinstance(found, RuleRef):
            yield found.name
        todo += reversed(inner(found))
