"""What a model thinks before it answers, apart from its answer.

Such models write `<think>`, their thoughts and `</think>`. Some templates write the first mark themselves, at
the end of the prompt; the answer then begins in the middle of a thought. gpt-oss and Muse have messages for
thoughts, which `channels` reads, and Gemma 4 thinks anywhere, which the reader of calls sees.
"""

from __future__ import annotations

import json
from typing import Literal

from hetrun.text.tool_parsers import dialects
from hetrun.text.tool_parsers.lookahead import Margin
from hetrun.text.tool_parsers.parts import MARKS, Piece, Prose, Thought, end_of, joined

AUTO, NONE, DEEPSEEK = "auto", "none", "deepseek"  # llama-server's names


def mark_of(template: str) -> str:
    """The mark with which a model of this template begins to think; nothing if it does not."""
    if dialect := dialects.of_template(template):
        return dialect.thought
    # What ends messages there ends other things elsewhere.
    return next((begin for begin, end in MARKS if end in template and begin not in dialects.BY_THOUGHT), "")


def opened_in(prompt: str) -> str:
    """The mark of a thought that a prompt has begun."""
    end = prompt[-64:].rstrip()
    return next((begin for begin, _ in MARKS if end.endswith(begin)), "")


def unclosed_in(text: str) -> str:
    """The mark of a thought that a text begins and does not end."""
    at, mark, end = max((text.rfind(begin), begin, end) for begin, end in MARKS)
    return mark if at >= 0 and end not in text[at + len(mark) :] else ""


def switched(on: bool) -> dict[str, object]:
    """The variables with which templates turn reasoning on or off: most have the first (Qwen, Gemma, GLM),
    DeepSeek's and Granite's the second."""
    return {"enable_thinking": on, "thinking": on}


def within_thought(mark: str, parts: str) -> str:
    """Parts of a structure (`grammar.composed`) for an answer that goes on with a thought."""
    dialect = dialects.BY_THOUGHT.get(mark)
    after = dialect.next_message if dialect else [{"space": True}]
    return f"[{json.dumps({'until': end_of(mark)})}, {json.dumps(after)}, {parts}]"


class ThoughtSplitter:
    """Divides an answer into the thoughts at its beginning and all the rest.

    Space around thoughts is none. An answer that ends within a thought was nothing but thinking.
    """

    def __init__(self, mark: str, resumed: bool = False) -> None:
        """`resumed`: the answer continues a message, whose beginning the client has."""
        self._mark = mark
        self._resumed = resumed
        self._read = ""  # of the mark, and
        self._space: list[str] = []  # before it
        self._margin = Margin([end_of(mark)])
        self._thinking = False  # something was thought
        self._pieces: list[Piece] = []
        self._state: Literal["before", "thought", "behind", "answer"] = "answer" if resumed else "before"

    @property
    def begun(self) -> int:
        """Calls so far: it looks for none."""
        return 0

    def open(self) -> None:
        """The prompt has begun a thought."""
        self._state, self._thinking = "thought", self._resumed

    def push(self, text: str) -> list[Piece]:
        """Take more text; what is certain now."""
        for at, c in enumerate(text):
            if self._state == "answer":
                self._pieces.append(Prose(text[at:]))
                break
            self._take(c)
        return self._taken()

    def finish(self) -> list[Piece]:
        """There is no more: what was held back."""
        if self._state == "before":
            self._pieces += map(Prose, (*self._space, self._read))
        elif self._state == "thought":
            self._margin.finish()
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = joined([*map(Thought, self._margin.certain), *self._pieces]), []
        self._margin.certain = []
        return pieces

    def _take(self, c: str) -> None:
        if self._state == "before":
            self._begin(c)
        elif self._state == "thought":
            self._think(c)
        elif not c.isspace():
            self._state = "answer"
            self._pieces.append(Prose(c))

    def _begin(self, c: str) -> None:
        """Space, and then the mark, or the answer begins without a thought."""
        if c.isspace() and not self._read:
            self._space.append(c)
        elif not self._mark.startswith(self._read + c):
            self._state = "answer"
            self._pieces += map(Prose, (*self._space, self._read, c))
        else:
            self._read += c
            if self._read == self._mark:
                self._state = "thought"

    def _think(self, c: str) -> None:
        if self._margin.take(c):
            self._state = "behind"
        elif not self._thinking:
            self._margin.space = []  # before the first thought
            self._thinking = bool(self._margin.certain)
