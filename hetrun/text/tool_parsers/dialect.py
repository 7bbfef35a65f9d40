"""Families that write an answer as messages, each with a header that says for whom it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Part = Any  # of a grammar, as in `forced_calls`
Kind = Literal["text", "thought", "call"]

START, MESSAGE = "<|start|>", "<|message|>"  # of a header, and of what it is for
ASSISTANT = "assistant"
PEOPLE = frozenset(("", ASSISTANT, "user", "all"))  # who is addressed by what is no call


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says."""

    role: str
    channel: str
    recipient: str


@dataclass(frozen=True)
class Dialect:
    """How a family does it. The prompt has written `<|start|>assistant`: an answer begins within a header."""

    name: str
    thought: str  # with which a thought begins
    begins: tuple[str, ...]  # what an answer may begin with, to be known by
    within: tuple[str, ...]  # marks in headers, besides those that all have
    ends: tuple[str, ...]  # of messages; the first is one that others follow
    kind: Callable[[Header], Kind]
    is_last: Callable[[Header], bool]  # whether its message is the answer's last
    thinking: tuple[Part, ...]  # the header of a thought, for grammars
    answering: tuple[Part, ...]  # that of the last message
    tagged: bool = False  # whether arguments of calls stand between tags, and not as JSON

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them."""
        return (START, *self.within, MESSAGE, *self.ends)

    @property
    def next_message(self) -> list[Part]:
        """What stands before the header of another message."""
        return [{"mark": START}, ASSISTANT]

    @property
    def thought_message(self) -> list[Part]:
        """A message that is thought, and the beginning of another."""
        return [*self.thinking, {"until": self.ends[0]}, *self.next_message]

    def final(self, form: Part) -> list[Part]:
        """The last message, of this form."""
        return [*self.answering, form]
