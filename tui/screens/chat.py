"""The conversation screen: conversations, the open one of them, and the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static, TextArea
from textual.worker import Worker, WorkerState

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.tui.conversation import Talk
from hetrun.tui.host import Doors
from hetrun.tui.messages import Failed, Measured, Sent
from hetrun.tui.screens.answer_writer import ANSWER, AnswerWriter
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
from hetrun.tui.screens.notices import ChatNotices
from hetrun.tui.screens.panes import SidePanes
from hetrun.tui.screens.picture_cards import PictureCards
from hetrun.tui.screens.prompt_commands import PromptCommands
from hetrun.tui.screens.template import TemplateScreen
from hetrun.tui.screens.theme_choice import ThemeChoice
from hetrun.tui.screens.turn_actions import TurnActions
from hetrun.tui.screens.turn_menu import TurnAction
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.chips import Chips
from hetrun.tui.widgets.command_list import CommandList
from hetrun.tui.widgets.machine import MachinePane
from hetrun.tui.widgets.notice import Notice
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.sidebar import Sidebar, Titles
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.welcome import Welcome


class ChatScreen(Screen[None]):
    """Conversations with one model. The screen has what Textual calls by name; its parts do the work."""

    # With priority, keys that follow at once find what these have done.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", key_display="Esc"),
        Binding("escape", "cancel", "Cancel", key_display="Esc"),
        Binding("escape", "back", "Back", key_display="Esc"),
        Binding("f1", "help", "Help", priority=True),
        Binding("ctrl+n", "new", "New", priority=True),
        Binding("f2", "pane('sidebar')", "Chats", priority=True),
        Binding("f3", "pane('machine')", "Machine", priority=True),
        Binding("f4", "what_if", "What if", priority=True),
        Binding("f5", "settings", "Settings", priority=True),
        Binding("f6", "model", "Model", show=False, priority=True),
        Binding("f7", "template", "Template", show=False, priority=True),
        Binding("f8", "theme", "Theme", show=False, priority=True),
        Binding("ctrl+f", "search", "Search", show=False, priority=True),
        Binding("ctrl+o", "attach", "Attach", show=False, priority=True),
        Binding("ctrl+r", "regenerate", "Regenerate", show=False, priority=True),
        Binding("ctrl+up", "turns", "Turns", show=False, priority=True),
    ]

    def __init__(self, client: ChatClient, talk: Talk, doors: Doors, reports: Path | None = None) -> None:
        """`reports`: the folder for reports of the chat's own faults."""
        super().__init__()
        self.talk = talk
        self.notices = notices = ChatNotices(self, reports)
        self.engine = engine = EngineControl(
            self,
            client,
            doors,
            notices,
            on_loaded=self._show_loaded,
            on_known=self._show_known,
            on_failure=lambda text: self.view.complain(text),
            note=lambda reason: self.figures.facts.note(reason),
            free=lambda: self.conversations.free(),
        )
        self.cards = cards = PictureCards(self, talk.store)
        self.draft = draft = MessageDraft(self, talk, engine, notices, cards=cards)
        self.figures = figures = AnswerFigures(self, engine)
        self.listing = listing = ConversationList(self, talk, notices)
        self.settings = ConversationSettings(self, talk, notices)
        self.view = view = ConversationView(
            self, talk, cards=cards, figures=figures, settings=self.settings, listing=listing
        )
        self.answers = answers = AnswerWriter(
            self,
            talk,
            engine,
            notices,
            draft=draft,
            view=view,
            figures=figures,
            listing=listing,
            look=lambda: self.machine.look(at_once=True),
        )
        self.machine = MachineWatch(self, engine, answers, figures)
        self.panes = SidePanes(self, listing, self.machine)
        self.conversations = ConversationActions(
            self, talk, notices, view=view, listing=listing, answers=answers, draft=draft
        )
        self.turns = TurnActions(
            self,
            talk,
            engine,
            notices,
            view=view,
            draft=draft,
            answers=answers,
            conversations=self.conversations,
        )
        self.theme = ThemeChoice(self, talk.store)
        self.commands = self._commands()
        self.sender = MessageSender(
            self,
            engine,
            notices,
            self.commands,
            draft=draft,
            view=view,
            listing=listing,
            answers=answers,
        )

    def _commands(self) -> PromptCommands:
        by_name: dict[str, Callable[[str], object]] = {
            "new": lambda _: self.call_later(self.action_new),
            "settings": lambda _: self.call_later(self.action_settings),
            "template": lambda _: self.call_later(self.action_template),
            "help": lambda _: self.call_later(self.action_help),
            "delete": lambda _: self.conversations.delete(),
            "whatif": lambda _: self.action_what_if(),
            "machine": lambda _: self.panes.toggle("machine"),
            "conversations": lambda _: self.panes.toggle("sidebar"),
            "quit": lambda _: self.app.exit(),
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
            self, self.talk, self.notices, turns=self.turns, theme=self.theme, commands=by_name
        )

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            yield Sidebar(id="sidebar")
            with Vertical(id="middle"):
                yield Static("", id="told-first", markup=False)
                yield Welcome()
                yield Transcript()
                yield StatusLine()
                yield Chips()
                yield (commands := CommandList(self.commands.offer))
                yield Notice()
                yield Prompt(commands)
            yield MachinePane(id="machine")
        yield Footer(compact=True)  # all of it has room in 80 columns

    def on_mount(self) -> None:
        self.cards.prepare()
        self.query_one(Transcript).offers = self.turns.offers
        prompt = self.query_one(Prompt)
        self.set_focus(prompt)
        with self.notices.telling():
            prompt.remember(self.talk.store.said())
        self.view.show()
        self.engine.load()
        self.machine.begin()

    def _show_loaded(self, info: ModelInfo) -> None:
        self.figures.begin_model(info)
        self._show_known(info)

    def _show_known(self, info: ModelInfo) -> None:
        self.figures.update_model(info)
        self.machine.look(at_once=True)

    def begin_message(self) -> None:
        """A letter comes: it is for the box, unless something is written elsewhere."""
        if isinstance(self.focused, Transcript | Titles | MachinePane) or self.focused is None:
            self.set_focus(self.query_one(Prompt))

    # --- what Textual and widgets tell

    def on_resize(self, event: events.Resize) -> None:
        self.panes.fit(event.size)

    @on(TextArea.Changed, "Prompt")
    def _written(self, message: TextArea.Changed) -> None:
        text = message.text_area.text
        self.query_one(CommandList).follow(text)
        self.query_one(Notice).written(text)

    @on(Sent)
    def _sent(self, message: Sent) -> None:
        self.sender.take(message.text)

    @on(Measured)
    def _measured_meanwhile(self, message: Measured) -> None:
        self.answers.observe(message)

    @on(Worker.StateChanged)
    def _worker_ended(self, message: Worker.StateChanged) -> None:
        if message.worker.group == ANSWER:
            with self.notices.telling():
                self.answers.end(message)
        elif message.state is WorkerState.ERROR and message.worker.error:
            self.app.post_message(Failed(message.worker.error))

    @on(Prompt.Pasted)
    def _pasted(self, message: Prompt.Pasted) -> None:
        self.draft.take_pasted(message)

    @on(Prompt.Pasting)
    def _pasting(self, message: Prompt.Pasting) -> None:
        self.draft.paste_copied(message)

    @on(Prompt.Erasing)
    def _erasing(self) -> None:
        self.draft.detach_last()

    @on(Prompt.Escaped)
    def _escaped(self) -> None:
        if self.answers.current is not None or self.engine.bringing:
            self.action_stop()
        elif self.draft.coming:
            self.draft.stop_reading()
        elif self.draft.editing:
            self.action_cancel()

    @on(Sidebar.Search)
    def _search(self) -> None:
        self.listing.show()

    @on(Titles.Wanted)
    def _do_with_conversation(self, message: Titles.Wanted) -> None:
        self.conversations.do(message.what, message.number)

    @on(Transcript.Copy)
    def _copy(self, message: Transcript.Copy) -> None:
        self.turns.copy(message.text)

    @on(Transcript.Do)
    def _do(self, message: Transcript.Do) -> None:
        self.turns.do(cast("TurnAction", message.what), message.entry)

    @on(Transcript.Menu)
    def _menu(self, message: Transcript.Menu) -> None:
        self.turns.choose(message.entry)

    @on(OptionList.OptionSelected, "CommandList")
    def _command_clicked(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        self.query_one(Prompt).take(message.option_index)

    @on(OptionList.OptionHighlighted)
    def _nothing(self, message: OptionList.OptionHighlighted) -> None:
        message.stop()

    # --- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Stop is offered while there is something to stop."""
        if action == "stop":
            return self.answers.current is not None or self.engine.bringing
        if action == "cancel":
            return self.draft.editing
        return action != "back" or not isinstance(self.focused, Prompt)

    def action_stop(self) -> None:
        if self.answers.current is not None:
            self.answers.stop()
        else:
            self.engine.give_up_bringing()

    def action_cancel(self) -> None:
        self.draft.cancel()

    def action_back(self) -> None:
        self.set_focus(self.query_one(Prompt))

    def action_page(self, direction: int) -> None:
        transcript = self.query_one(Transcript)
        transcript.catch_up()
        transcript.scroll_relative(y=direction * (transcript.size.height - 1), animate=False)

    @on(Prompt.Leaving)
    def action_turns(self) -> None:
        """Walk through the turns."""
        transcript = self.query_one(Transcript)
        if transcript.entries:
            self.set_focus(transcript)  # at once: the next key is for it
            transcript.action_select(-1)

    def action_new(self) -> None:
        self.conversations.begin()

    def action_pane(self, name: str) -> None:
        self.panes.toggle(name)

    def action_search(self) -> None:
        self.panes.open_search()

    def action_attach(self) -> None:
        self.draft.ask_for_file()

    def action_detach(self, kind: str, number: int) -> None:
        self.draft.detach(kind, number)

    def action_regenerate(self) -> None:
        with self.notices.telling():
            self.turns.do_with_last("regenerate")

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(self.app.size.width))

    def action_settings(self) -> None:
        self.settings.choose()

    def action_template(self) -> None:
        heading, messages = self.draft.next_prompt()
        self.app.push_screen(TemplateScreen(self.engine.client, heading, messages))

    def action_what_if(self) -> None:
        decode = self.figures.facts.decode
        self.engine.try_options(decode[-1] if decode else 0.0)

    def action_model(self) -> None:
        with self.notices.telling():
            self.engine.choose_model()

    def action_theme(self) -> None:
        self.theme.ask()
