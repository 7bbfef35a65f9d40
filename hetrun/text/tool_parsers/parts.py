"""What an answer is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from hetrun.text.tool_parsers import gemma4
from hetrun.text.tool_parsers.dialects import BY_THOUGHT

# Of thoughts.
MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    *((mark, dialect.ends[0]) for mark, dialect in BY_THOUGHT.items()),
    (gemma4.THOUGHT, gemma4.CHANNEL_END),
)
GAP = "\n\n"  # between two texts of a kind, which clients see as one


@dataclass(frozen=True, slots=True)
class Text:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call of a tool begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON unless the model wrote something else."""

    index: int
    text: str


Piece = Text | Thought | Begin | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours put together, and nothing that is empty."""
    out: list[Piece] = []
    for (kind, index), same in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        if kind is Begin:
            out += same
        elif text := "".join(piece.text for piece in same if not isinstance(piece, Begin)):
            out.append(
                Text(text) if kind is Text else Thought(text) if kind is Thought else Arguments(index, text)
            )
    return out


def end_of(mark: str) -> str:
    """The mark that ends what this one began."""
    return dict(MARKS)[mark]
