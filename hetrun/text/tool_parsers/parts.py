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
class Prose:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are JSON unless the model wrote something else."""

    index: int
    text: str


Piece = Prose | Thought | CallStart | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours put together, and nothing that is empty."""
    out: list[Piece] = []
    for (kind, index), same in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        if kind is CallStart:
            out += same
        elif text := "".join(piece.text for piece in same if not isinstance(piece, CallStart)):
            out.append(
                Prose(text) if kind is Prose else Thought(text) if kind is Thought else Arguments(index, text)
            )
    return out


def end_of(mark: str) -> str:
    """The mark that ends what this one began."""
    return dict(MARKS)[mark]
