"""The conversations that were kept, the newest first, and a line to search them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from hetrun.system.terminal_text import visible
from hetrun.tui.store.tree import Conversation

What = Literal["open", "rename", "delete", "export", "menu"]


class Titles(OptionList):
    """The list itself, and what its keys do with a conversation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # No letters: they begin a message, wherever they are typed.
        Binding("right", "do('menu')", "Menu", key_display="→"),
        Binding("delete", "do('delete')", "Delete", key_display="Del"),
    ]

    @dataclass
    class Wanted(Message):
        """Do this with a conversation."""

        what: What
        number: int

    def action_do(self, what: What) -> None:
        if self.highlighted is not None:
            option = self.get_option_at_index(self.highlighted)
            self.post_message(self.Wanted(what, int(option.id or 0)))


class Sidebar(Vertical):
    """Search and titles."""

    @dataclass
    class Search(Message):
        """Show those in which this stands."""

        text: str

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Search conversations", compact=True)
        yield Titles()

    def show(self, conversations: Sequence[Conversation], current: int | None) -> None:
        """These, and which is open."""
        titles = self.query_one(Titles)
        titles.set_options([Option(Content(visible(c.title)), str(c.id)) for c in conversations])
        numbers = [c.id for c in conversations]
        titles.highlighted = numbers.index(current) if current in numbers else None

    @property
    def searched(self) -> str:
        return self.query_one(Input).value.strip()

    @on(Input.Changed)
    def _searched(self, message: Input.Changed) -> None:
        message.stop()
        self.post_message(self.Search(message.value.strip()))

    @on(Input.Submitted)
    def _to_titles(self, message: Input.Submitted) -> None:
        message.stop()
        self.screen.set_focus(self.query_one(Titles))

    @on(OptionList.OptionSelected)
    def _open(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        self.post_message(Titles.Wanted("open", int(message.option_id or 0)))
