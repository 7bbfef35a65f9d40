"""What the user can have done to conversations and turns: by keys, menus and slash commands alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import cast

from textual import on, work
from textual.widgets import Input

from hetrun.client.events import GenerateRequest, Message
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import HetrunError, UserError
from hetrun.tui.commands import command_of, is_command
from hetrun.tui.conversation import parsed_value, with_files, with_pictures
from hetrun.tui.paths import names_picture, path_of
from hetrun.tui.pictures import as_text
from hetrun.tui.screens.attachments import Attachments
from hetrun.tui.screens.dialogs import Ask, Choice, Choose
from hetrun.tui.screens.navigation import EXCHANGING
from hetrun.tui.screens.tokens import Continue, TokensScreen
from hetrun.tui.screens.turn_menu import TurnAction, turn_choices
from hetrun.tui.store import export as exchange
from hetrun.tui.store.tree import Turn
from hetrun.tui.streaming import Answering
from hetrun.tui.transcript.turn import Entry, divided
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.notice import Notice
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.sidebar import Sidebar, Titles

CONVERSATION = (
    Choice("open", "Open", "o"),
    Choice("rename", "Rename", "r"),
    Choice("export", "Export to a file", "x"),
    Choice("delete", "Delete", "d"),
)


class Orders(Attachments):
    """The part of the chat screen that does what it is told."""

    answering: Answering | None
    parent_of_next: int | None

    def show_talk(self) -> None: ...
    def show_system(self) -> None: ...
    def action_pane(self, name: str) -> None: ...
    def answer_to(self, turn: Turn, beginning: str = "") -> None: ...

    # --- slash commands

    def obeyed(self, text: str) -> bool:
        """Whether a text is a command; it is done then, or it is said why not, and the text stays."""
        if not is_command(text) or names_picture(text):
            return False
        prompt = self.query_one(Prompt)
        prompt.sent(text)  # first: what is done may put another text there
        self.query_one(Notice).hide()
        try:
            command, argument = command_of(text)
            self._obey(command.name, argument)
        except HetrunError as error:
            self.give_back(text)
            self.say(str(error), error=True)
        return True

    def give_back(self, text: str) -> None:
        """A command could not be done: its text goes back into the box, unless another one is there."""
        prompt = self.query_one(Prompt)
        if not prompt.text:
            prompt.put_back(text)

    def arguments(self, name: str) -> Iterable[tuple[str, str]]:
        """What may follow a command, with a word on each."""
        match name:
            case "set":
                for field in fields(SamplingParams):
                    value = self.talk.sampling.get(field.name, getattr(self.talk.usual, field.name))
                    yield field.name, "" if value is None or value == () else f"now {value}"
            case "theme":
                yield from ((theme, "") for theme in sorted(self.app.available_themes))
            case "preset":
                yield from ((preset, "") for preset in self.talk.store.presets())

    def _obey(self, name: str, argument: str) -> None:
        match name:
            case "new" | "settings" | "template" | "help":
                self.call_later(getattr(self, f"action_{name}"))
            case "delete":
                self.action_delete()
            case "edit" | "regenerate" | "fork" | "copy" | "tokens":
                self.do_with_last(cast("TurnAction", name))
            case "whatif":
                self.action_what_if()
            case "machine":
                self.action_pane("machine")
            case "conversations":
                self.action_pane("sidebar")
            case "quit":
                self.app.exit()
            case "model":
                self.choose_model(argument)
            case "theme":
                self.choose_theme(argument)
            case _:
                self._obey_with(name, argument)

    def _obey_with(self, name: str, argument: str) -> None:
        match name:
            case "system":
                self.talk.choose(argument, self.talk.sampling)
                self.show_system()
                self.say("System prompt set" if argument else "System prompt removed")
            case "set":
                what, _, value = argument.partition(" ")
                self.talk.choose(self.talk.system, {**self.talk.sampling, what: parsed_value(value)})
                self.say(f"{what} = {value.strip()}")
            case "preset":
                presets = self.talk.store.presets()
                if argument not in presets:
                    raise UserError(f"there is no preset {argument}; known: {', '.join(presets) or 'none'}")
                self.talk.choose(*presets[argument])
                self.show_system()
                self.say(f"System prompt and sampling are those of the preset {argument}")
            case "attach":
                self.attach(argument)
            case "rename":
                self.rename(self._kept(), argument)
            case "export":
                self.export(self._kept(), argument)
            case "import":
                self.free()
                n = self.talk.bring_in(path_of(argument))
                self.show_talk()
                self.say(f"{n} conversation{'s' * (n != 1)} imported")

    def _kept(self) -> int:
        if self.talk.number is None:
            raise UserError("this conversation is empty: it is saved from its first message on")
        return self.talk.number

    # --- conversations

    def list_conversations(self) -> None:
        """What the sidebar shows."""
        sidebar = self.query_one(Sidebar)
        if not sidebar.display:
            return
        with self.telling():
            sidebar.show(self.talk.store.conversations(sidebar.searched), self.talk.number)

    def free(self) -> None:
        """Nothing is being written: what is, is stopped and kept."""
        self.leave()
        self.workers.cancel_group(self, "sending")
        self.stop_editing()

    def stop_editing(self) -> None:
        """The next message is a new one; pictures of the one that was edited stay with that."""
        if self.editing:
            self.pictures.clear()
        self.editing = False
        self.show_files()

    def leave(self) -> None:
        """What is being written is stopped, and kept."""
        if self.answering is not None:
            answering, self.answering = self.answering, None
            self.workers.cancel_group(self, "answer")
            answering.finish("stopped")
            if answering.trouble:
                self.say(answering.trouble, error=True)

    def action_new(self) -> None:
        self.free()
        self.talk.new()
        self.show_talk()
        self.set_focus(self.query_one(Prompt))

    @on(Titles.Wanted)
    def _do_with_conversation(self, message: Titles.Wanted) -> None:
        self._with_conversation(message.what, message.number)

    @work(group="dialog", exit_on_error=False)
    async def _with_conversation(self, what: str, number: int) -> None:
        found = self.talk.store.conversation(number)
        title = found.title if found else ""
        if what == "menu":
            chosen: str | None = await self.app.push_screen_wait(Choose(title, CONVERSATION))
            what = chosen or ""
        match what:
            case "open":
                self.open(number)
            case "rename":
                new: str | None = await self.app.push_screen_wait(Ask("Rename to", title))
                if new:
                    self.rename(number, new)
            case "delete":
                await self._delete(number)
            case "export":
                path = await self.app.push_screen_wait(
                    Ask("Export to", "conversation.md", "FILE.md or FILE.json")
                )
                if path:
                    self.export(number, path)

    def open(self, number: int) -> None:
        """Show another conversation."""
        if number != self.talk.number:
            self.free()
            self.talk.open(number)
            self.show_talk()
        self.set_focus(self.query_one(Prompt))

    def rename(self, number: int, title: str) -> None:
        """Call a conversation so."""
        self.talk.store.rename(number, title)
        if self.talk.conversation is not None and number == self.talk.number:
            self.talk.conversation = replace(self.talk.conversation, title=title)
        self.list_conversations()

    def export(self, number: int, name: str) -> None:
        """Write a conversation to a file."""
        conversation = self.talk.store.conversation(number)
        if conversation is None:
            raise UserError("this conversation has been deleted")
        path = path_of(name)
        store = self.talk.store
        exchange.write(path, conversation, store.tree(conversation), store.picture)
        self.say(f"Written to {path}")

    def action_delete(self) -> None:
        self._with_conversation("delete", self._kept())

    async def _delete(self, number: int) -> None:
        found = self.talk.store.conversation(number)
        if found is None:
            return
        choices = [Choice("no", "Keep it", "n"), Choice("yes", "Delete it for ever", "y")]
        if await self.app.push_screen_wait(Choose(f"Delete “{found.title}”?", choices)) != "yes":
            return
        if number == self.talk.number:
            self.free()
            self.talk.new()
            self.talk.store.delete(number)
            self.show_talk()
        else:
            self.talk.store.delete(number)
            self.list_conversations()

    def action_search(self) -> None:
        sidebar = self.query_one(Sidebar)
        if not sidebar.display:
            self.action_pane("sidebar")
        self.set_focus(sidebar.query_one(Input))  # at once: the next key is for it

    # --- turns

    @on(Transcript.Copy)
    def _copy(self, message: Transcript.Copy) -> None:
        self.app.copy_to_clipboard(message.text)
        self.say("Copied")

    @on(Transcript.Do)
    def _do(self, message: Transcript.Do) -> None:
        self.do(cast("TurnAction", message.what), message.entry)

    @on(Transcript.Menu)
    @work(group="dialog", exit_on_error=False)
    async def _menu(self, message: Transcript.Menu) -> None:
        choices = turn_choices(message.entry, self.talk)
        if choices and (what := await self.app.push_screen_wait(Choose("This turn", choices))):
            self.do(cast("TurnAction", what), message.entry)

    def do_with_last(self, what: TurnAction) -> None:
        """What is done to a turn, to the last one that it makes sense for."""
        for entry in reversed(self.query_one(Transcript).entries):
            if any(choice.name == what for choice in turn_choices(entry, self.talk)):
                self.do(what, entry)
                return
        raise UserError("there is no message yet to do that with")

    def action_regenerate(self) -> None:
        with self.telling():
            self.do_with_last("regenerate")

    def offers(self, entry: Entry) -> list[str]:
        """What can be done with an entry; nothing, if it is not of the open conversation any more."""
        if entry.turn is not None and entry.turn.id not in self.talk.tree.turns:
            return []
        return [choice.name for choice in turn_choices(entry, self.talk)]

    def do(self, what: TurnAction, entry: Entry) -> None:
        """Do it, if the entry is of that kind."""
        if what not in self.offers(entry):
            return
        with self.telling():
            self._do_now(what, entry, entry.turn)

    def _do_now(self, what: TurnAction, entry: Entry, turn: Turn | None) -> None:
        if what == "fold":
            self.query_one(Transcript).fold(entry)
        elif what == "copy":
            self.app.copy_to_clipboard(divided(entry.text, entry.opened).answer if turn else entry.text)
            self.say("Copied")
        elif what == "code":
            self._copy_code(entry)
        elif turn is not None:
            self._do_with_turn(what, turn)

    def _do_with_turn(self, what: TurnAction, turn: Turn) -> None:
        if what == "tokens":
            self._inspect(turn)
            return
        self.free()
        match what:
            case "edit":
                self.editing, self.parent_of_next = True, turn.parent
                self.query_one(Prompt).put(turn.text)
                self.pictures = self.with_files_of(turn)
                self.set_focus(self.query_one(Prompt))
                self.show_files()
                self.refresh_bindings()
            case "regenerate":
                self._regenerate(turn)
            case "fork":
                self.talk.fork(turn)
                self.show_talk()
                self.set_focus(self.query_one(Prompt))
                self.say("New conversation with the same beginning")
            case "before" | "after":
                other = self.talk.tree.beside(turn, -1 if what == "before" else 1)
                if other is not None:
                    self.talk.lead_to(other)
                    self.show_talk()
                    self.query_one(Transcript).select(self.talk.tree.path.index(other))

    def _regenerate(self, turn: Turn, beginning: str = "") -> None:
        asked = turn.parent if turn.role == "assistant" else turn.id
        if asked is None:
            raise UserError("there is no message before this answer")
        if self.exchanging:
            raise UserError(EXCHANGING)
        self.check_pictures(asked)
        self.talk.lead_back(asked)
        self.show_talk()
        self.answer_to(self.talk.tree.turns[asked], beginning)

    @work(group="dialog", exit_on_error=False)
    async def _copy_code(self, entry: Entry) -> None:
        codes = entry.codes
        at = "0"
        if len(codes) > 1:
            lines = [code.strip().partition("\n")[0][:40] for code in codes]
            choices = [Choice(str(i), line) for i, line in enumerate(lines)]
            chosen = await self.app.push_screen_wait(Choose("Which code?", choices))
            at = chosen or ""
        if at:
            self.app.copy_to_clipboard(codes[int(at)])
            self.say("Copied")

    def next_prompt(self) -> tuple[str, tuple[Message, ...]]:
        """What Enter would send now, or else what the last answer was an answer to."""
        draft, tree = self.query_one(Prompt).text.strip(), self.talk.tree
        parent = self.parent_of_next if self.editing else tree.leaf
        if draft and not draft.startswith("/"):
            content = with_pictures(with_files(draft, self.files), len(self.pictures))
            said: Message = {"role": "user", "content": content}
            return "The prompt that Enter would send", (*self.talk.messages(parent), said)
        asked = next((turn.id for turn in reversed(tree.path) if turn.role == "user"), None)
        if asked is not None:
            return "The prompt of the last answer", self.talk.messages(asked)
        example: Message = {"role": "user", "content": "(your message)"}
        return "The prompt of a first message", (*self.talk.messages(None), example)

    # --- tokens

    @work(group="dialog", exit_on_error=False)
    async def _inspect(self, turn: Turn) -> None:
        asked = self.talk.request(turn.parent)
        found: Continue | None = await self.app.push_screen_wait(TokensScreen(self.client, asked, turn.text))
        if found is not None:
            self.free()
            self._regenerate(turn, found.beginning)

    async def continued(self, request: GenerateRequest, beginning: str) -> GenerateRequest:
        """The same, for an answer that begins so."""
        prompt = await as_text(self.client, request)
        return replace(request, messages=None, text=prompt + beginning)
