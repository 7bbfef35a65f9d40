"""The conversation screen: conversations, the open one of them, and the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Footer, OptionList, Static, TextArea
from textual.worker import Worker, WorkerState

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.errors import HetrunError, UserError
from hetrun.system.terminal_text import visible
from hetrun.tui.commands import Offer, offers
from hetrun.tui.conversation import Talk, with_files
from hetrun.tui.host import Doors
from hetrun.tui.machine import Facts, look
from hetrun.tui.messages import Measured, Sent
from hetrun.tui.paths import without_paths
from hetrun.tui.screens.actions import Orders
from hetrun.tui.screens.attachments import READING
from hetrun.tui.screens.navigation import EXCHANGING, percent
from hetrun.tui.store.tree import Turn
from hetrun.tui.streaming import Answering
from hetrun.tui.transcript.turn import Entry
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.chips import Chips
from hetrun.tui.widgets.command_list import CommandList
from hetrun.tui.widgets.machine import MachinePane
from hetrun.tui.widgets.notice import Notice
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.sidebar import Sidebar, Titles
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.welcome import Welcome

LOOK_S = 1.0  # between two looks at the machine while it answers: each draws its pane again
RATED = 4  # tokens of a prompt; fewer cost as much as one does
IDLE_LOOKS = 3  # this many times as long while it does not
SIDEBAR_FROM, MACHINE_FROM = 128, 100  # columns from which a pane is shown without being asked for


class ChatScreen(Orders):
    """Conversations with one model."""

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
        super().__init__()
        self.reports = reports
        self.client = client
        self.talk = talk
        self.doors = doors
        self.answering: Answering | None = None  # the answer that is being written
        self._writer: Worker[None] | None = None  # which writes it
        self.editing = False  # the next message takes the place of an earlier one
        self.parent_of_next: int | None = None  # where it goes then
        self._used = 0  # tokens of the context, as of the last complete answer
        self._measured = Measured()
        self._looks = 0
        self._asked_for: dict[str, bool] = {}  # panes that were shown or hidden by hand

    def compose(self) -> ComposeResult:
        with Horizontal(id="body"):
            yield Sidebar(id="sidebar")
            with Vertical(id="middle"):
                yield Static("", id="told-first", markup=False)
                yield Welcome()
                yield Transcript()
                yield StatusLine()
                yield Chips()
                yield (commands := CommandList(self._offered))
                yield Notice()
                yield Prompt(commands)
            yield MachinePane(id="machine")
        yield Footer(compact=True)  # all of it has room in 80 columns

    def on_mount(self) -> None:
        self.prepare_pictures()
        self.query_one(Transcript).offers = self.offers
        prompt = self.query_one(Prompt)
        self.set_focus(prompt)
        with self.telling():
            prompt.remember(self.talk.store.said())
        self.show_talk()
        self.load()
        self.set_interval(LOOK_S, self._look)

    def loaded(self, info: ModelInfo) -> None:
        """There is a model now."""
        before = self._facts
        self._facts = Facts(model=info.id, used=self._used, reasons=before.reasons, told=before.told)
        self.known(info)

    def known(self, info: ModelInfo) -> None:
        """More is known of the model; what was measured of it stays."""
        self._facts.context, self._facts.state = info.context, None  # its layers may lie elsewhere by now
        self._show_figures()
        self._look(at_once=True)

    # --- what is on the screen

    def show_talk(self) -> None:
        """The open conversation as the store has it."""
        path = self.talk.tree.path
        entries = [self.entry_of(turn) for turn in path]
        self.query_one(Transcript).show(entries)
        self.show_system()
        last = next((t.figures for t in reversed(path) if t.figures), {})
        self._used = int(last.get("prompt_tokens", 0)) + int(last.get("tokens", 0))
        self._measured = Measured(float(last.get("decode_tok_s", 0.0)), float(last.get("first_token_s", 0.0)))
        self._facts.used = self._used
        self._show_figures()
        self._show_welcome()
        self.list_conversations()
        self.refresh_bindings()
        if any(entry.cards for entry in entries):
            self.show_thumbnails()

    def show_system(self) -> None:
        """What the model is told first stays in sight."""
        line = self.query_one("#told-first", Static)
        line.update(f"system: {visible(' '.join(self.talk.system.split()))}")
        line.display = bool(self.talk.system)

    def say(self, text: str, error: bool = False) -> None:
        """What became of a command, or why it could not be done: above the box."""
        for notice in self.query(Notice):  # there is none any more when the app ends
            notice.say(text, self.query_one(Prompt).text, error)

    def entry_of(self, turn: Turn) -> Entry:
        """A turn as it is shown."""
        entry = Entry(turn.role, turn)
        entry.cards = self.cards_of(turn)
        versions = self.talk.tree.versions(turn)
        if len(versions) > 1:
            entry.place = f"version {versions.index(turn) + 1} of {len(versions)}"
        return entry

    def _show_welcome(self) -> None:
        empty = not self.query_one(Transcript).entries
        self.query_one(Welcome).display = empty
        self.query_one(Transcript).display = not empty

    def add(self, entry: Entry) -> Entry:
        """An entry at the end."""
        transcript = self.query_one(Transcript)
        self.query_one(Welcome).display = False
        transcript.display = True
        transcript.add(entry)
        return entry

    def complain(self, text: str) -> None:
        """Something went wrong; it is said in the conversation, and not kept with it."""
        self.add(Entry("error", text=text))

    def _show_figures(self) -> None:
        context = self.info.context if self.info else 0
        self.query_one(StatusLine).show(self._measured, self._used, context)

    # --- one exchange

    @on(TextArea.Changed, "Prompt")
    def _written(self, message: TextArea.Changed) -> None:
        text = message.text_area.text
        self.query_one(CommandList).follow(text)
        self.query_one(Notice).written(text)

    def _offered(self, text: str) -> list[Offer]:
        return offers(text, self.arguments)

    @on(Sent)
    def _sent(self, message: Sent) -> None:
        try:
            self._take(message)
        except HetrunError as error:  # what cannot be kept is not sent
            prompt = self.query_one(Prompt)
            if prompt.text:  # it was not taken
                self.say(str(error), error=True)
            else:
                self.complain(str(error))
                prompt.put_back(message.text)

    def _take(self, message: Sent) -> None:
        if self.obeyed(message.text):
            return
        if self.answering is not None:
            self.say("One answer at a time: Escape stops this one")
            return
        if self.exchanging:
            self.say(EXCHANGING)
            return
        if self.coming:
            self.say(READING)
            return
        written = message.text
        text = written.removeprefix("/") if written.startswith("//") else written
        rest, paths = without_paths(text)
        if paths and self.info is not None and not self.info.pictures:
            # What else they may be good for: a question about code that opens them, for example.
            self._send(written, text)
            self.say(f"{self.info.id} does not read pictures: the path was sent as text (/model)")
        elif paths:
            self._send_with(written, rest, paths)
        else:
            self._send(written, text)

    @work(group="sending", exit_on_error=False)
    async def _send_with(self, written: str, text: str, paths: Sequence[Path]) -> None:
        """A message with paths of pictures, once these are read."""
        prompt, before = self.query_one(Prompt), [*self.pictures]
        prompt.sent(written)
        try:
            await self.read_pictures(paths)
            if not text:
                self.say("Attached: write what you want to know of it")
                return
            if self.answering is not None or self.exchanging:
                raise UserError(EXCHANGING)
            self._send(written, text)
        except (HetrunError, asyncio.CancelledError):
            self.pictures = before
            if self.query(Prompt):
                prompt.put_back("\n".join(filter(None, (written, prompt.text))))
                self.show_files()
            raise

    def _send(self, written: str, text: str) -> None:
        """Keep a message, and have it answered; `written`: as it stands in the box."""
        parent = self.parent_of_next if self.editing else self.talk.tree.leaf
        self.check_pictures(parent, len(self.pictures))
        prompt = self.query_one(Prompt)
        if prompt.text.strip() == written:
            prompt.sent(written)
        self.query_one(Notice).hide()
        self._keep(text, parent)

    def _keep(self, text: str, parent: int | None) -> None:
        turn = self.talk.say(with_files(text, self.files), parent, self.pictures)
        edited, self.editing = self.editing, False
        self.files.clear()
        self.pictures.clear()
        self.show_files()
        if edited:
            self.show_talk()
        else:
            self.add(self.entry_of(turn))
            if turn.pictures:
                self.show_thumbnails()
        self.list_conversations()
        self.answer_to(turn)

    def answer_to(self, turn: Turn, beginning: str = "") -> None:
        """Have the model answer a turn; the answer may have begun already."""
        entry = Entry("assistant", text=beginning)
        entry.waiting = True
        transcript = self.query_one(Transcript)
        self.answering = Answering(self.talk, self.add(entry), turn.id, self._draw, self._tell)
        transcript.refresh()
        self._writer = self._answer(self.answering, beginning)
        self.query_one(Prompt).cursor_blink = False  # each blink is a frame of its own
        self.refresh_bindings()

    def _draw(self, entry: Entry) -> None:
        for transcript in self.query(Transcript):  # there is none any more when the app ends
            if entry in transcript.entries:
                transcript.changed(entry)

    def _tell(self, measured: Measured) -> None:
        self.post_message(measured)

    @work(group="answer", exit_on_error=False)
    async def _answer(self, answering: Answering, beginning: str) -> None:
        request = self.talk.request(answering.parent)
        if beginning:
            request = await self.continued(request, beginning)
        await answering.run(self.client, request)

    @on(Worker.StateChanged)
    def _ended(self, message: Worker.StateChanged) -> None:
        with self.telling():
            self._end_answer(message)

    def _end_answer(self, message: Worker.StateChanged) -> None:
        """The answer is complete, or failed; one that was stopped has ended already."""
        over = message.state in (WorkerState.SUCCESS, WorkerState.ERROR)
        if message.worker.group != "answer" or not over or message.worker is not self._writer:
            return
        if (answering := self._taken_away()) is None:
            return
        last = answering.last
        error = message.worker.error if message.state is WorkerState.ERROR else last.error if last else None
        if error is not None or last is None or last.kind == "error":
            self._without_usage(answering)
            self._failed(answering, error)
        else:
            answering.finish()
            self._used = last.usage.prompt_tokens + last.usage.completion_tokens
            self._facts.prompt, self._facts.cached = last.usage.prompt_tokens, last.usage.cached_tokens
            computed = last.usage.prompt_tokens - last.usage.cached_tokens
            if last.timings.prompt_tok_s and computed >= RATED:
                self._facts.prefill.append(last.timings.prompt_tok_s)
            self._measured_now(Measured(last.timings.decode_tok_s, last.timings.ttft_s))
            self._load_late()
        self._show_ended(answering)

    def _taken_away(self) -> Answering | None:
        """The answer that is being written is not any more."""
        answering, self.answering, self._writer = self.answering, None, None
        self.query_one(Prompt).cursor_blink = True
        return answering

    def _show_ended(self, answering: Answering) -> None:
        if answering.trouble:
            self.complain(answering.trouble)
        if answering.entry.turn is not None:
            self._place_again()
        self._look(at_once=True)
        self.refresh_bindings()

    def _without_usage(self, answering: Answering) -> None:
        """An answer that was stopped comes without its figures."""
        self._used += answering.tokens
        self._facts.prompt = 0
        self._show_figures()

    def _place_again(self) -> None:
        """Answers may have become versions of each other."""
        transcript = self.query_one(Transcript)
        for entry in transcript.entries:
            if entry.turn is not None and entry.turn.id in self.talk.tree.turns:
                place = self.entry_of(entry.turn).place
                if place != entry.place:
                    entry.place = place
                    transcript.changed(entry)

    def _failed(self, answering: Answering, error: BaseException | None) -> None:
        answering.finish("broken off")
        if not answering.entry.text:
            # Nothing was answered, so the model need not hear of it, and the user can try again.
            transcript = self.query_one(Transcript)
            transcript.drop(answering.entry)
            asked = self.talk.tree.turns[answering.parent] if answering.parent else None
            if asked is not None and not any(t.parent == asked.id for t in self.talk.tree):
                pictures = self.still_kept(asked)
                self.talk.retract(asked)
                transcript.drop(next(e for e in transcript.entries if e.turn is asked))
                if not self.query_one(Prompt).text:
                    self.query_one(Prompt).put_back(asked.text)
                    self.pictures = [*pictures, *self.pictures]
                    self.show_files()
        self.complain(self.words_of(error) if error else "the engine gave no reason")
        self.list_conversations()

    @on(Measured)
    def _measured_meanwhile(self, message: Measured) -> None:
        if self.answering is None:
            return  # it is of an answer that was left
        self._measured_now(message)
        self._load_late()

    def _load_late(self) -> None:
        """The model was not there before, and now it answers; or a server has loaded it for this answer."""
        if self.awaited or self.exchanging:
            return
        if self.info is None:
            self.load()
        elif self.doors.is_server:
            self.see_again()

    def _measured_now(self, message: Measured) -> None:
        streaming = self.client.health.streaming
        message.disk_bytes_s = streaming.disk_bytes_s if streaming else 0.0
        self._measured = message
        used = self._used + (self.answering.tokens if self.answering else 0)
        context = self.info.context if self.info else 0
        self.query_one(StatusLine).show(message, used, context)
        self._facts.used, self._facts.first_token_s = used, message.first_token_s
        if message.tokens_per_s:
            self._facts.decode.append(message.tokens_per_s)

    # --- the machine

    def _look(self, at_once: bool = False) -> None:
        """Often while it answers, else now and then; what is not shown is not asked for."""
        self._looks += 1
        busy = self.answering is not None
        if busy:
            self._say_loading()
        if self.info is None or not self.query_one(MachinePane).display:
            return
        if at_once or busy or self._looks % IDLE_LOOKS == 0:
            self._look_at_machine()

    def _say_loading(self) -> None:
        """An answer may have to wait for its model, here or on a server that loads it for that."""
        entry, health = self.answering.entry if self.answering else None, self.client.health
        if entry is None or entry.text:
            return
        doing = f"loading the model{percent(health.progress, ', ')}" if health.status == "loading" else ""
        if doing != entry.doing:
            entry.doing = doing
            self._draw(entry)

    @work(group="look", exclusive=True, exit_on_error=False)
    async def _look_at_machine(self) -> None:
        self._facts.used = self._used + (self.answering.tokens if self.answering else 0)
        await look(self._facts, self.client)
        self.query_one(MachinePane).show(self._facts)

    # --- panes

    def on_resize(self, event: events.Resize) -> None:
        for name, least in (("sidebar", SIDEBAR_FROM), ("machine", MACHINE_FROM)):
            pane = self.query_one(f"#{name}")
            pane.display = self._asked_for.get(name, event.size.width >= least)
        if event.size.width < MACHINE_FROM and self.query_one("#machine").display:
            self.query_one("#sidebar").display = False  # one at a time
        self.list_conversations()
        self.query_one(MachinePane).show(self._facts)

    def action_pane(self, name: str) -> None:
        """Show a pane, or hide it; on a narrow screen one at a time."""
        pane = self.query_one(f"#{name}")
        self._asked_for[name] = pane.display = not pane.display
        if pane.display and self.size.width < MACHINE_FROM:
            other = "machine" if name == "sidebar" else "sidebar"
            self._asked_for[other] = self.query_one(f"#{other}").display = False
        self.list_conversations()
        if name == "sidebar" and pane.display:
            self.set_focus(self.query_one(Titles))
        elif not pane.display:
            self.set_focus(self.query_one(Prompt))
        self._look(at_once=True)

    @on(Sidebar.Search)
    def _search(self, message: Sidebar.Search) -> None:
        self.list_conversations()

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
            return self.answering is not None or self.bringing
        if action == "cancel":
            return self.editing
        return action != "back" or not isinstance(self.focused, Prompt)

    def action_stop(self) -> None:
        if self.answering is not None:
            self._stop_answer()
        else:
            self.give_up_bringing()

    def _stop_answer(self) -> None:
        """At once: a worker that is cancelled before it has begun says nothing any more."""
        self.workers.cancel_group(self, "answer")
        if (answering := self._taken_away()) is not None:
            answering.finish("stopped")
            self._without_usage(answering)
            self._show_ended(answering)

    @on(Prompt.Escaped)
    def _escaped(self) -> None:
        if self.answering is not None or self.bringing:
            self.action_stop()
        elif self.coming:
            self.stop_reading()
        elif self.editing:
            self.action_cancel()

    def action_cancel(self) -> None:
        self.stop_editing()
        self.query_one(Prompt).clear()
        self.refresh_bindings()

    def action_back(self) -> None:
        self.set_focus(self.query_one(Prompt))

    def begin_message(self) -> None:
        """A letter comes: it is for the box, unless something is written elsewhere."""
        if isinstance(self.focused, Transcript | Titles | MachinePane) or self.focused is None:
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
