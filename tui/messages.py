"""What widgets tell the screen."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class Sent(Message):
    """The user has written something and pressed Enter."""

    text: str


@dataclass
class AnswerRates(Message):
    """The figures of the running or last answer; zero where nothing was measured."""

    tokens_per_s: float = 0.0
    first_token_s: float = 0.0
    tokens: int = 0  # of the answer so far
    disk_bytes_s: float = 0.0  # where weights come from disk

    def can_replace(self, message: Message) -> bool:
        """A flood of figures collapses into the newest."""
        return isinstance(message, AnswerRates)


@dataclass
class SideTaskFailed(Message):
    """Something that ran beside the answer failed."""

    error: BaseException


class ScreenMade(Message):
    """The conversation's screen has all its widgets."""
