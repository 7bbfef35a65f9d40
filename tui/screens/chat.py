"""The conversation screen."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer
from textual.worker import Worker, WorkerState

from hetrun.client import ChatClient
from hetrun.errors import HetrunError
from hetrun.events import Event, GenerateRequest, Message, accepted
from hetrun.params import SamplingParams
from hetrun.tui.messages import Measured, Sent
from hetrun.tui.widgets.conversation import Conversation
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.status import StatusLine
from hetrun.tui.widgets.turn import AnswerTurn, ErrorTurn, UserTurn
from hetrun.tui.widgets.welcome import Welcome

NOTES = {"length": "stopped: the context or the token limit is full. Ctrl+N begins a new conversation"}


class ChatScreen(Screen[None]):
    """One conversation with one model."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", key_display="Esc"),
        Binding("ctrl+n", "new", "New conversation"),
    ]

    def __init__(self, client: ChatClient, params: SamplingParams, system: str | None) -> None:
        super().__init__()
        self._client = client
        self._params = params
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._history: list[Message] = []  # what the model is told of the conversation
        self._turn: AnswerTurn | None = None  # the answer that is being written
        self._last: Event | None = None
        self._used = 0  # tokens of the context, as of the last complete answer
        self._ticking: Timer | None = None
        self.load_error: Exception | None = None

    def compose(self) -> ComposeResult:
        yield Conversation(Welcome())
        yield StatusLine()
        yield Prompt()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()
        self.query_one(StatusLine).say("loading")
        self._ticking = self.set_interval(0.1, self._show_progress)
        self._load()

    # --- loading

    @work(group="load")
    async def _load(self) -> None:
        try:
            info = await self._client.info()
        except HetrunError as error:
            self.load_error = error
            await self.query(Welcome).remove()
            self.query_one(StatusLine).say("no model")
            await self.query_one(Conversation).add(ErrorTurn(str(error)))
        else:
            self.query_one(StatusLine).loaded(info)
            for welcome in self.query(Welcome):
                welcome.loaded(info)
        finally:
            if self._ticking is not None:
                self._ticking.stop()

    def _show_progress(self) -> None:
        for welcome in self.query(Welcome):
            welcome.progressed(self._client.progress)

    # --- one exchange

    @on(Sent)
    async def _ask(self, message: Sent) -> None:
        if self._turn is not None:
            self.notify("Escape stops the answer first", timeout=2)
            return
        self.query_one(Prompt).clear()
        await self.query(Welcome).remove()
        conversation = self.query_one(Conversation)
        await conversation.add(UserTurn(message.text))
        self._turn = AnswerTurn()
        await conversation.add(self._turn)
        self._history.append({"role": "user", "content": message.text})
        self._last = None
        self._answer(self._turn)
        self.refresh_bindings()

    @work(group="answer", exit_on_error=False)
    async def _answer(self, turn: AnswerTurn) -> None:
        request = GenerateRequest(self._params, messages=(*self._system, *self._history))
        asked = time.monotonic()
        first = 0.0
        count = 0
        async with aclosing(self._client.stream(request)) as events:
            async for event in events:
                await turn.write(event.text)
                if event.last:
                    self._last = event
                    break
                count += 1
                first = first or time.monotonic()
                rate = (count - 1) / (time.monotonic() - first) if count > 8 else 0.0
                self._tell(rate, first - asked, self._used + count)

    @on(Worker.StateChanged)
    async def _ended(self, message: Worker.StateChanged) -> None:
        """The answer is complete, was stopped, or failed."""
        over = message.state in (WorkerState.SUCCESS, WorkerState.CANCELLED, WorkerState.ERROR)
        if message.worker.group != "answer" or not over or self._turn is None:
            return
        turn = self._turn
        if message.state is WorkerState.CANCELLED:
            await turn.finish("stopped")
        elif message.state is WorkerState.ERROR:
            await self._failed(turn, message.worker.error)
        elif self._last is not None and self._last.kind == "error":
            await self._failed(turn, self._last.error)
        elif self._last is not None:
            notes = NOTES.get(self._last.finish_reason or "", ""), accepted(self._last.timings)
            await turn.finish("; ".join(filter(None, notes)))
            self._used = self._last.usage.prompt_tokens + self._last.usage.completion_tokens
            timings = self._last.timings
            self._tell(timings.decode_tok_s, timings.ttft_s, self._used)
        if self._turn is turn:  # else a new conversation has begun meanwhile
            if turn.text:
                self._history.append({"role": "assistant", "content": turn.text})
            self._turn = None
            self.refresh_bindings()

    async def _failed(self, turn: AnswerTurn, error: BaseException | None) -> None:
        await turn.finish()
        await self.query_one(Conversation).add(ErrorTurn(str(error) or type(error).__name__))
        if not turn.text and self._turn is turn:
            # Nothing was answered, so the model need not hear of it, and the user can try again.
            asked = self._history.pop()
            await turn.remove()
            if not self.query_one(Prompt).text:
                self.query_one(Prompt).insert(str(asked["content"]))

    def _tell(self, tokens_per_s: float, first_token_s: float, used: int) -> None:
        streaming = self._client.health.streaming
        disk = streaming.disk_bytes_s if streaming else 0.0
        self.post_message(Measured(tokens_per_s, first_token_s, used, disk))

    @on(Measured)
    def _measured(self, message: Measured) -> None:
        self.query_one(StatusLine).show(message)

    # --- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Stop is offered while there is something to stop."""
        return self._turn is not None if action == "stop" else True

    def action_stop(self) -> None:
        self.workers.cancel_group(self, "answer")

    async def action_new(self) -> None:
        self.workers.cancel_group(self, "answer")
        self._turn = None
        self._used = 0
        self._history.clear()
        await self.query_one(Conversation).clear()
        self.query_one(StatusLine).show(Measured())
        self.query_one(Prompt).focus()
        self.refresh_bindings()

    def action_page(self, direction: int) -> None:
        conversation = self.query_one(Conversation)
        if direction < 0:
            conversation.scroll_page_up(animate=False)
        else:
            conversation.scroll_page_down(animate=False)
