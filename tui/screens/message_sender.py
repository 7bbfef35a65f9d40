"""What Enter does: a command is obeyed, a message is kept and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from textual.screen import Screen

from hetrun.errors import HetrunError, UserError
from hetrun.tui.notices import ChatNotices
from hetrun.tui.paths import without_paths
from hetrun.tui.screens.answer_writer import AnswerWriter
from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.conversation_view import ConversationView
from hetrun.tui.screens.draft import READING, MessageDraft
from hetrun.tui.screens.engine_control import EXCHANGING, EngineControl
from hetrun.tui.screens.prompt_commands import PromptCommands
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.workers import begin_work


class MessageSender:
    """Takes what is written in the box."""

    def __init__(
        self,
        screen: Screen[None],
        engine: EngineControl,
        notices: ChatNotices,
        commands: PromptCommands,
        *,
        draft: MessageDraft,
        view: ConversationView,
        listing: ConversationList,
        answers: AnswerWriter,
    ) -> None:
        self._screen = screen
        self._engine = engine
        self._notices = notices
        self._commands = commands
        self._draft = draft
        self._view = view
        self._listing = listing
        self._answers = answers

    def take(self, text: str) -> None:
        """Obey a command or send a message; what cannot be kept is not sent."""
        try:
            self._take(text)
        except HetrunError as error:
            prompt = self._screen.query_one(Prompt)
            if prompt.text:  # it was not taken
                self._notices.say(str(error), error=True)
            else:
                self._view.complain(str(error))
                prompt.put_back(text)

    def _take(self, written: str) -> None:
        if self._commands.obey(written):
            return
        if self._answers.current is not None:
            self._notices.say("One answer at a time: Escape stops this one")
            return
        if self._engine.exchanging:
            self._notices.say(EXCHANGING)
            return
        if self._draft.coming:
            self._notices.say(READING)
            return
        text = written.removeprefix("/") if written.startswith("//") else written
        rest, paths = without_paths(text)
        info = self._engine.info
        if paths and info is not None and not info.pictures:
            # What else they may be good for: a question about code that opens them, for example.
            self._send(written, text)
            self._notices.say(f"{info.id} does not read pictures: the path was sent as text (/model)")
        elif paths:
            send = partial(self._send_with, written, rest, paths)
            begin_work(self._screen, send, group="sending")
        else:
            self._send(written, text)

    async def _send_with(self, written: str, text: str, paths: Sequence[Path]) -> None:
        """A message with paths of pictures, once these are read."""
        draft, prompt = self._draft, self._screen.query_one(Prompt)
        before = [*draft.pictures]
        prompt.sent(written)
        try:
            await draft.read_pictures(paths)
            if not text:
                self._notices.say("Attached: write what you want to know of it")
                return
            if self._answers.current is not None or self._engine.exchanging:
                raise UserError(EXCHANGING)
            self._send(written, text)
        except (HetrunError, asyncio.CancelledError):
            draft.pictures = before
            if self._screen.query(Prompt):
                prompt.put_back("\n".join(filter(None, (written, prompt.text))))
                draft.show()
            raise

    def _send(self, written: str, text: str) -> None:
        """Keep a message, and have it answered; `written`: as it stands in the box."""
        parent = self._draft.parent
        self._draft.check_pictures(parent, len(self._draft.pictures))
        prompt = self._screen.query_one(Prompt)
        if prompt.text.strip() == written:
            prompt.sent(written)
        self._notices.hide()
        edited = self._draft.editing
        turn = self._draft.keep(text, parent)
        if edited:
            self._view.show()
        else:
            self._view.add_turn(turn)
        self._listing.show()
        self._answers.begin(turn)
