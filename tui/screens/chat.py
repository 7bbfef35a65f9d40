"""The conversation screen: conversations, the open one of them, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static, TextArea
from textual.worker import Worker, WorkerState

from hetrun.client.interface import ChatClient
from hetrun.tui.conversation import Talk
from hetrun.tui.host import Doors
from hetrun.tui.messages import AnswerRates, ScreenMade, Sent, SideTaskFailed
from hetrun.tui.screens.answer_writer import ANSWER
from hetrun.tui.screens.chat_parts import ChatParts
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
        self.is_made = False  # with all that is in it
        self.parts = ChatParts(self, client, talk, doors, reports=reports)

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            yield Sidebar(id="sidebar")
            with Vertical(id="middle"):
                yield Static("", id="told-first", markup=False)
                yield Welcome()
                yield Transcript()
                yield StatusLine()
                yield Chips()
                yield (commands := CommandList(self.parts.commands.offer))
                yield Notice()
                yield Prompt(commands)
            yield MachinePane(id="machine")
        yield Footer(compact=True)  # all of it has room in 80 columns

    def on_mount(self) -> None:
        self.parts.cards.prepare()
        self.query_one(Transcript).offers = self.parts.turns.offers
        prompt = self.query_one(Prompt)
        self.set_focus(prompt)
        with self.parts.notices.telling():
            prompt.remember(self.talk.store.said())
        self.parts.view.show()
        self.parts.engine.load()
        self.parts.machine.begin()
        self.is_made = True
        self.app.post_message(ScreenMade())

    def begin_message(self) -> None:
        """A letter comes: it is for the box, unless something is written elsewhere."""
        if isinstance(self.focused, Transcript | Titles | MachinePane) or self.focused is None:
            self.set_focus(self.query_one(Prompt))

    # --- what Textual and widgets tell

    def on_resize(self, event: events.Resize) -> None:
        self.parts.panes.fit(event.size)

    @on(TextArea.Changed, "Prompt")
    def _written(self, message: TextArea.Changed) -> None:
        text = message.text_area.text
        self.query_one(CommandList).follow(text)
        self.query_one(Notice).written(text)

    @on(Sent)
    def _sent(self, message: Sent) -> None:
        self.parts.sender.take(message.text)

    @on(AnswerRates)
    def _measured_meanwhile(self, message: AnswerRates) -> None:
        self.parts.answers.observe(message)

    @on(Worker.StateChanged)
    def _worker_ended(self, message: Worker.StateChanged) -> None:
        if message.worker.group == ANSWER:
            with self.parts.notices.telling():
                self.parts.answers.end(message)
        elif message.state is WorkerState.ERROR and message.worker.error:
            self.app.post_message(SideTaskFailed(message.worker.error))

    @on(Prompt.Pasted)
    def _pasted(self, message: Prompt.Pasted) -> None:
        self.parts.draft.take_pasted(message)

    @on(Prompt.Pasting)
    def _pasting(self, message: Prompt.Pasting) -> None:
        self.parts.draft.paste_copied(message)

    @on(Prompt.Erasing)
    def _erasing(self) -> None:
        self.parts.draft.detach_last()

    @on(Prompt.Escaped)
    def _escaped(self) -> None:
        if self.parts.answers.current is not None or self.parts.engine.bringing:
            self.action_stop()
        elif self.parts.draft.coming:
            self.parts.draft.stop_reading()
        elif self.parts.draft.editing:
            self.action_cancel()

    @on(Sidebar.Search)
    def _search(self) -> None:
        self.parts.listing.show()

    @on(Titles.Wanted)
    def _do_with_conversation(self, message: Titles.Wanted) -> None:
        self.parts.conversations.do(message.what, message.number)

    @on(Transcript.Copy)
    def _copy(self, message: Transcript.Copy) -> None:
        self.parts.turns.copy(message.text)

    @on(Transcript.Do)
    def _do(self, message: Transcript.Do) -> None:
        self.parts.turns.do(cast("TurnAction", message.what), message.entry)

    @on(Transcript.Menu)
    def _menu(self, message: Transcript.Menu) -> None:
        self.parts.turns.choose(message.entry)

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
            return self.parts.answers.current is not None or self.parts.engine.bringing
        if action == "cancel":
            return self.parts.draft.editing
        return action != "back" or not isinstance(self.focused, Prompt)

    def action_stop(self) -> None:
        if self.parts.answers.current is not None:
            self.parts.answers.stop()
        else:
            self.parts.engine.give_up_bringing()

    def action_cancel(self) -> None:
        self.parts.draft.cancel()

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
        self.parts.conversations.begin()

    def action_pane(self, name: str) -> None:
        self.parts.panes.toggle(name)

    def action_search(self) -> None:
        self.parts.panes.open_search()

    def action_attach(self) -> None:
        self.parts.draft.ask_for_file()

    def action_detach(self, kind: str, number: int) -> None:
        self.parts.draft.detach(kind, number)

    def action_regenerate(self) -> None:
        with self.parts.notices.telling():
            self.parts.turns.do_with_last("regenerate")

    def action_help(self) -> None:
        self.parts.show_help()

    def action_settings(self) -> None:
        self.parts.settings.choose()

    def action_template(self) -> None:
        self.parts.show_template()

    def action_what_if(self) -> None:
        self.parts.show_what_if()

    def action_model(self) -> None:
        with self.parts.notices.telling():
            self.parts.engine.choose_model()

    def action_theme(self) -> None:
        self.parts.theme.ask()
