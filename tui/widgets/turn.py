"""One turn of the conversation: what the user said, what the model answers, or what went wrong."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
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
            self._stream = Markdown.get_stream(self._markdown)
        self.text += text
        await self._stream.write(visible(text))

    async def finish(self, note: str = "") -> None:
        """No more text comes; the note says why if that is not the model's own end."""
        if not self.is_attached:
            return  # the conversation was cleared, or the app ends
        await self.query(".waiting").remove()
        if self._stream is not None:
            await self._stream.stop()
            # Appending piece by piece can leave blocks of another kind than the whole text has.
            await self._markdown.update(visible(self.text))
        if note:
            await self.mount(Static(note, classes="note"))
