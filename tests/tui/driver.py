"""The app from the outside: what is typed and what is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import OptionList, Static

from hetrun.client.engine_client import LocalClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.tui.app import ChatApp
from hetrun.tui.host import Doors
from hetrun.tui.screens.chat import ChatScreen
from hetrun.tui.screens.dialogs import Choose
from hetrun.tui.transcript.turn import TurnLines
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.notice import Notice
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.sidebar import Titles
from hetrun.tui.widgets.status import StatusLine
from tests.support.fakes import FakeEngine

PATIENCE_S = 45.0  # far beyond what anything takes on a busy machine


class Driver:
    def __init__(self, app: ChatApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def screen(self) -> ChatScreen:
        """The conversation, whatever stands in front of it."""
        found = self.app.screen_stack[0]
        assert isinstance(found, ChatScreen)
        return found

    @property
    def front(self) -> Screen[object]:
        """What has the keys."""
        return self.app.screen

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the app work until something is so; what is never so is a failure, and no hang."""
        # Not pilot.pause: that waits up to a second for the process to be idle, which it is not in a stream.
        end = monotonic() + PATIENCE_S
        while not reached():
            if self.app._exception is not None:
                raise self.app._exception
            assert monotonic() < end, f"in vain; shown: {self.shown!r}, said: {self.said}"
            await asyncio.sleep(0.005)

    async def send(self, text: str) -> None:
        self.prompt.focus()
        await self.until(lambda: self.prompt.has_focus)
        self.prompt.insert(text)
        await self.press("enter")

    async def command(self, text: str) -> None:
        """Send what is no message, and wait until it was taken."""
        await self.send(text)
        await self.until(lambda: self.prompt.text == "")

    async def new(self) -> None:
        """Begin a new conversation."""
        await self.press("ctrl+n")
        await self.until(lambda: not self.transcript.entries)

    async def press(self, *keys: str) -> None:
        # Not pilot.press, for the same reason.
        for key in keys:
            self.app.simulate_key(key)
            await asyncio.sleep(0)

    async def answered(self, n: int = 1) -> None:
        await self.until(lambda: len(self.answers) >= n and self.screen.parts.answers.current is None)

    async def exchange(self, text: str) -> None:
        """Send and wait for the answer."""
        n = len(self.answers)
        await self.send(text)
        await self.answered(n + 1)

    async def select(self, index: int) -> None:
        """A turn, with the keys for it."""
        self.transcript.focus()
        self.transcript.select(index)
        await self.until(lambda: self.transcript.has_focus)

    async def do_with_turn(self, index: int, key: str) -> None:
        """Open the menu of a turn, and press a key there."""
        await self.select(index)
        await self.press("enter")
        await self.opened(Choose)
        await self.press(key)

    async def opened(self, kind: type[object]) -> None:
        """Wait for a dialog, complete."""
        await self.until(lambda: isinstance(self.front, kind) and self.front.is_mounted)
        await self.pilot.pause()

    @property
    def prompt(self) -> Prompt:
        return self.screen.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        return self.screen.query_one(Transcript)

    def entries(self, kind: str) -> list[TurnLines]:
        return [entry for entry in self.transcript.entries if entry.kind == kind]

    @property
    def answers(self) -> list[str]:
        return [entry.text for entry in self.entries("assistant")]

    @property
    def asked(self) -> list[str]:
        return [entry.text for entry in self.entries("user")]

    @property
    def errors(self) -> list[str]:
        return [entry.text for entry in self.entries("error")]

    @property
    def shown(self) -> str:
        """The lines of the conversation, all of them."""
        return "\n".join(line.text.rstrip() for entry in self.transcript.entries for line in entry.lines)

    @property
    def titles(self) -> list[str]:
        return [str(option.prompt) for option in self.screen.query_one(Titles).options]

    @property
    def options(self) -> list[str]:
        """What the dialog in front offers."""
        return [str(option.id) for option in self.front.query_one(OptionList).options]

    @property
    def status(self) -> tuple[str, str]:
        model, figures = self.screen.query_one(StatusLine).query(Static)
        return str(model.content), str(figures.content)

    @property
    def said(self) -> list[str]:
        """What stands above the box, if anything does."""
        assert not self.app._notifications, "nothing is said in a corner"
        notice = self.screen.query_one(Notice)
        return [notice.text] if notice.display else []

    @property
    def keys(self) -> list[str]:
        """What the footer offers."""
        shown = [(b.binding, b.enabled) for b in self.screen.active_bindings.values()]
        return [binding.description for binding, enabled in shown if enabled and binding.show]


@asynccontextmanager
async def chatting(
    engine: FakeEngine,
    params: SamplingParams | None = None,
    system: str | None = None,
    *,
    place: Path | None = None,
    doors: Doors | None = None,
    size: tuple[int, int] = (80, 24),
) -> AsyncIterator[Driver]:
    app = ChatApp(LocalClient(engine), params, system, place, doors)
    async with app.run_test(size=size) as pilot:
        chat = Driver(app, pilot)
        await chat.until(lambda: chat.screen.parts.engine.info is not None)
        yield chat
