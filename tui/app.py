"""The terminal chat."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from hetrun.client import ChatClient
from hetrun.params import SamplingParams
from hetrun.tui.screens.chat import ChatScreen


class ChatApp(App[None]):
    """A conversation with the model behind `client`, which stays the caller's to close."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    TITLE = "hetrun"
    ENABLE_COMMAND_PALETTE = False
    # Textual has this binding too, but keeps it out of the footer.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", priority=True)]

    def __init__(
        self, client: ChatClient, params: SamplingParams | None = None, system: str | None = None
    ) -> None:
        super().__init__()
        self._screen = ChatScreen(client, params or SamplingParams(), system)

    def get_default_screen(self) -> ChatScreen:
        return self._screen

    @property
    def load_error(self) -> Exception | None:
        """Why there is no model, if there is none."""
        return self._screen.load_error
