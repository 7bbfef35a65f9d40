"""Two questions about sets of texts, asked of automata that are walked side by side."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from hetrun.sampling.grammar.ast import LAST, Alt, Chars, Lexeme, Node, Ranges, Repeat, Seq

MOST_STATES = 4000  # of one automaton

Found = Callable[[frozenset[int], frozenset[int]], bool]


class TooMuch(Exception):
    """A question cannot be answered within its bounds."""


class Automaton:
    """The texts of a node without references, as states with moves by character, and without."""

    def __init__(self, node: Node) -> None:
        self._moves: list[tuple[Ranges, int] | None] = []  # of each state: at most one by character
        self._free: list[list[int]] = []  # and any number without
        self._end = self._add()
        self.start = self._closed([self._enter(node, self._end)])
        self.borders = borders(move[0] for move in self._moves if move)
        self.empty = self.ends(self.start)  # whether the empty text is one of its texts
        moves = (self._moves[s] for s in self.start)
        self.first = [pair for move in moves if move for pair in move[0]]  # with which its texts begin

    def _add(self, move: tuple[Ranges, int] | None = None, free: Iterable[int] = ()) -> int:
        if len(self._free) >= MOST_STATES:
            raise TooMuch
        self._moves.append(move)
        self._free.append(list(free))
        return len(self._free) - 1

    def _enter(self, node: Node, then: int) -> int:
        """The state from which the node's texts lead to `then`."""
        match node:
            case Chars(ranges):
                return self._add((ranges, then))
            case Seq(parts):
                for part in reversed(parts):
                    then = self._enter(part, then)
                return then
            case Alt(options):
                return self._add(free=[self._enter(option, then) for option in options])
            case Repeat(inner, least, most):
                if most is None:
                    again = self._add(free=[then])
                    self._free[again].append(self._enter(inner, again))
                    then = again
                for _ in range(0 if most is None else most - least):
                    then = self._add(free=[then, self._enter(inner, then)])
                for _ in range(least):
                    then = self._enter(inner, then)
                return then
        raise AssertionError(f"{type(node).__name__} is not of one character after the other")

    def ends(self, states: frozenset[int]) -> bool:
        """Whether a text may end here."""
        return self._end in states

    def step(self, states: frozenset[int], c: int) -> frozenset[int]:
        """Where a character leads."""
        moves = (self._moves[s] for s in states)
        return self._closed([move[1] for move in moves if move and contains(move[0], c)])

    def _closed(self, states: list[int]) -> frozenset[int]:
        found = set(states)
        todo = list(found)
        while todo:
            new = [s for s in self._free[todo.pop()] if s not in found]
            found.update(new)
            todo += new
        return frozenset(found)


def contains(ranges: Ranges, c: int) -> bool:
    """Whether a character is in a set."""
    i = bisect_right(ranges, (c, LAST)) - 1
    return i >= 0 and c <= ranges[i][1]


def borders(sets: Iterable[Ranges]) -> set[int]:
    """Characters at which a range of some set begins, or has just ended."""
    return {c for ranges in sets for low, high in ranges for c in (low, high + 1)}


class Questions:
    """Two questions about sets of texts; what was answered is kept. `steps` bounds all that is walked."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._automata: dict[str, Automaton] = {}
        self._answers: dict[tuple[str, str, Ranges], bool] = {}

    def of(self, lexeme: Lexeme) -> Automaton:
        """The automaton of a lexeme; TooMuch if it is too large."""
        if lexeme.regex not in self._automata:
            self._automata[lexeme.regex] = Automaton(lexeme.node)
        return self._automata[lexeme.regex]

    def spend(self, steps: int) -> None:
        """TooMuch when there is nothing left."""
        self._left -= steps
        if self._left < 0:
            raise TooMuch

    def common(self, one: Lexeme, other: Lexeme) -> bool:
        """Whether a text (of one character or more) is of both."""
        a, b = self.of(one), self.of(other)
        key = (min(one.regex, other.regex), max(one.regex, other.regex), ())
        if key not in self._answers:
            alphabet = sorted(a.borders | b.borders)
            self._answers[key] = self._walk(a, b, alphabet, lambda i, j: a.ends(i) and b.ends(j))
        return self._answers[key]

    def extends(self, one: Lexeme, other: Lexeme, then: Ranges) -> bool:
        """Whether a text of one, and one of the characters `then` behind it, begin a text of the other."""
        a, b = self.of(one), self.of(other)
        key = (one.regex, other.regex, then)
        if key not in self._answers:
            alphabet = sorted(a.borders | b.borders | borders([then]))
            following = [c for c in alphabet if contains(then, c)]
            self._answers[key] = self._walk(
                a, b, alphabet, lambda i, j: a.ends(i) and any(b.step(j, c) for c in following)
            )
        return self._answers[key]

    def _walk(self, a: Automaton, b: Automaton, alphabet: list[int], found: Found) -> bool:
        """Whether `found` holds for states that one text leads to in both."""
        seen = set()
        todo = [(a.start, b.start)]
        while todo:
            i, j = todo.pop()
            for c in alphabet:
                self.spend(len(i) + len(j))
                pair = (a.step(i, c), b.step(j, c))
                if all(pair) and pair not in seen:
                    if found(*pair):
                        return True
                    seen.add(pair)
                    todo.append(pair)
        return False
