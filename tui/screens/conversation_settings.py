"""System prompt and sampling of the open conversation."""

from __future__ import annotations

from textual.screen import Screen
from textual.widgets import Static

from hetrun.errors import UserError
from hetrun.system.terminal_text import visible
from hetrun.tui.conversation import Talk, parsed_value
from hetrun.tui.notices import ChatNotices
from hetrun.tui.screens.settings import ChosenSettings, SettingsScreen
from hetrun.tui.workers import begin_work


class ConversationSettings:
    """Changes them, and keeps the system prompt in sight."""

    def __init__(self, screen: Screen[None], talk: Talk, notices: ChatNotices) -> None:
        self._screen = screen
        self._talk = talk
        self._notices = notices

    def show(self) -> None:
        """What the model is told first stays in sight."""
        line = self._screen.query_one("#told-first", Static)
        line.update(f"system: {visible(' '.join(self._talk.system.split()))}")
        line.display = bool(self._talk.system)

    def choose(self) -> None:
        """The settings screen."""
        begin_work(self._screen, self._choose, group="dialog")

    async def _choose(self) -> None:
        screen = SettingsScreen(self._talk)
        chosen: ChosenSettings | None = await self._screen.app.push_screen_wait(screen)
        if chosen is not None:
            self._talk.choose(chosen.system, chosen.sampling)
            self.show()

    def set_system(self, text: str) -> None:
        """Another system prompt, or none."""
        self._talk.choose(text, self._talk.sampling)
        self.show()
        self._notices.say("System prompt set" if text else "System prompt removed")

    def set_sampling(self, argument: str) -> None:
        """One parameter, as in `temperature 0.2`."""
        what, _, value = argument.partition(" ")
        self._talk.choose(self._talk.system, {**self._talk.sampling, what: parsed_value(value)})
        self._notices.say(f"{what} = {value.strip()}")

    def apply_preset(self, name: str) -> None:
        """Both as a preset has them."""
        presets = self._talk.store.presets()
        if name not in presets:
            raise UserError(f"there is no preset {name}; known: {', '.join(presets) or 'none'}")
        self._talk.choose(*presets[name])
        self.show()
        self._notices.say(f"System prompt and sampling are those of the preset {name}")
