"""The running answer: its beginning, its end, and what becomes of one that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from textual.screen import Screen
from textual.worker import Worker, WorkerState

from hetrun.client.events import GenerateRequest
from hetrun.tui.conversation import Talk
from hetrun.tui.messages import AnswerRates
from hetrun.tui.notices import ChatNotices
from hetrun.tui.pictures import as_text
from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.conversation_view import ConversationView
from hetrun.tui.screens.draft import MessageDraft
from hetrun.tui.screens.engine_control import EngineControl, percent
from hetrun.tui.screens.figures import AnswerFigures
from hetrun.tui.store.tree import Turn
from hetrun.tui.streaming import AnswerStream
from hetrun.tui.transcript.turn import TurnLines
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.workers import begin_work

ANSWER = "answer"  # the group of workers that write answers


class AnswerWriter:
    """Has the model answer turns, one at a time."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        engine: EngineControl,
        notices: ChatNotices,
        *,
        draft: MessageDraft,
        view: ConversationView,
        figures: AnswerFigures,
        listing: ConversationList,
        look: Callable[[], None],
    ) -> None:
        """`look` shows the machine as it is when an answer has ended."""
        self.current: AnswerStream | None = None  # the answer that is being written
        self._writer: Worker[None] | None = None  # which writes it
        self._screen = screen
        self._talk = talk
        self._engine = engine
        self._notices = notices
        self._draft = draft
        self._view = view
        self._figures = figures
        self._listing = listing
        self._look = look

    @property
    def num_tokens(self) -> int:
        """Of the answer that is being written, so far."""
        return self.current.tokens if self.current else 0

    def begin(self, turn: Turn, beginning: str = "") -> None:
        """Have the model answer a turn; the answer may have begun already."""
        entry = TurnLines("assistant", text=beginning)
        entry.waiting = True
        self._view.add(entry)
        self.current = AnswerStream(self._talk, entry, turn.id, self._view.draw, self._tell)
        self._view.transcript.refresh()
        self._writer = begin_work(self._screen, partial(self._write, self.current, beginning), group=ANSWER)
        self._screen.query_one(Prompt).cursor_blink = False  # each blink is a frame of its own
        self._screen.refresh_bindings()

    def _tell(self, measured: AnswerRates) -> None:
        self._screen.post_message(measured)

    async def _write(self, answering: AnswerStream, beginning: str) -> None:
        request = self._talk.request(answering.parent)
        if beginning:
            request = await self._continued(request, beginning)
        await answering.run(self._engine.client, request)

    async def _continued(self, request: GenerateRequest, beginning: str) -> GenerateRequest:
        """The same, for an answer that begins so."""
        prompt = await as_text(self._engine.client, request)
        return replace(request, messages=None, text=prompt + beginning)

    def observe(self, message: AnswerRates) -> None:
        """Figures of the answer that is being written."""
        if self.current is None:
            return  # they are of an answer that was left
        self._figures.observe(message, self.num_tokens)
        self._engine.catch_up()

    def say_loading(self) -> None:
        """An answer may have to wait for its model, here or on a server that loads it for that."""
        entry, health = self.current.entry if self.current else None, self._engine.client.health
        if entry is None or entry.text:
            return
        doing = f"loading the model{percent(health.progress, ', ')}" if health.status == "loading" else ""
        if doing != entry.doing:
            entry.doing = doing
            self._view.draw(entry)

    # --- its end

    def end(self, message: Worker.StateChanged) -> None:
        """The answer is complete, or failed; one that was stopped has ended already."""
        over = message.state in (WorkerState.SUCCESS, WorkerState.ERROR)
        if not over or message.worker is not self._writer:
            return
        if (answering := self._take_away()) is None:
            return
        last = answering.last
        error = message.worker.error if message.state is WorkerState.ERROR else last.error if last else None
        if error is not None or last is None or last.kind == "error":
            self._figures.finish_without_usage(answering.tokens)
            self._fail(answering, error)
        else:
            answering.finish()
            self._figures.finish(last)
            self._engine.catch_up()
        self._show_ended(answering)

    def stop(self) -> None:
        """At once: a worker that is cancelled before it has begun says nothing any more."""
        self._screen.workers.cancel_group(self._screen, ANSWER)
        if (answering := self._take_away()) is not None:
            answering.finish("stopped")
            self._figures.finish_without_usage(answering.tokens)
            self._show_ended(answering)

    def leave(self) -> None:
        """What is being written is stopped, and kept."""
        if self.current is not None:
            answering, self.current = self.current, None
            self._screen.workers.cancel_group(self._screen, ANSWER)
            answering.finish("stopped")
            if answering.trouble:
                self._notices.say(answering.trouble, error=True)

    def _take_away(self) -> AnswerStream | None:
        """The answer that is being written is not any more."""
        answering, self.current, self._writer = self.current, None, None
        self._screen.query_one(Prompt).cursor_blink = True
        return answering

    def _show_ended(self, answering: AnswerStream) -> None:
        if answering.trouble:
            self._view.complain(answering.trouble)
        if answering.entry.turn is not None:
            self._view.number_versions()
        self._look()
        self._screen.refresh_bindings()

    def _fail(self, answering: AnswerStream, error: BaseException | None) -> None:
        answering.finish("broken off")
        if not answering.entry.text:
            # Nothing was answered, so the model need not hear of it, and the user can try again.
            self._view.transcript.drop(answering.entry)
            asked = self._talk.tree.turns[answering.parent] if answering.parent else None
            if asked is not None and not any(t.parent == asked.id for t in self._talk.tree):
                self._take_back(asked)
        self._view.complain(self._notices.words_of(error) if error else "the engine gave no reason")
        self._listing.show()

    def _take_back(self, asked: Turn) -> None:
        """A message that was not answered is in the box again, unless another one is there."""
        transcript, prompt = self._view.transcript, self._screen.query_one(Prompt)
        pictures = self._draft.still_kept(asked)
        self._talk.retract(asked)
        transcript.drop(next(e for e in transcript.entries if e.turn is asked))
        if not prompt.text:
            prompt.put_back(asked.text)
            self._draft.pictures = [*pictures, *self._draft.pictures]
            self._draft.show()
