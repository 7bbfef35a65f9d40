"""The turns so far, scrolled to the end unless the user has scrolled away from it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget


class Conversation(VerticalScroll, can_focus=False):
    """A list of turns."""

    def __init__(self, first: Widget) -> None:
        super().__init__()
        # At least as high as the view: an anchored view scrolls shorter contents down to its lower edge.
        self._turns = Vertical(first, classes="turns")

    def compose(self) -> ComposeResult:
        yield self._turns

    def on_mount(self) -> None:
        # Anchored, it follows its end; scrolling up lets go of it, and scrolling back down takes hold again.
        self.anchor()

    async def add(self, turn: Widget) -> None:
        """Put a turn at the end and show it."""
        await self._turns.mount(turn)
        self.anchor()

    async def clear(self) -> None:
        """Forget every turn."""
        await self._turns.remove_children()
        self.anchor()
