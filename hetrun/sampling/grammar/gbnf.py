"""llama.cpp's grammars (GBNF): from text to rules.

As its own parser reads them, but for what it lets through and what can never match (an empty class, a range
the wrong way round): that is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from hetrun.sampling.grammar.ast import (
    EMPTY,
    LAST,
    ROOT,
    Alt,
    Chars,
    Node,
    Repeat,
    RuleRef,
    Rules,
    Seq,
    Token,
    chars,
    refs,
)
from hetrun.sampling.grammar.error_messages import GrammarFault, refuse

MOST_TEXT = 1 << 18  # characters
MOST_DEPTH = 50  # of groups
MOST_TIMES = 100_000  # of a repetition

SIGN = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
NAME = re.compile(r"[a-zA-Z0-9_-]+")
NUMBER = re.compile(r"[0-9]{1,9}")
TOKEN_NUMBER = re.compile(r"<\[([0-9]{1,9})\]>")
TOKEN_TEXT = re.compile(r"<[^>]*>")
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

TokenOf = Callable[[bytes], int | None]  # the token that is written so


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF, and not in Lark: its rules are written with ::=."""
    return SIGN.search(text) is not None


def parse_gbnf(text: str, token_of: TokenOf) -> Rules:
    """The rules that can be reached from the root."""
    if len(text) > MOST_TEXT:
        refuse("grammar", GrammarFault(f"it has {len(text)} characters; GBNF may have {MOST_TEXT}"))
    return _Parser(text, token_of).rules()


class _Parser:
    def __init__(self, text: str, token_of: TokenOf) -> None:
        self._text = text
        self._token_of = token_of
        self._at = 0
        self._depth = 0
        self._used: dict[str, int] = {}  # where a name stands first

    def rules(self) -> Rules:
        found: Rules = {}
        self._skip(SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(NAME, "the name of a rule")
            self._skip(SPACE)
            self._expect("::=")
            self._skip(SPACE_AND_LINES)
            found[name] = self._options(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("the rule should end here; is a quote or a parenthesis missing?")
            self._skip(SPACE_AND_LINES)
        if ROOT not in found:
            refuse("grammar", GrammarFault(f"there is no rule {ROOT}, with which every answer begins"))
        return self._reached(found)

    def _reached(self, found: Rules) -> Rules:
        reached: Rules = {}
        todo = [ROOT]
        while todo:
            name = todo.pop()
            if name in reached:
                continue
            if name not in found:
                self._at = self._used[name]
                self._fail(f"there is no rule {name}")
            reached[name] = found[name]
            todo += refs(found[name])
        return reached

    def _options(self, nested: bool) -> Node:
        options = [self._sequence(nested)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(SPACE_AND_LINES)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, nested: bool) -> Node:
        parts: list[Node] = []
        space = SPACE_AND_LINES if nested else SPACE
        while (node := self._item(parts, space)) is not None:
            parts.append(node)
            self._skip(space)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts)) if parts else EMPTY

    def _item(self, before: list[Node], space: re.Pattern[str]) -> Node | None:
        """The next part of a sequence; a repetition takes the one before it."""
        c = self._text[self._at : self._at + 1]
        if c and c in "*+?{":
            return self._repetition(before, space)
        if c == '"':
            return self._literal()
        if c == "[":
            return self._class()
        if c == "(":
            return self._group()
        if c == ".":
            self._at += 1
            return chars([(0, LAST)])
        if c and c in "<!":
            return self._token()
        if NAME.match(self._text, self._at):
            start = self._at
            name = self._match(NAME, "a name")
            self._used.setdefault(name, start)
            return RuleRef(name)
        return None

    def _repetition(self, before: list[Node], space: re.Pattern[str]) -> Node:
        if not before:
            self._fail("there is nothing before it to repeat")
        start, c = self._at, self._text[self._at]
        self._at += 1
        if c != "{":
            return Repeat(before.pop(), int(c == "+"), 1 if c == "?" else None)
        self._skip(space)
        least = most = int(self._match(NUMBER, "a number"))
        self._skip(space)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(space)
            number = NUMBER.match(self._text, self._at)
            most = int(self._match(NUMBER, "a number")) if number else -1
            self._skip(space)
        self._expect("}")
        if max(least, most) > MOST_TIMES or -1 < most < least:
            self._at = start
            self._fail(f"the end of a repetition must not be less than its start, nor more than {MOST_TIMES}")
        return Repeat(before.pop(), least, None if most < 0 else most)

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        parts: list[Node] = []
        while not self._text.startswith('"', self._at):
            c = self._char(start, "this text is not closed")
            if not (char := chars([(c, c)])).ranges:
                self._fail(f"the character before this, U+{c:04X}, is not a character")
            parts.append(char)
        self._at += 1
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _class(self) -> Chars:
        start = self._at
        negated = self._text.startswith("^", start + 1)
        self._at += 2 if negated else 1
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = high = self._char(start, "this class is not closed")
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._char(start, "this class is not closed")
            if low > high:
                self._fail("the range before this goes from a character to an earlier one")
            ranges.append((low, high))
        self._at += 1
        found = chars(ranges, negated)
        if not ranges or not found.ranges:
            self._at = start
            self._fail("this class contains no characters")
        return found

    def _group(self) -> Node:
        start = self._at
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._fail(f"groups are nested deeper than {MOST_DEPTH} levels")
        self._at += 1
        self._skip(SPACE_AND_LINES)
        node = self._options(nested=True)
        if not self._text.startswith(")", self._at):
            if self._at == len(self._text):
                self._at = start
                self._fail("this group is not closed")
            self._fail("expected ) or another part of the group here")
        self._at += 1
        self._depth -= 1
        return node

    def _token(self) -> Token:
        other = self._text[self._at] == "!"
        self._at += other
        if number := TOKEN_NUMBER.match(self._text, self._at):
            self._at = number.end()
            return Token(int(number[1]), other)
        start = self._at
        text = self._match(TOKEN_TEXT, "a token, such as <[123]> or <think>")
        token = self._token_of(text.encode())
        if token is None:
            self._at = start
            self._fail(f"the model has no token {text[:40]}")
        return Token(token, other)

    def _char(self, start: int, without_end: str) -> int:
        """The code point of the next character of a text or class that began at `start`."""
        c = self._text[self._at : self._at + 1]
        if not c:
            self._at = start
            self._fail(without_end)
        if c != "\\":
            self._at += 1
            return ord(c)
        escape = self._text[self._at + 1 : self._at + 2]
        if escape in HEX_DIGITS:
            return self._code_point(HEX_DIGITS[escape])
        if not escape or escape not in ESCAPES:
            self._fail(f"there is no escape \\{escape}")
        self._at += 2
        return ord(ESCAPES[escape])

    def _code_point(self, n_digits: int) -> int:
        digits = self._text[self._at + 2 : self._at + 2 + n_digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{n_digits}}}", digits):
            self._fail(f"{n_digits} hexadecimal digits should follow")
        code = int(digits, 16)
        if code > LAST:
            self._fail(f"{digits} is not a character")
        self._at += 2 + n_digits
        return code

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        assert found
        self._at = found.end()

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if not found:
            self._fail(f"expected {what} here")
        self._at = found.end()
        return found[0]

    def _expect(self, sign: str) -> None:
        if not self._text.startswith(sign, self._at):
            self._fail(f"expected {sign} here")
        self._at += len(sign)

    def _fail(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        refuse("grammar", GrammarFault(reason, line, column))
