"""Text in which marks may stand, let go as soon as it is certain that it is none of them."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.text.detokenizer import StopStrings


class Margin:
    """Looks for marks. `certain` text is the caller's to take; space that may stand before a mark waits."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = StopStrings(marks)
        self._state = 0
        self._held = ""  # may begin a mark
        self.space: list[str] = []
        self.certain: list[str] = []

    def quick(self, text: str) -> bool:
        """Take text in which no mark can begin."""
        if self._state or not self._marks.cannot_begin_in(text):
            return False
        self.say(text)
        return True

    def take(self, c: str) -> str | None:
        """Take a character; the mark that it ends."""
        self._held += c
        self._state = self._marks.after(self._state, c)
        found = self._marks.found[self._state]
        hold = len(found) if found is not None else self._marks.depth[self._state]
        said = self._held[: len(self._held) - hold]
        self.say(said)
        self._held = self._held[len(said) :]
        if found is not None:
            self._held, self._state = "", 0
        return found

    def say(self, text: str) -> None:
        """This is text, with what is known of its end."""
        said = text.rstrip()
        if said:
            self.certain += (*self.space, said)
            self.space = []
        if len(said) < len(text):
            self.space.append(text[len(said) :])

    def drop(self) -> None:
        """What may begin a mark is no text."""
        self._held, self._state = "", 0

    def finish(self) -> None:
        """What may begin a mark does not."""
        self.say(self._held)
        self._held, self._state = "", 0
