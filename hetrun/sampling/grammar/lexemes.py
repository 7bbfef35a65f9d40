"""Cutting a grammar into lexemes: the longest pieces that may be matched as regular expressions.

llama.cpp reads a text character by character and follows all its readings. llguidance has a lexer before
its parser, as compilers have: fast, but greedy. It goes on with a lexeme as long as any that may stand here
can go on, and the readings in which one ends earlier are lost: `[a-z]* "z"` would match nothing. So a lexeme
is cut into its parts, down to single characters, where it could go on with a character that may as well
follow another that ends there, or itself. What is left over allows exactly the texts of the grammar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hetrun.sampling.grammar.ast import (
    EMPTY,
    ROOT,
    Alt,
    Chars,
    Lexeme,
    Node,
    Repeat,
    RuleRef,
    Rules,
    Seq,
    Token,
    inner,
    refs,
    size_of,
)
from hetrun.sampling.grammar.automaton import Questions, TooMuch
from hetrun.sampling.grammar.lexeme_conflicts import conflicts
from hetrun.sampling.grammar.regex import regex_of

MOST_STEPS = 4_000_000  # of all analysis, half a second or so
MOST_SIZE = 2000  # nodes of a rule that is written out where it is used,
MOST_DEPTH = 60  # and those in each other: all that looks at them is recursive
MOST_SIZE_OF_ALL = 100_000  # nodes of a grammar that is written out

Split = set[str] | None  # the regular expressions that may not be lexemes; None: all but single characters


def cut(rules: Rules) -> Rules:
    """The same grammar made of lexemes, references and tokens."""
    plain = _written_out(rules)
    size = sum(map(size_of, plain.values()))
    split: set[str] = set()
    questions = Questions(MOST_STEPS)
    while True:
        covered = {name: _cover(node, split) for name, node in plain.items()}
        try:
            questions.spend(40 * size)
            wrong = conflicts(covered, questions)
        except TooMuch:  # single characters are always right, but slow
            return {name: _cover(node, None) for name, node in plain.items()}
        if not wrong:
            return covered
        split |= wrong


def _cover(node: Node, split: Split) -> Node:
    """A node made of lexemes as large as they may be."""
    if _regular(node):
        return _cover_regular(node, split)
    match node:
        case Seq(parts):
            return Seq(tuple(_cover_run(run, split) for run in _runs(parts)))
        case Alt(options):
            regular = tuple(option for option in options if _regular(option))
            others = tuple(_cover(option, split) for option in options if not _regular(option))
            one = regular[0] if len(regular) == 1 else Alt(regular)
            return Alt((_cover_regular(one, split), *others)) if regular else Alt(others)
        case Repeat(repeated, least, most):
            return Repeat(_cover(repeated, split), least, most)
    return node


def _cover_regular(node: Node, split: Split) -> Node:
    regex = regex_of(node)
    if not regex:
        return EMPTY
    if isinstance(node, Chars) or (split is not None and regex not in split):
        return Lexeme(node, regex)
    match node:
        case Seq(parts):
            return Seq(tuple(_cover_regular(part, split) for part in parts))
        case Alt(options):
            return Alt(tuple(_cover_regular(option, split) for option in options))
        case Repeat(repeated, least, most):
            return Repeat(_cover_regular(repeated, split), least, most)
    raise AssertionError(f"{type(node).__name__} is not regular")


def _cover_run(run: Sequence[Node], split: Split) -> Node:
    """Parts that follow each other: either all are regular, or there is one, which is not."""
    return _cover(run[0] if len(run) == 1 else Seq(tuple(run)), split)


def _runs(parts: tuple[Node, ...]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    for part in parts:
        if runs and _regular(part) and _regular(runs[-1][-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _regular(node: Node) -> bool:
    return not isinstance(node, RuleRef | Token) and all(map(_regular, inner(node)))


# --- rules without recursion


def _written_out(rules: Rules) -> Rules:
    """Rules without recursion, tokens or great size put in the place of their names."""
    unsolved = {name: len(set(refs(node))) for name, node in rules.items()}
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name, node in rules.items():
        for ref in set(refs(node)):
            users[ref].append(name)
    written: Rules = {}
    sizes: dict[str, int] = {}
    ready = [name for name, n in unsolved.items() if n == 0]
    while ready:
        name = ready.pop()
        if (size := size_of(rules[name], sizes)) > MOST_SIZE:
            continue
        node = _with(rules[name], written)
        if not _regular(node) or _depth(node) > MOST_DEPTH:
            continue
        written[name], sizes[name] = node, size
        for user in users[name]:
            unsolved[user] -= 1
            if unsolved[user] == 0:
                ready.append(user)
    left = {name: node for name, node in rules.items() if name == ROOT or name not in written}
    if sum(size_of(node, sizes) for node in left.values()) > MOST_SIZE_OF_ALL:
        return rules
    return {name: _with(node, written) for name, node in left.items()}


def _with(node: Node, written: Rules) -> Node:
    match node:
        case RuleRef(name):
            return written.get(name, node)
        case Seq(parts):
            return Seq(tuple(_with(part, written) for part in parts))
        case Alt(options):
            return Alt(tuple(_with(option, written) for option in options))
        case Repeat(repeated, least, most):
            return Repeat(_with(repeated, written), least, most)
    return node


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, inner(node)), default=0)
