"""The list above the box while a command is written: those that it may become, with a word on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from hetrun.system.terminal_text import visible
from hetrun.tui.commands import Offer

NAMES = 17  # cells


class CommandList(OptionList, can_focus=False):
    """Shown while there is something to choose. The box keeps the focus, and asks what it may become."""

    def __init__(self, offers: Callable[[str], Sequence[Offer]]) -> None:
        super().__init__()
        self._offers_for = offers
        self._offers: Sequence[Offer] = ()
        self._for = ""  # the text that they are for
        self._closed_for: str | None = None
        self.display = False

    def follow(self, text: str) -> bool:
        """Show what this text may become; whether that is anything."""
        if text != self._for:
            self._for = text
            self._closed_for = None if text != self._closed_for else text
            self._offers = self._offers_for(text)
            self.set_options([Option(_line(offer)) for offer in self._offers])
            # Nothing is chosen yet where nothing was said of it: Enter would do the first thing of all.
            self.highlighted = 0 if self._offers and not text.endswith(("/", " ")) else None
        self.display = bool(self._offers) and self._closed_for != text
        return self.display

    def close(self, text: str) -> None:
        """No list for this text, until it is another one."""
        self._closed_for = text
        self.follow(text)

    def move(self, step: int) -> None:
        """Choose the next or the one before, around the ends."""
        at = self.highlighted
        last = len(self._offers) - 1
        self.highlighted = (0 if step > 0 else last) if at is None else (at + step) % (last + 1)

    @property
    def chosen(self) -> Offer | None:
        """What is highlighted."""
        return None if self.highlighted is None else self.offer(self.highlighted)

    def offer(self, index: int) -> Offer:
        return self._offers[index]


def _line(offer: Offer) -> Content:
    name = f"{offer.label:<{NAMES}} " if offer.help else offer.label
    return Content.assemble((visible(name), "$primary"), (visible(offer.help), "$text-muted"))
