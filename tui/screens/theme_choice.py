"""The colours of the chat."""

from __future__ import annotations

from textual.screen import Screen

from hetrun.errors import UserError
from hetrun.tui.screens.dialogs import Choose, DialogChoice
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.workers import begin_work


class ThemeChoice:
    """Sets the theme, and keeps it for the next start."""

    def __init__(self, screen: Screen[None], store: ConversationStore) -> None:
        self._screen = screen
        self._store = store

    @property
    def names(self) -> list[str]:
        """All themes there are."""
        return sorted(self._screen.app.available_themes)

    def ask(self) -> None:
        """The theme that the user chooses."""
        begin_work(self._screen, self._ask, group="dialog")

    async def _ask(self) -> None:
        app = self._screen.app
        choices = [DialogChoice(theme, theme) for theme in self.names]
        chosen: str | None = await app.push_screen_wait(Choose("Colours", choices, app.theme))
        if chosen:
            self.choose(chosen)

    def choose(self, name: str) -> None:
        """These colours, from now on; without a name the user chooses."""
        app = self._screen.app
        if not name:
            self.ask()
        elif name not in app.available_themes:
            raise UserError(f"there is no theme {name}; known: {', '.join(self.names)}")
        else:
            app.theme = name
            self._store.save_choice("theme", name)
