"""System prompt and sampling of a conversation, and presets of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Input, Label, Static

from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import HetrunError
from hetrun.tui.conversation import Talk, parsed_value
from hetrun.tui.screens.dialogs import Choose, Dialog, DialogChoice, TextDialog
from hetrun.tui.widgets.text_box import TextBox

# Those that people turn; /set knows the others.
SHOWN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "max_tokens",
    "seed",
)


@dataclass(frozen=True)
class ChosenSettings:
    """What holds from now on."""

    system: str
    sampling: Mapping[str, Any]


class SettingsScreen(Dialog[ChosenSettings | None]):
    """A form; what is left empty is as the command line has it."""

    AROUND = 8
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Cancel", key_display="Esc"),
        Binding("ctrl+s", "save", "Save", priority=True),
    ]

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self._talk = talk
        self._others = {name: value for name, value in talk.sampling.items() if name not in SHOWN}

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide fitting"):
            yield Static("This conversation", classes="title", markup=False)
            with VerticalScroll(classes="body"):
                yield Label("System prompt")
                yield TextBox(self._talk.system, tab_behavior="focus", id="system")
                with Grid(id="sampling"):
                    for name in SHOWN:
                        yield Label(name)
                        yield Input(
                            self._text(self._talk.sampling.get(name)),
                            placeholder=self._usual(name),
                            id=name,
                            compact=True,
                        )
                yield Static("", id="others", markup=False)
            yield Static("", classes="error", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Save ^s", variant="primary", id="save", compact=True)
                yield Button("Presets", id="presets", compact=True)
                yield Button("Keep as preset", id="keep", compact=True)
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        self.set_focus(self.query_one("#system"), scroll_visible=False)
        self._show_others()

    def _show_others(self) -> None:
        told = ", ".join(f"{name} = {value}" for name, value in self._others.items())
        self.query_one("#others", Static).update(f"also: {told}" if told else "")

    @staticmethod
    def _text(value: object) -> str:
        return "" if value is None else str(value)

    def _usual(self, name: str) -> str:
        value = getattr(self._talk.usual, name)
        return (
            "the model's own"
            if value is None and name == "temperature"
            else "-"
            if value is None
            else str(value)
        )

    def _chosen(self) -> ChosenSettings | None:
        """What the form says; nothing, and why, if that makes no sense."""
        sampling: dict[str, Any] = dict(self._others)
        for name in SHOWN:
            if text := self.query_one(f"#{name}", Input).value.strip():
                sampling[name] = parsed_value(text)
        try:
            SamplingParams.from_mapping(sampling)
        except HetrunError as error:
            self.query_one(".error", Static).update(str(error))
            return None
        return ChosenSettings(self.query_one(TextBox).text.strip(), sampling)

    def _fill(self, system: str, sampling: Mapping[str, Any]) -> None:
        self.query_one(TextBox).load_text(system)
        for name in SHOWN:
            self.query_one(f"#{name}", Input).value = self._text(sampling.get(name))
        self._others = {name: value for name, value in sampling.items() if name not in SHOWN}
        self._show_others()

    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        if chosen := self._chosen():
            self.leave(chosen)

    @on(Button.Pressed, "#presets")
    @work(exit_on_error=False)
    async def _presets(self) -> None:
        presets = self._talk.store.presets()
        if not presets:
            self.query_one(".error", Static).update("there are no presets yet: save one")
            return
        name = await self.app.push_screen_wait(Choose("Presets", [DialogChoice(n, n) for n in presets]))
        if not name:
            return
        what = await self.app.push_screen_wait(
            Choose(name, [DialogChoice("use", "Use it", "u"), DialogChoice("delete", "Delete it", "d")])
        )
        if what == "use":
            self._fill(*presets[name])
        elif what == "delete":
            self._talk.store.delete_preset(name)

    @on(Button.Pressed, "#keep")
    @work(exit_on_error=False)
    async def _keep(self) -> None:
        chosen = self._chosen()
        if chosen and (name := await self.app.push_screen_wait(TextDialog("Name of the preset"))):
            self._talk.store.save_preset(name, chosen.system, chosen.sampling)
            self.query_one(".error", Static).update(f"The preset {name} is kept")

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.leave(None)
