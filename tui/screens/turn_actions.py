"""What can be done to a turn: copy, edit, regenerate or fork it, and look at its tokens."""

from __future__ import annotations

from functools import partial
from typing import cast

from textual.screen import Screen

from hetrun.errors import UserError
from hetrun.tui.conversation import Talk
from hetrun.tui.notices import ChatNotices
from hetrun.tui.screens.answer_writer import AnswerWriter
from hetrun.tui.screens.conversation_actions import ConversationActions
from hetrun.tui.screens.conversation_view import ConversationView
from hetrun.tui.screens.dialogs import Choose, DialogChoice
from hetrun.tui.screens.draft import MessageDraft
from hetrun.tui.screens.engine_control import EXCHANGING, EngineControl
from hetrun.tui.screens.tokens import Continue, TokensScreen
from hetrun.tui.screens.turn_menu import TurnAction, turn_choices
from hetrun.tui.store.tree import Turn
from hetrun.tui.transcript.turn import TurnLines, divided
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.workers import begin_work


class TurnActions:
    """By keys, the menu of a turn and slash commands alike."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        engine: EngineControl,
        notices: ChatNotices,
        *,
        view: ConversationView,
        draft: MessageDraft,
        answers: AnswerWriter,
        conversations: ConversationActions,
    ) -> None:
        self._screen = screen
        self._talk = talk
        self._engine = engine
        self._notices = notices
        self._view = view
        self._draft = draft
        self._answers = answers
        self._conversations = conversations

    def offers(self, entry: TurnLines) -> list[str]:
        """What can be done with an entry; nothing, if it is not of the open conversation any more."""
        if entry.turn is not None and entry.turn.id not in self._talk.tree.turns:
            return []
        return [choice.name for choice in turn_choices(entry, self._talk)]

    def choose(self, entry: TurnLines) -> None:
        """The menu of a turn."""
        begin_work(self._screen, partial(self._choose, entry), group="dialog")

    async def _choose(self, entry: TurnLines) -> None:
        choices = turn_choices(entry, self._talk)
        if choices and (what := await self._screen.app.push_screen_wait(Choose("This turn", choices))):
            self.do(cast("TurnAction", what), entry)

    def do(self, what: TurnAction, entry: TurnLines) -> None:
        """Do it, if the entry is of that kind."""
        if what not in self.offers(entry):
            return
        with self._notices.telling():
            self._do(what, entry, entry.turn)

    def do_with_last(self, what: TurnAction) -> None:
        """What is done to a turn, to the last one that it makes sense for."""
        for entry in reversed(self._view.transcript.entries):
            if any(choice.name == what for choice in turn_choices(entry, self._talk)):
                self.do(what, entry)
                return
        raise UserError("there is no message yet to do that with")

    def copy(self, text: str) -> None:
        """To the clipboard."""
        self._screen.app.copy_to_clipboard(text)
        self._notices.say("Copied")

    def _do(self, what: TurnAction, entry: TurnLines, turn: Turn | None) -> None:
        if what == "fold":
            self._view.transcript.fold(entry)
        elif what == "copy":
            self.copy(divided(entry.text, entry.opened).answer if turn else entry.text)
        elif what == "code":
            begin_work(self._screen, partial(self._copy_code, entry), group="dialog")
        elif what == "tokens" and turn is not None:
            begin_work(self._screen, partial(self._inspect, turn), group="dialog")
        elif turn is not None:
            self._lead_elsewhere(what, turn)

    def _lead_elsewhere(self, what: TurnAction, turn: Turn) -> None:
        """What changes the path through the conversation."""
        self._conversations.free()
        match what:
            case "edit":
                self._draft.edit(turn)
            case "regenerate":
                self._regenerate(turn)
            case "fork":
                self._talk.fork(turn)
                self._view.show()
                self._screen.set_focus(self._screen.query_one(Prompt))
                self._notices.say("New conversation with the same beginning")
            case "before" | "after":
                other = self._talk.tree.beside(turn, -1 if what == "before" else 1)
                if other is not None:
                    self._talk.lead_to(other)
                    self._view.show()
                    self._view.transcript.select(self._talk.tree.path.index(other))

    def _regenerate(self, turn: Turn, beginning: str = "") -> None:
        asked = turn.parent if turn.role == "assistant" else turn.id
        if asked is None:
            raise UserError("there is no message before this answer")
        if self._engine.exchanging:
            raise UserError(EXCHANGING)
        self._draft.check_pictures(asked)
        self._talk.lead_back(asked)
        self._view.show()
        self._answers.begin(self._talk.tree.turns[asked], beginning)

    async def _copy_code(self, entry: TurnLines) -> None:
        codes = entry.codes
        at = "0"
        if len(codes) > 1:
            lines = [code.strip().partition("\n")[0][:40] for code in codes]
            choices = [DialogChoice(str(i), line) for i, line in enumerate(lines)]
            chosen = await self._screen.app.push_screen_wait(Choose("Which code?", choices))
            at = chosen or ""
        if at:
            self.copy(codes[int(at)])

    async def _inspect(self, turn: Turn) -> None:
        asked = self._talk.request(turn.parent)
        screen = TokensScreen(self._engine.client, asked, turn.text)
        found: Continue | None = await self._screen.app.push_screen_wait(screen)
        if found is not None:
            self._conversations.free()
            self._regenerate(turn, found.beginning)
