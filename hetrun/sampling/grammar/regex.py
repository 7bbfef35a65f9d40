"""Nodes without references and tokens, written as regular expressions of the library regex."""

from __future__ import annotations

from hetrun.sampling.grammar.ast import Alt, Chars, Node, Repeat, Seq


def regex_of(node: Node) -> str:
    """The regular expression of a node, as it stands between two slashes in Lark."""
    match node:
        case Chars(ranges):
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _char(ranges[0][0])
            return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"
        case Seq(parts):
            return "".join(_grouped(part) if isinstance(part, Alt) else regex_of(part) for part in parts)
        case Alt(options):
            return "|".join(map(regex_of, options))
        case Repeat(inner, least, most):
            return _grouped(inner) + times(least, most)
    raise AssertionError(f"{type(node).__name__} is no regular expression")


def times(least: int, most: int | None) -> str:
    """How often, behind what is repeated; Lark writes it the same way."""
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _grouped(node: Node) -> str:
    return regex_of(node) if isinstance(node, Chars) else f"(?:{regex_of(node)})"


def _char(code: int) -> str:
    c = chr(code)
    return c if c.isascii() and c.isalnum() else f"\\x{{{code:X}}}"
