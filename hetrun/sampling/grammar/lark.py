"""Rules written in llguidance's Lark."""

from __future__ import annotations

from hetrun.sampling.grammar.ast import ROOT, Alt, Lexeme, Node, Repeat, RuleRef, Rules, Seq, Token
from hetrun.sampling.grammar.error_messages import GrammarFault, refuse
from hetrun.sampling.grammar.gbnf import TokenOf, parse_gbnf
from hetrun.sampling.grammar.lexemes import cut
from hetrun.sampling.grammar.regex import times

MOST_LARK = 1 << 20  # characters


def lark_of_gbnf(text: str, token_of: TokenOf) -> str:
    """A grammar in Lark that allows the same texts as one in GBNF."""
    lark = _LarkWriter().grammar(cut(parse_gbnf(text, token_of)))
    if len(lark) > MOST_LARK:
        refuse("grammar", GrammarFault("it is too large: rules that are used often should be short"))
    return lark


class _LarkWriter:
    """Gives a name of its own to every group and every lexeme: Lark takes few parentheses in each other."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._lexemes: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._groups = 0

    def grammar(self, rules: Rules) -> str:
        self._names = {name: f"rule{i}" for i, name in enumerate(rules)}
        for name, node in rules.items():
            self._lines.append(f"{self._names[name]}: {self._options(node)}")
        return "\n".join([f"start: {self._names[ROOT]}", *self._lines])

    def _options(self, node: Node) -> str:
        return (
            " | ".join(map(self._sequence, node.options)) if isinstance(node, Alt) else self._sequence(node)
        )

    def _sequence(self, node: Node) -> str:
        parts = node.parts if isinstance(node, Seq) else (node,)
        return " ".join(map(self._item, parts)) or '""'

    def _item(self, node: Node) -> str:
        match node:
            case Lexeme(_, regex):
                return self._lexeme(regex)
            case Token(id, other):
                return f"<[^{id}]>" if other else f"<[{id}]>"
            case RuleRef(name):
                return self._names[name]
            case Repeat(repeated, least, most):
                item = self._item(repeated)
                return (self._group(item) if isinstance(repeated, Repeat) else item) + times(least, most)
        return self._group(self._options(node))

    def _group(self, text: str) -> str:
        self._groups += 1
        name = f"group{self._groups}"
        self._lines.append(f"{name}: {text}")
        return name

    def _lexeme(self, regex: str) -> str:
        if regex not in self._lexemes:
            self._lexemes[regex] = f"LEXEME{len(self._lexemes)}"
            self._lines.append(f"{self._lexemes[regex]}: /{regex}/")
        return self._lexemes[regex]
