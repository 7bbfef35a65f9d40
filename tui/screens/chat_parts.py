"""The parts of the chat screen, put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textual.screen import Screen

from hetrun.client.interface import ChatClient
from hetrun.tui.conversation import Talk
from hetrun.tui.host import Doors
from hetrun.tui.notices import ChatNotices
from hetrun.tui.screens.answer_writer import AnswerWriter
from hetrun.tui.screens.conversation_actions import ConversationActions
from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.conversation_settings import ConversationSettings
from hetrun.tui.screens.conversation_view import ConversationView
from hetrun.tui.screens.draft import MessageDraft
from hetrun.tui.screens.engine_control import EngineControl
from hetrun.tui.screens.figures import AnswerFigures
from hetrun.tui.screens.help import HelpScreen
from hetrun.tui.screens.machine_watch import MachineWatch
from hetrun.tui.screens.message_sender import MessageSender
from hetrun.tui.screens.panes import SidePanes
from hetrun.tui.screens.picture_cards import PictureCards
from hetrun.tui.screens.prompt_commands import PromptCommands
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.theme_choice import ThemeChoice
from hetrun.tui.screens.turn_actions import TurnActions


class ChatParts:
    """Gives each part the parts it stands on; the screen passes on to them what Textual tells it."""

    def __init__(
        self, screen: Screen[None], client: ChatClient, talk: Talk, doors: Doors, *, reports: Path | None
    ) -> None:
        self._screen = screen
        self.notices = notices = ChatNotices(screen, reports)
        self.engine = engine = self._engine(client, doors)
        self.cards = cards = PictureCards(screen, talk.store)
        self.draft = draft = MessageDraft(screen, talk, engine, notices, cards=cards)
        self.figures = figures = AnswerFigures(screen, engine)
        self.listing = listing = ConversationList(screen, talk, notices)
        self.settings = ConversationSettings(screen, talk, notices)
        self.view = view = ConversationView(
            screen, talk, cards=cards, figures=figures, settings=self.settings, listing=listing
        )
        self.answers = answers = AnswerWriter(
            screen,
            talk,
            engine,
            notices,
            draft=draft,
            view=view,
            figures=figures,
            listing=listing,
            look=lambda: self.machine.look(at_once=True),
        )
        self.machine = MachineWatch(screen, engine, answers, figures)
        self.panes = SidePanes(screen, listing, self.machine)
        self.conversations = ConversationActions(
            screen, talk, notices, view=view, listing=listing, answers=answers, draft=draft
        )
        self.turns = TurnActions(
            screen,
            talk,
            engine,
            notices,
            view=view,
            draft=draft,
            answers=answers,
            conversations=self.conversations,
        )
        self.theme = ThemeChoice(screen, talk.store)
        self.commands = self._commands(screen, talk)
        self.sender = MessageSender(
            screen,
            engine,
            notices,
            self.commands,
            draft=draft,
            view=view,
            listing=listing,
            answers=answers,
        )

    def _engine(self, client: ChatClient, doors: Doors) -> EngineControl:
        return EngineControl(
            self._screen,
            client,
            doors,
            self.notices,
            on_loaded=lambda info: self.machine.begin_model(info),
            on_known=lambda info: self.machine.update_model(info),
            on_failure=lambda text: self.view.complain(text),
            note=lambda reason: self.figures.facts.note(reason),
            free=lambda: self.conversations.free(),
        )

    def _commands(self, screen: Screen[None], talk: Talk) -> PromptCommands:
        by_name: dict[str, Callable[[str], object]] = {
            "new": lambda _: screen.call_later(self.conversations.begin),
            "settings": lambda _: screen.call_later(self.settings.choose),
            "template": lambda _: screen.call_later(self.show_template),
            "help": lambda _: screen.call_later(self.show_help),
            "delete": lambda _: self.conversations.delete(),
            "whatif": lambda _: self.show_what_if(),
            "machine": lambda _: self.panes.toggle("machine"),
            "conversations": lambda _: self.panes.toggle("sidebar"),
            "quit": lambda _: screen.app.exit(),
            "model": self.engine.choose_model,
            "system": self.settings.set_system,
            "set": self.settings.set_sampling,
            "preset": self.settings.apply_preset,
            "attach": self.draft.attach,
            "rename": self.conversations.rename,
            "export": self.conversations.export,
            "import": self.conversations.bring_in,
        }
        return PromptCommands(
            screen, talk, self.notices, turns=self.turns, theme=self.theme, commands=by_name
        )

    def show_help(self) -> None:
        """The help screen."""
        self._screen.app.push_screen(HelpScreen(self._screen.app.size.width))

    def show_template(self) -> None:
        """The prompt that is sent next, as the model's template has it."""
        heading, messages = self.draft.next_prompt()
        self._screen.app.push_screen(TemplateScreen(self.engine.client, heading, messages))

    def show_what_if(self) -> None:
        """What other options would change."""
        decode = self.figures.facts.decode
        self.engine.try_options(decode[-1] if decode else 0.0)
