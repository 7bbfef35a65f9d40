"""One turn of the conversation as lines: what the user said, what the model answered, or what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from textual.strip import Strip

from hetrun.system.terminal_text import visible
from hetrun.text.chat.answer_parser import Divider
from hetrun.text.chat.channels import ChannelReader
from hetrun.text.tool_parsers import gemma4
from hetrun.text.tool_parsers.dialects import BY_NAME, BY_THOUGHT
from hetrun.text.tool_parsers.formats import TEXT_ONLY, with_thoughts
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import MARKS, Prose, Thought, end_of
from hetrun.tui.store.tree import Turn
from hetrun.tui.transcript.markdown import Document, MarkdownBlock, plain_lines
from hetrun.tui.transcript.thumbnails import Card, side_by_side

Kind = Literal["user", "assistant", "error"]
WAITING = "…"


class LineStyle(NamedTuple):
    """What lines depend on besides the text."""

    width: int
    dark: bool


@dataclass(frozen=True, slots=True)
class DividedAnswer:
    """An answer apart from what was thought before it."""

    thought: str
    answer: str
    thinking: bool  # the thought has not ended


def divided(text: str, opened: str = "") -> DividedAnswer:
    """The thought at the beginning of a text, and all the rest; `opened`: the prompt has begun it."""
    mark, start = opened, text.lstrip()
    begun = (d for d in BY_NAME.values() if start.startswith(d.begins))
    if dialect := BY_THOUGHT.get(mark) if mark else next(begun, None):
        return _read(ChannelReader(tools=None, dialect=dialect), text, bool(opened))
    if mark == gemma4.THOUGHT or (not mark and gemma4.THOUGHT in text):
        return _read(CallReader(with_thoughts(TEXT_ONLY)), text, bool(opened))
    if not mark:
        mark = next((begin for begin, _ in MARKS if start.startswith(begin)), "")
        if not mark:
            return DividedAnswer("", text, False)
        text = start[len(mark) :]
    thought, ended, answer = text.partition(end_of(mark))
    return DividedAnswer(thought.strip(), answer.lstrip() if ended else "", not ended)


def _read(reader: Divider, text: str, opened: bool) -> DividedAnswer:
    """What was thought in an answer, wherever, and what was said."""
    if opened:
        reader.open()
    pieces = reader.push(text) + reader.finish()
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    answer = "".join(piece.text for piece in pieces if isinstance(piece, Prose))
    return DividedAnswer(thought, answer, not answer)


class TurnLines:
    """The lines of a turn; made again when the width changes, and at the end only while it is written."""

    def __init__(self, kind: Kind, turn: Turn | None = None, text: str = "") -> None:
        self.kind: Kind = kind
        self.turn = turn
        self.text = turn.text if turn else text
        self.note = turn.note if turn else ""
        self.opened = turn.opened if turn else ""  # the mark of a thought that the prompt had begun
        self.place = ""  # "2 of 3", where there are other versions
        self.unfolded = False  # the thought is shown
        self.waiting = False  # for more of it
        self.cards: list[Card] = []  # pictures
        self.doing = ""  # what is done before the first word comes
        self._look: LineStyle | None = None
        self._head: list[Strip] = []
        self._thought: list[Strip] = []
        self._foot: list[Strip] = []
        self._document: Document | None = None
        self._lines: list[Strip] | None = None

    @property
    def number(self) -> int | None:
        """Of its turn."""
        return self.turn.id if self.turn else None

    @property
    def look(self) -> LineStyle | None:
        """With which it was drawn."""
        return self._look

    @property
    def lines(self) -> list[Strip]:
        """All of them; `draw` comes first."""
        if self._lines is None:
            body = [line for block in self.blocks for line in block.lines]
            if self.kind != "assistant":
                body = self._head
                self._lines = [*body, *self._foot, Strip.blank(0)]
            else:
                self._lines = [*self._head, *self._thought, *body, *self._foot]
        return self._lines

    @property
    def blocks(self) -> list[MarkdownBlock]:
        """Of an answer's Markdown."""
        return self._document.blocks if self._document else []

    @property
    def codes(self) -> list[str]:
        """What stands in its code blocks."""
        return [block.code for block in self.blocks if block.code is not None]

    def draw(self, look: LineStyle) -> None:
        """Make the lines."""
        if look != self._look:
            self._look = look
            self._document = Document(look.width, look.dark) if self.kind == "assistant" else None
        if self.kind == "assistant":
            self._draw_answer(look)
        else:
            pictures = side_by_side(self.cards, look.width) if self.cards else []
            self._head = [*pictures, *plain_lines(self.text, look.width)]
        words = " · ".join(filter(None, (self.note, self.place)))
        self._foot = [*plain_lines(words, look.width, "dim"), Strip.blank(0)] if words else []
        if words and self.kind != "assistant":
            self._foot.pop()
        self._lines = None

    def _draw_answer(self, look: LineStyle) -> None:
        assert self._document is not None, "an answer has one"
        found = divided(self.text, self.opened)
        self._document.write(found.answer)
        self._head, self._thought = [], []
        if found.thought or found.thinking:
            arrow = "▾" if self.unfolded else "▸"
            doing = "Thinking" if found.thinking and self.waiting else "Thought"
            words = len(found.thought.split())
            self._head = [
                *plain_lines(f"{arrow} {doing}, {words} words", look.width, "dim italic"),
                Strip.blank(0),
            ]
            if self.unfolded:
                self._thought = [*plain_lines(visible(found.thought), look.width, "dim"), Strip.blank(0)]
        elif self.waiting and not self.text:
            self._head = [*plain_lines(f"{WAITING} {self.doing}".rstrip(), look.width, "dim"), Strip.blank(0)]

    def code_at(self, line: int) -> str | None:
        """The code of the block whose first line this is."""
        at = len(self._head) + len(self._thought)
        for block in self.blocks:
            if at == line and block.code is not None:
                return block.code
            at += len(block.lines)
        return None

    def is_fold(self, line: int) -> bool:
        """Whether this line folds the thought away."""
        return line == 0 and self.has_fold

    @property
    def has_fold(self) -> bool:
        """Whether something was thought."""
        return self.kind == "assistant" and bool(self._head) and not self._head[0].text.startswith(WAITING)
