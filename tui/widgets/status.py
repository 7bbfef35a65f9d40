"""One line: the model on the left, the figures of the last answer on the right."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from hetrun.tui.messages import Measured
from hetrun.visible import visible


class StatusLine(Horizontal):
    """Model, tokens per second, time to the first token, the disk where weights come from it, tokens used."""

    _length = 0

    def compose(self) -> ComposeResult:
        yield Static("", classes="model", markup=False)
        yield Static("", classes="figures", markup=False)

    def say(self, what: str) -> None:
        """The model's name, or why there is none."""
        self.query_one(".model", Static).update(visible(what))

    def show(self, measured: Measured, used: int, context: int) -> None:
        """Figures, and how much of the context is used; a context of 0 is not known."""
        parts: list[str] = []
        if measured.tokens_per_s:
            parts.append(f"{measured.tokens_per_s:.0f} tokens/s")
        if measured.first_token_s:
            parts.append(f"first after {measured.first_token_s:.2f} s")
        if measured.disk_bytes_s:
            parts.append(f"disk {measured.disk_bytes_s / 1e9:.1f} GB/s")
        if context:
            parts.append(f"{used} of {context} tokens")
        text = " · ".join(parts)
        grown = len(text) != self._length  # a new layout costs more than a line
        self._length = len(text)
        self.query_one(".figures", Static).update(text, layout=grown)
