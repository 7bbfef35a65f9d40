"""Whether a regular expression may take exponentially long, for matchers that try every way (Oniguruma).

An expression that repeats something which can itself be shorter or longer, or be read in two ways, may match
a text in exponentially many ways, and all are tried before it is found not to match. Of those in use one
repeats what varies, but each time from a letter on, and one has numbers last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LENGTH = 1 << 15
FEW = 8  # a part that is repeated up to so often is not repeated for ever

_KNOWN = (r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}{1,3}+")
_TOKEN = re.compile(
    r"(?P<escape>\\(?:[pPx]\{[^}]*\}|.))"
    r"|(?P<open>\((?:\?(?:[:=!>~]|<[=!]|<\w+>|#[^)]*|[a-zA-Z-]+[:)]?))?)|(?P<close>\))|(?P<either>\|)"
    r"|(?P<repeat>[*+?]|\{\d*,?\d*\})|(?P<set>\[)|(?P<other>.)",
    re.DOTALL,
)
_SET = re.compile(r"\\.|[\[\]]", re.DOTALL)


@dataclass(slots=True)
class _Group:
    """What was seen within parentheses."""

    varies: bool = False


def objection(expression: str) -> str | None:
    """What speaks against an expression, if something does."""
    if len(expression) > MAX_LENGTH:
        return f"is an expression of {len(expression)} characters"
    for known in _KNOWN:
        expression = expression.replace(known, "")
    groups, last = [_Group()], _Group()  # `last` is the part that a repetition would repeat
    pos = 0
    while pos < len(expression):
        found = _TOKEN.match(expression, pos)
        if found is None:
            return None  # the library says what is wrong with it
        pos, kind, text = found.end(), found.lastgroup, found[0]
        if kind == "set":
            pos = _behind_set(expression, pos)
        if kind == "open" and not text.endswith(")"):
            groups.append(_Group())
        elif kind == "close" and len(groups) > 1:
            last = groups.pop()
            groups[-1].varies |= last.varies
        elif kind == "either":
            groups[-1].varies = True
        elif kind == "repeat" and text != "{,}":
            least, most = _times(text)
            if last.varies and most > FEW:
                return (
                    f"repeats what varies, near {expression[max(pos - 24, 0) : pos]!r}, and may run forever"
                )
            if expression[pos : pos + 1] in ("?", "+") and text[0] != "{":
                pos += 1  # lazy, or possessive
            last = _Group(varies=last.varies or least != most)
            groups[-1].varies |= last.varies
        else:
            last = _Group()
    return None


def _times(text: str) -> tuple[int, float]:
    """How often at least and at most."""
    if text in ("*", "+", "?"):
        return int(text == "+"), 1 if text == "?" else float("inf")
    low, comma, high = text[1:-1].partition(",")
    least = int(low or 0)
    return least, (int(high) if high else float("inf")) if comma else least


def _behind_set(expression: str, pos: int) -> int:
    """Behind the bracket that closes a set of characters; sets may hold sets."""
    depth = 1
    if expression.startswith("^", pos):
        pos += 1
    if expression.startswith("]", pos):
        pos += 1  # stands for itself
    for found in _SET.finditer(expression, pos):
        depth += {"[": 1, "]": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return len(expression)
