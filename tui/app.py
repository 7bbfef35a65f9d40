"""The terminal chat."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.driver import Driver

from hetrun.client.interface import ChatClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import UserError
from hetrun.tui.conversation import Talk
from hetrun.tui.host import Doors
from hetrun.tui.screens.chat import ChatScreen
from hetrun.tui.store.store import Store

THEME = "textual-dark"


class ChatApp(App[None]):
    """Conversations with the model behind a client, kept in `place`, or in memory alone where it is None."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    TITLE = "hetrun"
    ENABLE_COMMAND_PALETTE = False
    # Textual has this binding too, but keeps it out of the footer.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q", "quit", "Quit", priority=True)]

    def __init__(
        self,
        client: ChatClient,
        params: SamplingParams | None = None,
        system: str | None = None,
        place: Path | None = None,
        doors: Doors | None = None,
    ) -> None:
        super().__init__()
        self._trouble = ""
        try:
            self._store = Store(place)
        except UserError as error:
            # Whoever wants to chat can; what is said is not kept, and they hear of it.
            self._store, self._trouble = Store(None), str(error)
        talk = Talk(self._store, params or SamplingParams(), system or "")
        self._screen = ChatScreen(client, talk, doors or Doors())

    def get_driver_class(self) -> type[Driver]:
        """Our own where Textual would take its usual one."""
        found = super().get_driver_class()
        if found.__name__ != "LinuxDriver":
            return found
        try:
            from hetrun.tui.keyboard import QuickDriver  # which no other system has
        except ImportError:  # it stands on modules that Textual may move; then Escape is heard 0.1 s later
            return found
        return QuickDriver

    def get_default_screen(self) -> ChatScreen:
        return self._screen

    def on_mount(self) -> None:
        theme = self._store.choice("theme", THEME)
        if theme in self.available_themes:
            self.theme = theme
        if self._trouble:
            self.notify(f"{self._trouble}. This time nothing is kept", severity="warning", timeout=20)

    def on_unmount(self) -> None:
        self._screen.leave()
        self._store.close()

    @property
    def client(self) -> ChatClient:
        """The engine in use; it stays the caller's to close."""
        return self._screen.client

    @property
    def load_error(self) -> Exception | None:
        """Why there is no model, if there is none."""
        return self._screen.load_error
