"""Slash commands: what each of them does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import cast

from textual.screen import Screen

from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import HetrunError
from hetrun.tui.commands import Offer, command_of, is_command, offers
from hetrun.tui.conversation import Talk
from hetrun.tui.notices import ChatNotices
from hetrun.tui.paths import names_picture
from hetrun.tui.screens.theme_choice import ThemeChoice
from hetrun.tui.screens.turn_actions import TurnActions
from hetrun.tui.screens.turn_menu import TurnAction
from hetrun.tui.widgets.prompt import Prompt


class PromptCommands:
    """Obeys what is written after a slash, and offers what may be."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        notices: ChatNotices,
        *,
        turns: TurnActions,
        theme: ThemeChoice,
        commands: Mapping[str, Callable[[str], object]],
    ) -> None:
        """`commands`: the others by name, called with what follows it."""
        self._screen = screen
        self._talk = talk
        self._notices = notices
        self._turns = turns
        self._theme = theme
        self._commands = commands

    def obey(self, text: str) -> bool:
        """Whether a text is a command; it is done then, or it is said why not, and the text stays."""
        if not is_command(text) or names_picture(text):
            return False
        prompt = self._screen.query_one(Prompt)
        prompt.sent(text)  # first: what is done may put another text there
        self._notices.hide()
        try:
            command, argument = command_of(text)
            self._do(command.name, argument)
        except HetrunError as error:
            self._notices.give_back(text)
            self._notices.say(str(error), error=True)
        return True

    def _do(self, name: str, argument: str) -> None:
        match name:
            case "edit" | "regenerate" | "fork" | "copy" | "tokens":
                self._turns.do_with_last(cast("TurnAction", name))
            case "theme":
                self._theme.choose(argument)
            case _:
                self._commands[name](argument)

    def offer(self, text: str) -> list[Offer]:
        """What the list above the box shows while this stands in it."""
        return offers(text, self._arguments)

    def _arguments(self, name: str) -> Iterable[tuple[str, str]]:
        """What may follow a command, with a word on each."""
        match name:
            case "set":
                for field in fields(SamplingParams):
                    value = self._talk.sampling.get(field.name, getattr(self._talk.usual, field.name))
                    yield field.name, "" if value is None or value == () else f"now {value}"
            case "theme":
                yield from ((theme, "") for theme in self._theme.names)
            case "preset":
                yield from ((preset, "") for preset in self._talk.store.presets())
