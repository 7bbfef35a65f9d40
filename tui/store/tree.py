"""What a conversation is: turns that form a tree, and the path through it that is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hetrun.system.units import format_bytes

Role = Literal["user", "assistant"]

MOST_TITLE = 60  # characters
LONGEST_FORKED = MOST_TITLE - len(" (fork 999)")  # with room for the number
FORK = re.compile(r" \(fork(?: (\d{1,9}))?\)$")


class TurnPicture(NamedTuple):
    """A picture that goes with a turn; its file is the store's."""

    digest: str  # SHA-256 of the file, in hexadecimal digits
    name: str
    width: int = 0  # pixels; 0: not known
    height: int = 0
    nbytes: int = 0

    @property
    def size(self) -> str:
        """In pixels and bytes."""
        pixels = f"{self.width} x {self.height}, " if self.width and self.height else ""
        return pixels + format_bytes(self.nbytes)

    @property
    def words(self) -> str:
        """Its name and size."""
        return f"{self.name} {self.size}"


@dataclass(slots=True)
class Turn:
    """What one side said. Turns with the same parent are versions of each other: edited, or asked again."""

    id: int
    parent: int | None
    role: Role
    text: str
    note: str = ""  # why it ended, if not by itself
    figures: Mapping[str, Any] = field(default_factory=dict)  # of an answer: tokens, rates, the model
    opened: str = ""  # the mark of a thought that the prompt had begun
    pictures: tuple[TurnPicture, ...] = ()


@dataclass(slots=True)
class Conversation:
    """Everything about one, its turns apart."""

    id: int
    title: str = ""
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what differs from the command line's
    leaf: int | None = None  # the last turn of the path that is shown
    changed: float = 0.0
    turns: int = 0


class Tree:
    """The turns of a conversation, and the path from the first one to a leaf."""

    def __init__(self, turns: Sequence[Turn] = (), leaf: int | None = None) -> None:
        self.turns = {turn.id: turn for turn in turns}
        self.leaf = leaf if leaf in self.turns else max(self.turns, default=None)

    @property
    def path(self) -> list[Turn]:
        """The turns that are shown, in order."""
        return self.path_to(self.leaf)

    def path_to(self, turn: int | None) -> list[Turn]:
        """From the first turn to this one."""
        found: list[Turn] = []
        while turn is not None and len(found) <= len(self.turns):
            found.append(self.turns[turn])
            turn = found[-1].parent
        return found[::-1]

    def add(self, turn: Turn) -> None:
        """A new turn, which the path leads to from now on."""
        self.turns[turn.id] = turn
        self.leaf = turn.id

    def versions(self, turn: Turn) -> list[Turn]:
        """The turn and those that stand in its place on other paths, oldest first."""
        return sorted((t for t in self.turns.values() if t.parent == turn.parent), key=lambda t: t.id)

    def beside(self, turn: Turn, step: int) -> Turn | None:
        """The version this many before or after."""
        found = self.versions(turn)
        if turn not in found:  # it is of another conversation, or gone
            return None
        at = found.index(turn) + step
        return found[at] if 0 <= at < len(found) else None

    def end_of(self, turn: Turn) -> int:
        """The leaf to which the newest turns after this one lead."""
        at = turn.id
        while below := [t.id for t in self.turns.values() if t.parent == at]:
            at = max(below)
        return at

    def drop(self, turn: int) -> None:
        """Forget a turn that nothing follows."""
        gone = self.turns.pop(turn)
        if self.leaf == turn:
            self.leaf = gone.parent

    def __iter__(self) -> Iterator[Turn]:
        return iter(sorted(self.turns.values(), key=lambda t: t.id))


def fork_title(title: str, others: Iterable[str]) -> str:
    """What a fork is called: it, and forks of it, are numbered."""
    base, numbers = _forked(title)[0][:LONGEST_FORKED], [0]
    numbers += [number for name, number in map(_forked, others) if name[:LONGEST_FORKED] == base]
    number = max(numbers) + 1
    return f"{base} (fork)" if number == 1 else f"{base} (fork {number})"


def _forked(title: str) -> tuple[str, int]:
    """What was forked, and which fork of it this is; 0: none."""
    found = FORK.search(title)
    return (title[: found.start()], int(found[1] or 1)) if found else (title, 0)


def title_of(text: str) -> str:
    """What a conversation is called that begins with this text."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= MOST_TITLE else line[: MOST_TITLE - 1].rstrip() + "…"
