"""What can be done to conversations: begin, open, rename, export, import and delete them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from textual.screen import Screen

from hetrun.errors import UserError
from hetrun.tui.conversation import Talk
from hetrun.tui.notices import ChatNotices
from hetrun.tui.paths import path_of
from hetrun.tui.screens.answer_writer import AnswerWriter
from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.conversation_view import ConversationView
from hetrun.tui.screens.dialogs import Choose, DialogChoice, TextDialog
from hetrun.tui.screens.draft import MessageDraft
from hetrun.tui.store import export as exchange
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.workers import begin_work

CONVERSATION = (
    DialogChoice("open", "Open", "o"),
    DialogChoice("rename", "Rename", "r"),
    DialogChoice("export", "Export to a file", "x"),
    DialogChoice("delete", "Delete", "d"),
)


class ConversationActions:
    """By keys, the menu of the sidebar and slash commands alike."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        notices: ChatNotices,
        *,
        view: ConversationView,
        listing: ConversationList,
        answers: AnswerWriter,
        draft: MessageDraft,
    ) -> None:
        self._screen = screen
        self._talk = talk
        self._notices = notices
        self._view = view
        self._listing = listing
        self._answers = answers
        self._draft = draft

    @property
    def _saved(self) -> int:
        if self._talk.number is None:
            raise UserError("this conversation is empty: it is saved from its first message on")
        return self._talk.number

    def free(self) -> None:
        """Nothing is being written: what is, is stopped and kept."""
        self._answers.leave()
        self._screen.workers.cancel_group(self._screen, "sending")
        self._draft.stop_editing()

    def begin(self) -> None:
        """A new conversation."""
        self.free()
        self._talk.new()
        self._view.show()
        self._screen.set_focus(self._screen.query_one(Prompt))

    def open(self, number: int) -> None:
        """Show another conversation."""
        if number != self._talk.number:
            self.free()
            self._talk.open(number)
            self._view.show()
        self._screen.set_focus(self._screen.query_one(Prompt))

    def do(self, what: str, number: int) -> None:
        """Open, rename, export or delete a conversation, or show the menu of these."""
        begin_work(self._screen, partial(self._do, what, number), group="dialog")

    async def _do(self, what: str, number: int) -> None:
        app = self._screen.app
        found = self._talk.store.conversation(number)
        title = found.title if found else ""
        if what == "menu":
            chosen: str | None = await app.push_screen_wait(Choose(title, CONVERSATION))
            what = chosen or ""
        match what:
            case "open":
                self.open(number)
            case "rename":
                new: str | None = await app.push_screen_wait(TextDialog("Rename to", title))
                if new:
                    self._rename(number, new)
            case "delete":
                await self._delete(number)
            case "export":
                path = await app.push_screen_wait(
                    TextDialog("Export to", "conversation.md", "FILE.md or FILE.json")
                )
                if path:
                    self._export(number, path)

    # --- the open one

    def rename(self, title: str) -> None:
        """Call the open conversation so."""
        self._rename(self._saved, title)

    def export(self, name: str) -> None:
        """Write the open conversation to a file."""
        self._export(self._saved, name)

    def delete(self) -> None:
        """Delete the open conversation, if the user agrees."""
        self.do("delete", self._saved)

    def bring_in(self, name: str) -> None:
        """The conversations of a file."""
        self.free()
        n = self._talk.bring_in(path_of(name))
        self._view.show()
        self._notices.say(f"{n} conversation{'s' * (n != 1)} imported")

    # --- any

    def _rename(self, number: int, title: str) -> None:
        self._talk.store.rename(number, title)
        if self._talk.conversation is not None and number == self._talk.number:
            self._talk.conversation = replace(self._talk.conversation, title=title)
        self._listing.show()

    def _export(self, number: int, name: str) -> None:
        store = self._talk.store
        conversation = store.conversation(number)
        if conversation is None:
            raise UserError("this conversation has been deleted")
        path = path_of(name)
        exchange.write(path, conversation, store.tree(conversation), store.picture)
        self._notices.say(f"Written to {path}")

    async def _delete(self, number: int) -> None:
        found = self._talk.store.conversation(number)
        if found is None:
            return
        choices = [DialogChoice("no", "Keep it", "n"), DialogChoice("yes", "Delete it for ever", "y")]
        question = Choose(f"Delete “{found.title}”?", choices)
        if await self._screen.app.push_screen_wait(question) != "yes":
            return
        if number == self._talk.number:
            self.free()
            self._talk.new()
            self._talk.store.delete(number)
            self._view.show()
        else:
            self._talk.store.delete(number)
            self._listing.show()
