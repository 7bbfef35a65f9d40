"""Small questions: a line of text, one of several things, or text to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import Worker, WorkerState

from hetrun.system.terminal_text import visible
from hetrun.tui.messages import SideTaskFailed

T = TypeVar("T")
SHARE = 92  # of a screen's height, in percent, that a dialog may have
LOW, GAPS = 20, 3  # a screen of fewer lines shows dialogs without these between things


class Dialog(ModalScreen[T]):
    """A screen in front of the chat. It closes if what it does fails unexpectedly."""

    AUTO_FOCUS = ""  # each says what has the focus, and nothing scrolls for another widget before
    AROUND = 0  # lines that are no part of its body

    def on_mount(self) -> None:
        self._fit(self.app.size.height)  # its first size may have come before there was a body

    def on_resize(self, event: events.Resize) -> None:
        self._fit(event.size.height)

    def _fit(self, height: int) -> None:
        """Where a dialog is as high as its body, that has what the rest leaves of the screen."""
        for body in self.query(".fitting .body"):
            around = self.AROUND - GAPS * (height < LOW)
            body.styles.max_height = max(height * SHARE // 100 - around, 3)

    def leave(self, result: T | None = None) -> None:
        """Close, once: a second key, or the mouse, may ask for it before it is gone."""
        if not self.is_mounted:
            self.call_later(self.leave, result)  # a key that came so early; what is in it is looked for first
        elif self.is_current:
            self.dismiss(result)

    async def action_dismiss(self, result: T | None = None) -> None:
        self.leave(result)

    @on(Worker.StateChanged)
    def _failed(self, message: Worker.StateChanged) -> None:
        if message.state is WorkerState.ERROR and message.worker.error is not None:
            self.leave(None)
            self.app.post_message(SideTaskFailed(message.worker.error))


class TextDialog(Dialog[str | None]):
    """A line of text; None: never mind. The hint says what may be written."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Cancel")]

    def __init__(self, question: str, text: str = "", placeholder: str = "", hint: str = "") -> None:
        super().__init__()
        self._question = question
        self._hint = hint
        self._input = Input(text, placeholder=placeholder, select_on_focus=False)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, classes="title", markup=False)
            yield self._input
            if self._hint:
                yield Static(self._hint, classes="hint", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("OK", variant="primary", id="ok", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        self.set_focus(self._input, scroll_visible=False)

    @on(Input.Submitted)
    @on(Button.Pressed, "#ok")
    def _done(self) -> None:
        self.leave(self._input.value.strip() or None)

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.leave(None)


class DialogChoice(NamedTuple):
    """One of several things; the key takes it at once."""

    name: str
    label: str
    key: str = ""


class Choose(Dialog[str | None]):
    """One of several things, by its name; None: never mind."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Cancel")]

    def __init__(self, question: str, choices: Sequence[DialogChoice], chosen: str = "") -> None:
        super().__init__()
        self._question = question
        self._choices = choices
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, classes="title", markup=False)
            yield OptionList(*[Option(self._label(c), c.name) for c in self._choices])

    @staticmethod
    def _label(choice: DialogChoice) -> Content:
        key = Content.styled(f"  {choice.key}", "dim") if choice.key else Content("")
        return Content(visible(choice.label)) + key

    def on_mount(self) -> None:
        found = self.query_one(OptionList)
        self.set_focus(found, scroll_visible=False)
        names = [choice.name for choice in self._choices]
        found.highlighted = names.index(self._chosen) if self._chosen in names else 0

    def on_key(self, event: events.Key) -> None:
        """Take what has this key, which ends here: what has the focus next must not see it."""
        chosen = next((choice for choice in self._choices if choice.key == event.key), None)
        if chosen is not None:
            event.stop()
            event.prevent_default()
            self.leave(chosen.name)

    @on(OptionList.OptionSelected)
    def _done(self, message: OptionList.OptionSelected) -> None:
        self.leave(message.option_id)


class TextView(Dialog[None]):
    """Text to read, with a key to copy it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        Binding("y", "copy", "Copy"),
    ]

    def __init__(self, title: str, text: str | Content, copied: str = "") -> None:
        super().__init__()
        self._heading = title
        self._text = text
        self._copied = copied

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static(self._heading, classes="title", markup=False)
            with VerticalScroll(classes="body"):
                yield Static(self._text, markup=False)
            keys = "Esc closes, y copies" if self._copied else "Esc closes"
            yield Static(keys, classes="keys", markup=False)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(VerticalScroll), scroll_visible=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self._copied) if action == "copy" else True

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._copied)
        self.query_one(".keys", Static).update("Copied")
