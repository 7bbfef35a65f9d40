"""One line: the model on the left, the figures of the last answer on the right."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from hetrun.events import ModelInfo
from hetrun.tui.messages import Measured
from hetrun.visible import visible


class StatusLine(Horizontal):
    """Model, tokens per second, time to the first token, the disk where weights come from it, tokens used."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity = 0

    def compose(self) -> ComposeResult:
        yield Static("", classes="model", markup=False)
        yield Static("", classes="figures", markup=False)

    def say(self, what: str) -> None:
        """Instead of a model's name."""
        self.query_one(".model", Static).update(what)

    def loaded(self, info: ModelInfo) -> None:
        self._capacity = info.context
        self.say(visible(info.id))
        self.show(Measured())

    def show(self, measured: Measured) -> None:
        parts = []
        if measured.tokens_per_s:
            parts.append(f"{measured.tokens_per_s:.0f} tokens/s")
        if measured.first_token_s:
            parts.append(f"first after {measured.first_token_s:.2f} s")
        if measured.disk_bytes_s:
            parts.append(f"disk {measured.disk_bytes_s / 1e9:.1f} GB/s")
        if self._capacity:
            parts.append(f"{measured.tokens_used} of {self._capacity} tokens")
        self.query_one(".figures", Static).update(" · ".join(parts))
