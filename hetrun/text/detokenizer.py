"""From pieces of bytes to text that is certain.

A token may end in the middle of a character, and what is written so far may be the beginning of a stop
string. `StreamDecoder` holds both back until the next piece decides. How the bytes are cut into pieces
changes when text comes, never which text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


class StreamDecoder:
    """The text of one answer. After a stop string, and after `flush`, it is `finished` and gives no more."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        # Bytes that can no longer become a character turn into U+FFFD, by Unicode's "maximal subpart" rule.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings([stop] if isinstance(stop, str) else stop) if stop else None
        self._state = 0
        self._held: deque[str] = deque()  # characters that may begin a stop string
        self.stopped: str | None = None
        self.finished = False

    def push(self, piece: bytes) -> str:
        """Take the next token's bytes; return the text that became certain."""
        return "" if self.finished else self._certain(self._decoder.decode(piece))

    def flush(self) -> str:
        """There are no more tokens: return what was held back."""
        if self.finished:
            return ""
        text = self._certain(self._decoder.decode(b"", final=True)) + "".join(self._held)
        self._held.clear()
        self.finished = True
        return text

    def _certain(self, text: str) -> str:
        if self._stops is None or (self._state == 0 and self._stops.cannot_begin_in(text)):
            return text
        out: list[str] = []
        for character in text:
            self._held.append(character)
            self._state = self._stops.after(self._state, character)
            found = self._stops.found[self._state]
            hold = len(found) if found is not None else self._stops.depth[self._state]
            out.extend(self._held.popleft() for _ in range(len(self._held) - hold))
            if found is not None:
                self._held.clear()
                self.stopped = found
                self.finished = True
                break
        return "".join(out)


@dataclass
class StopStrings:
    """An automaton that looks for all stop strings at once (Aho and Corasick): linear in the text.

    A state is the longest end of the text that begins a stop string; `depth` is its length. The stop string
    that is complete first wins, and of those complete at the same character the longest: a rule that waits
    for more text would not give the same answer however the text is cut into pieces.
    """

    strings: Sequence[str]
    depth: list[int] = field(default_factory=lambda: [0])
    found: list[str | None] = field(default_factory=lambda: [None])
    _next: list[dict[str, int]] = field(default_factory=lambda: [{}])
    _shorter: list[int] = field(
        default_factory=lambda: [0]
    )  # the longest proper end of a state that is a state

    def __post_init__(self) -> None:
        for string in self.strings:
            if not string:
                raise ValueError("an empty string stops every text")
            self._add(string)
        waiting = deque(self._next[0].values())
        while waiting:  # by growing depth, so that shorter states are complete
            state = waiting.popleft()
            if self.found[state] is None:
                self.found[state] = self.found[self._shorter[state]]
            for character, child in self._next[state].items():
                self._shorter[child] = self.after(self._shorter[state], character)
                waiting.append(child)

    def cannot_begin_in(self, text: str) -> bool:
        return self._next[0].keys().isdisjoint(text)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = string

    def after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
