"""The exact prompt that is sent, as the model's template makes it."""

from __future__ import annotations

from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from hetrun.client.events import Message
from hetrun.client.interface import ChatClient
from hetrun.client.queries import Render, Tokenize, TokenizerInfo
from hetrun.errors import HetrunError
from hetrun.system.terminal_text import visible
from hetrun.tui.screens.dialogs import Dialog
from hetrun.tui.widgets.text_box import TextBox


class TemplateScreen(Dialog[None]):
    """What messages become, and the template itself."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", key_display="Esc"),
        Binding("tab", "other", "Prompt or template", priority=True),
        Binding("y", "copy", "Copy"),
    ]

    def __init__(self, client: ChatClient, heading: str, messages: tuple[Message, ...]) -> None:
        super().__init__()
        self._client = client
        self._messages = messages
        self._texts = ["", ""]
        self._heads = [heading, ""]
        self._at = 0

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("The prompt", classes="title", markup=False)
            yield TextBox("", read_only=True, show_line_numbers=False, classes="body")
            yield Static("Esc closes, Tab shows the template itself, y copies", classes="keys", markup=False)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(TextBox), scroll_visible=False)
        self._render_prompt()

    @work(exit_on_error=False)
    async def _render_prompt(self) -> None:
        try:
            facts = await self._client.ask(TokenizerInfo())
            self._texts[1], self._heads[1] = facts.template, f"The template, from {facts.template_origin}"
            self._texts[0] = await self._client.ask(Render(self._messages))
            tokens = await self._client.ask(Tokenize(self._texts[0]))
            self._heads[0] += f", {len(tokens):,} tokens"
        except HetrunError as error:
            self._heads[0] = "There is no prompt to show"
            self._texts[0] = str(error)
        self._show()

    def _show(self) -> None:
        self.query_one(".title", Static).update(visible(self._heads[self._at]))
        self.query_one(TextBox).load_text(visible(self._texts[self._at]))

    def action_other(self) -> None:
        self._at = 1 - self._at
        self._show()

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._texts[self._at])
        self.query_one(".keys", Static).update("Copied")
