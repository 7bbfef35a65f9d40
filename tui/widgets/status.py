"""One line: the model on the left, the figures of the last answer on the right."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from hetrun.system.terminal_text import visible
from hetrun.tui.messages import AnswerRates

NAME = 8  # cells that are the model's in any case


class StatusLine(Horizontal):
    """Model, tokens per second, time to the first token, the disk where weights come from it, tokens used."""

    _length = 0
    _shown = AnswerRates(), 0, 0

    def compose(self) -> ComposeResult:
        yield Static("", classes="model", markup=False)
        yield Static("", classes="figures", markup=False)

    def on_resize(self) -> None:
        self.show(*self._shown)

    def say(self, what: str) -> None:
        """The model's name, or why there is none."""
        self.query_one(".model", Static).update(visible(what))

    def show(self, measured: AnswerRates, used: int, context: int) -> None:
        """Figures, and how much of the context is used; a context of 0 is not known."""
        self._shown = measured, used, context
        first, disk = measured.first_token_s, measured.disk_bytes_s / 1e9
        parts = [
            (0, f"{measured.tokens_per_s:.0f} tokens/s" if measured.tokens_per_s else ""),
            (3, f"first after {first:.2f} s" if first else ""),
            (2, f"disk {disk:.1f} GB/s" if disk else ""),
            (1, f"{used} of {context} tokens" if context else ""),
        ]
        text = _fitting([part for part in parts if part[1]], self.size.width - NAME)
        grown = len(text) != self._length  # a new layout costs more than a line
        self._length = len(text)
        self.query_one(".figures", Static).update(text, layout=grown)


def _fitting(parts: list[tuple[int, str]], room: int) -> str:
    """As many figures as have room; those with the highest number go first."""
    while len(text := " · ".join(part for _, part in parts)) > room and len(parts) > 1:
        parts = [part for part in parts if part != max(parts)]
    return text
