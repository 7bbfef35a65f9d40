"""An answer as it comes: drawn at most 20 times a second, kept at least once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from hetrun.client.events import Event, GenerateRequest
from hetrun.client.interface import ChatClient
from hetrun.errors import UserError
from hetrun.tui.conversation import Talk, note_of
from hetrun.tui.messages import AnswerRates
from hetrun.tui.store.tree import Turn
from hetrun.tui.transcript.turn import TurnLines

FRAME_S = 0.05  # between two frames, at least
FRAME_SHARE = (
    0.04  # of a core goes to frames and what the screen makes of them: expensive ones come less often
)
MOST_FRAME_S = 0.5
KEEP_S = 1.0  # between two times that it is kept
TELL_S = 0.5  # between two times that figures are shown
RATED = 8  # tokens, before a rate means anything


class AnswerStream:
    """One answer to one turn."""

    def __init__(
        self,
        talk: Talk,
        entry: TurnLines,
        parent: int | None,
        draw: Callable[[TurnLines], None],
        tell: Callable[[AnswerRates], None],
    ) -> None:
        self.entry = entry
        self.parent = parent
        self.last: Event | None = None
        self.trouble = ""  # why it could not be kept
        self._talk = talk
        self._draw = draw
        self._tell = tell
        self._limit: int | None = None  # of tokens
        self._frame_due = self._keep_due = self._tell_due = 0.0
        self._written = len(entry.text)
        self._count = 0
        self._asked = time.monotonic()
        self._first = 0.0
        self._spent = time.thread_time()
        self._later: asyncio.TimerHandle | None = None  # the frame of text that came too soon for one

    @property
    def tokens(self) -> int:
        """Of the answer so far."""
        return self._count

    async def run(self, client: ChatClient, request: GenerateRequest) -> None:
        """All events; cancelling this stops the model."""
        self._limit = request.params.max_tokens
        async with aclosing(client.stream(request)) as events:
            async for event in events:
                self._take(event)
                if event.last:
                    return

    def _take(self, event: Event) -> None:
        if event.opened and self.entry.turn is None:
            self.entry.opened = event.opened
        if event.text:
            self.entry.text += event.text
        if event.last:
            self.last = event
            return
        now = time.monotonic()
        self._count += event.kind == "token"
        self._first = self._first or now
        if self._written != len(self.entry.text) and self._later is None:
            wait = max(self._frame_due - now, 0.0)
            self._later = asyncio.get_running_loop().call_later(wait, self.show)
        if now >= self._tell_due:
            self._tell_due = now + TELL_S
            self._tell(AnswerRates(self.rate(now), self._first - self._asked, self._count))

    def rate(self, now: float) -> float:
        """Tokens per second so far; 0: too few."""
        return (self._count - 1) / (now - self._first) if self._count > RATED and now > self._first else 0.0

    def show(self) -> None:
        """Draw what there is, and keep it where that is due."""
        self._later = None
        self._written = len(self.entry.text)
        # All that this thread has done since the last frame: what the screen made of that one, too.
        spent = time.thread_time() - self._spent
        self._spent += spent
        self._draw(self.entry)
        now = time.monotonic()
        self._frame_due = now + min(max(FRAME_S, spent / FRAME_SHARE), MOST_FRAME_S)
        if now >= self._keep_due:
            self._keep_due = now + KEEP_S
            self.keep()

    def _end(self, turn: Turn, note: str) -> None:
        try:
            self._talk.ended(turn, note, self.last)
        except UserError as error:
            self.trouble = str(error)

    def keep(self) -> None:
        """What there is by now; an answer that cannot be kept goes on, and it is said in the end."""
        try:
            self._keep()
        except UserError as error:
            self.trouble = str(error)

    def _keep(self) -> None:
        if not self.entry.text:
            return
        if self.entry.turn is None:
            self.entry.turn = self._talk.answer(self.parent, self.entry.text)
            self.entry.turn.opened = self.entry.opened
        self.entry.turn.text = self.entry.text
        self._talk.store.write(self.entry.turn)

    def finish(self, note: str = "") -> None:
        """No more text comes; the note says why if the last event does not."""
        if self._later is not None:
            self._later.cancel()
        self.entry.waiting = False
        if self.last is not None and not note:
            note = note_of(self.last, self._limit)
        self.entry.note = note
        self.keep()
        if self.entry.turn is not None and not self.trouble:
            self._end(self.entry.turn, note)
        self._draw(self.entry)
