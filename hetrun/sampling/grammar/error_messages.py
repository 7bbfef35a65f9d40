"""What llguidance says of a structure that it cannot take, as one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from hetrun.errors import OptionError

MOST_SAID = 300  # characters

# Its messages quote the grammar at length, and end with a state or a backtrace.
TAIL = re.compile(r"\n(<(non-verbose|state|backtrace|grammar)|\s*\d+ \| )")
PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
LEADS = re.compile(
    r'(failed to compile JSON schema: |failed to parse "%json": |invalid regex ".*" \(in regex\): |'
    r"Parser Error: |lexer error: |Unsatisfiable schema: )+",
    re.DOTALL,
)
PATTERN = re.compile(
    r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<before> *)\^.*\nerror: (?P<reason>.*)"
)
TYPES = "string, number, integer, boolean, object, array and null"
PANIC = "panic: "
# What is said better; a group is kept.
REWORDED = (
    (r"NoExtensionBias", "no text can satisfy it with the tokens of this model"),
    (r"ParserTooComplex", "it is too complex: too many ways to read a text"),
    (r"LexerTooComplex", "it is too complex: its patterns have too many states"),
    (r"recursion limit exceeded", "it is nested too deeply"),
    (r"(.*)Invalid type: (.*)", r"\1\2 is no type: there are " + TYPES),
    (r"Unimplemented keys: (.*)", r"not supported: \1"),
    (
        r"oneOf constraints are not supported",
        "oneOf is supported where one option excludes the other; use anyOf",
    ),
    (
        r"Resource '(.*?)' is not present",
        r"$ref: nothing is fetched, so \1 must be a part of the schema itself",
    ),
)


@dataclass(frozen=True, slots=True)
class GrammarFault:
    """What is wrong, and where: the line and column of a grammar, counted from 1."""

    reason: str
    line: int | None = None
    column: int | None = None

    @property
    def place(self) -> str:
        """As the middle of a sentence."""
        return "" if self.line is None else f", line {self.line}, column {self.column}"


def refuse(what: str, fault: GrammarFault) -> NoReturn:
    """Say what is wrong with what, and where."""
    raise OptionError(f"{what}{fault.place}: {fault.reason}")


def fault_of(message: str, header_lines: int = 0) -> GrammarFault:
    """The fault in a message; `header_lines` stood before what the user wrote."""
    if message.startswith(PANIC):
        return GrammarFault("it is too large or too complex to be compiled")
    text = message[: found.start()] if (found := TAIL.search(message)) else message
    line = column = None
    if found := PLACE.match(text):
        line, column = int(found[1]) - header_lines, int(found[2])
        text = text[found.end() :]
    text = LEADS.sub("", text, count=1).strip()
    for said, better in REWORDED:
        if found := re.match(said, text):
            return GrammarFault(_plain(found.expand(better)))
    return GrammarFault(_plain(_of_pattern(text)), *((line, column) if line and line > 0 else (None, None)))


def _of_pattern(text: str) -> str:
    """The reason within an error of the library regex, which draws an arrow under the place."""
    if found := PATTERN.search(text):
        character = len(found["before"]) + 1
        return f"{found['reason']}, at character {character} of the pattern {_short(found['pattern'], 60)}"
    return text.rpartition("\nerror: ")[2] if "regex parse error" in text else text


def _plain(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return _short(" ".join(printable.split()), MOST_SAID)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
