"""Where greedy lexemes would lose a reading of the grammar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hetrun.sampling.grammar.ast import (
    ROOT,
    Alt,
    Lexeme,
    Node,
    Ranges,
    Repeat,
    RuleRef,
    Rules,
    Seq,
    Token,
    chars,
    inner,
    size_of,
)
from hetrun.sampling.grammar.automaton import Questions, TooMuch

Places: TypeAlias = int  # a set of places, a bit for each


def conflicts(rules: Rules, questions: Questions) -> set[str]:
    """The lexemes (as regular expressions) that would swallow what another reading needs.

    TooMuch if that cannot be found out within bounds.
    """
    if isinstance(rules[ROOT], Lexeme):
        return set()  # nothing follows it
    leaves = [leaf for node in rules.values() for leaf in _leaves(node)]
    too_large: set[str] = set()
    for lexeme in (leaf for leaf in leaves if isinstance(leaf, Lexeme)):
        try:
            questions.of(lexeme)
        except TooMuch:
            too_large.add(lexeme.regex)
    return too_large or _Search(rules, leaves, questions).found()


def _leaves(node: Node) -> Iterator[Lexeme | Token]:
    if isinstance(node, Lexeme | Token):
        yield node
    for part in inner(node):
        yield from _leaves(part)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Whether a text of a node may be empty, and the places with which texts begin and end."""

    empty: bool = False
    first: Places = 0
    last: Places = 0


class _Search:
    """A place is where a lexeme or token stands in the rules.

    Rules are looked at without the rules that use them: what follows one use may then follow every other. So
    there may be more conflicts here than in the grammar, and never fewer.
    """

    def __init__(self, rules: Rules, leaves: list[Lexeme | Token], questions: Questions) -> None:
        self._leaves = leaves
        self._number = {id(leaf): place for place, leaf in enumerate(leaves)}
        self._questions = questions
        self._follow: list[Places] = [0] * len(leaves)
        self._shapes = dict.fromkeys(rules, _Shape())
        before: dict[str, _Shape] = {}
        size = sum(map(size_of, rules.values()))
        while before != self._shapes:
            questions.spend(20 * size)
            before = dict(self._shapes)
            for name, node in reversed(rules.items()):
                self._shapes[name] = self._shape(node)

    def found(self) -> set[str]:
        """The lexemes that go on where another ends, with a character that may follow that one."""
        wrong: set[str] = set()
        for place, beside in enumerate(self._beside()):
            a = self._leaves[place]
            if isinstance(a, Lexeme) and beside and (then := self._then(place)):
                others = (self._leaves[other] for other in _places(beside))
                lexemes = (b for b in others if isinstance(b, Lexeme) and b.regex not in wrong)
                wrong.update(b.regex for b in lexemes if self._questions.extends(a, b, then))
        return wrong

    def _beside(self) -> list[Places]:
        """For each place, the places at which the lexer may be at the same time."""
        beside: list[Places] = [0] * len(self._leaves)
        start = self._shapes[ROOT].first
        todo = [(start, start)]
        while todo:
            here, there = todo.pop()
            for place in _places(here):
                new = there & ~beside[place]
                beside[place] |= new
                self._questions.spend(4 + 4 * new.bit_count())
                for other in _places(new):
                    if self._meet(place, other):
                        todo.append((self._follow[place], self._follow[other]))
        return beside

    def _meet(self, place: int, other: int) -> bool:
        """Whether one text, or one token, may be at both places."""
        a, b = self._leaves[place], self._leaves[other]
        if isinstance(a, Lexeme) and isinstance(b, Lexeme):
            return place == other or self._questions.common(a, b)
        return isinstance(a, Token) and isinstance(b, Token)

    def _then(self, place: int) -> Ranges:
        """The characters that may follow a place."""
        following = (self._leaves[other] for other in _places(self._follow[place]))
        lexemes = (leaf for leaf in following if isinstance(leaf, Lexeme))
        return chars(pair for lexeme in lexemes for pair in self._questions.of(lexeme).first).ranges

    def _shape(self, node: Node) -> _Shape:
        match node:
            case Lexeme():
                here = 1 << self._number[id(node)]
                return _Shape(self._questions.of(node).empty, here, here)
            case Token():
                here = 1 << self._number[id(node)]
                return _Shape(False, here, here)
            case RuleRef(name):
                return self._shapes[name]
            case Alt(options):
                shapes = [self._shape(option) for option in options]
                first, last = _union(s.first for s in shapes), _union(s.last for s in shapes)
                return _Shape(any(s.empty for s in shapes), first, last)
            case Seq(parts):
                whole = _Shape(empty=True)
                for part in parts:
                    whole = self._joined(whole, self._shape(part))
                return whole
            case Repeat(repeated, least, most):
                shape = self._shape(repeated)
                if most is None or most > 1:
                    self._link(shape.last, shape.first)
                return _Shape(shape.empty or least == 0, shape.first, shape.last)
        raise AssertionError(f"{type(node).__name__} is in no lexeme")

    def _joined(self, a: _Shape, b: _Shape) -> _Shape:
        self._link(a.last, b.first)
        first = a.first | b.first if a.empty else a.first
        return _Shape(a.empty and b.empty, first, a.last | b.last if b.empty else b.last)

    def _link(self, last: Places, first: Places) -> None:
        self._questions.spend(last.bit_count() * (4 + len(self._leaves) // 256))
        for place in _places(last):
            self._follow[place] |= first


def _places(places: Places) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


def _union(sets: Iterable[Places]) -> Places:
    union = 0
    for places in sets:
        union |= places
    return union
