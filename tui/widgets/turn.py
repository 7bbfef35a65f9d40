"""One turn of the conversation: what the user said, what the model answers, or what went wrong."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widget import MountError
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from hetrun.visible import visible


class UserTurn(Static):
    """What the user wrote, as it was written."""

    def __init__(self, text: str) -> None:
        super().__init__(visible(text), markup=False)


class ErrorTurn(Static):
    """What went wrong, in the error's own words."""

    def __init__(self, text: str) -> None:
        super().__init__(visible(text), markup=False)


class AnswerTurn(Vertical):
    """The model's answer, shown as Markdown while it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        # A link in an answer was written by a model: a stray click must not open a browser.
        self._markdown = Markdown(open_links=False)
        self._stream: MarkdownStream | None = None

    def compose(self) -> ComposeResult:
        yield Static("…", classes="waiting")
        yield self._markdown

    async def write(self, text: str) -> None:
        """Add text to the end."""
        if not text:
            return
        if self._stream is None:
            await self.query(".waiting").remove()
            stream = Markdown.get_stream(self._markdown)
            # Its task begins now: to stop one that has not begun raises its cancellation.
            await asyncio.sleep(0)
            self._stream = stream
        self.text += text
        await self._stream.write(visible(text))

    async def finish(self, note: str = "") -> None:
        """No more text comes; the note says why if that is not the model's own end."""
        with suppress(MountError):  # the app may end meanwhile
            await self.query(".waiting").remove()
            await self._stop_stream()
            if self.text:
                # Appending piece by piece can leave blocks of another kind than the whole text has.
                await self._markdown.update(visible(self.text))
            if note:
                await self.mount(Static(note, classes="note"))

    async def on_unmount(self) -> None:
        """The app ends or the conversation was cleared, perhaps in the middle of an answer."""
        with suppress(MountError):
            await self._stop_stream()

    async def _stop_stream(self) -> None:
        # Taken first: stopping it a second time, meanwhile, would raise the first one's cancellation.
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()
