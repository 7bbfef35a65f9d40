"""What other memory, context or threads would mean: predicted at once, applied if the user wants it."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Button, Input, Label, Static

from hetrun.client.interface import ChatClient
from hetrun.client.queries import PlanForecast, WhatIf
from hetrun.errors import HetrunError
from hetrun.system.terminal_text import align_columns, visible
from hetrun.system.units import format_bytes
from hetrun.tui.screens.dialogs import Dialog

# Name, what it is, and what the arrow keys do to it.
KNOBS = (
    ("ctx", "context, tokens", "double"),
    ("kv_type", "keys and values", "f16 q8_0"),
    ("ram", "memory", "double"),
    ("vram", "GPU memory", "double"),
    ("threads", "threads", "one"),
)
SOON_S = 0.15  # after the last key, before the planner is asked
THEN = 11  # columns of a row that show what would be


class Knob(Input):
    """A value that is typed, or moved with the arrow keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "turn(1)", "More"),
        Binding("down", "turn(-1)", "Less"),
    ]

    def __init__(self, name: str, how: str) -> None:
        super().__init__(placeholder="as it is", id=name, compact=True)
        self._how = how
        self.now = ""  # what holds while nothing is typed

    def action_turn(self, step: int) -> None:
        self.value = turned(self.value.strip() or self.now, self._how, step)


class WhatIfScreen(Dialog[dict[str, object] | None]):
    """Knobs at the left, what they would mean at the right."""

    AROUND = 11
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", key_display="Esc"),
        Binding("ctrl+s", "apply", "Apply", priority=True),
    ]

    def __init__(self, client: ChatClient, can_apply: bool, measured: float = 0.0) -> None:
        """`measured`: tokens per second of the last answer, which the panel shows."""
        super().__init__()
        self._client = client
        self._measured = measured
        self._can_apply = can_apply
        self._now: PlanForecast | None = None
        self._soon: Timer | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide fitting"):
            yield Static("What if", classes="title", markup=False)
            with Grid(id="knobs"):
                for name, label, how in KNOBS:
                    yield Label(label)
                    yield Knob(name, how)
            with VerticalScroll(classes="body"):
                yield Static("asking the planner …", id="foreseen", markup=False)
            keys = "Tab: next · Up, Down: more, less · ^s applies · Esc closes"
            yield Static(keys, classes="keys", markup=False)
            with Horizontal(classes="buttons"):
                yield Button(
                    "Apply ^s", variant="primary", id="apply", compact=True, disabled=not self._can_apply
                )
                yield Button("Close", id="close", compact=True)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Knob), scroll_visible=False)
        self._ask()

    @property
    def changes(self) -> dict[str, object]:
        """What was moved."""
        return {knob.id or "": knob.value.strip() for knob in self.query(Knob) if knob.value.strip()}

    @on(Input.Changed)
    def _moved(self) -> None:
        if self._soon is not None:
            self._soon.stop()
        self._soon = self.set_timer(SOON_S, self._ask)

    @work(exclusive=True, exit_on_error=False)
    async def _ask(self) -> None:
        shown = self.query_one("#foreseen", Static)
        try:
            if self._now is None:
                self._now = await self._client.ask(WhatIf({}))
                self._name_what_holds(self._now)
            then = await self._client.ask(WhatIf(self.changes)) if self.changes else self._now
        except HetrunError as error:
            shown.update(Content.styled(visible(str(error)), "$text-error"))
        else:
            shown.update(compared(self._now, then, max(shown.size.width, 40), self._measured))

    def _name_what_holds(self, now: PlanForecast) -> None:
        limit = now.memory.get("limit")
        known = {
            "ctx": str(now.context),
            "kv_type": now.kv_type,
            "ram": typed_size(limit) if limit else "",
            "threads": str(now.threads),
        }
        for knob in self.query(Knob):
            knob.now = known.get(knob.id or "", "")
            knob.placeholder = knob.now or "as it is"

    @on(Button.Pressed, "#apply")
    def action_apply(self) -> None:
        if self._can_apply and self.changes:
            self.leave(self.changes)
        elif not self._can_apply:
            note = "this engine was started elsewhere: its options cannot be changed here"
            self.query_one(".keys", Static).update(note)

    @on(Button.Pressed, "#close")
    def _close(self) -> None:
        self.leave(None)


def turned(value: str, how: str, step: int) -> str:
    """The next value up or down."""
    if " " in how:
        known = how.split()
        at = known.index(value) if value in known else 0
        return known[(at + step) % len(known)]
    found = NUMBER.match(value)
    if found is None:
        return {"double": "1GiB", "one": "1"}[how] if how in ("double", "one") else value
    n, unit = float(found[0]), value[found.end() :].strip()
    if how == "one":
        return f"{max(int(n) + step, 1)}{unit}"
    n = n * 2 if step > 0 else n / 2
    if unit == "GiB" and n < 1:
        n, unit = n * 1024, "MiB"
    elif unit == "MiB" and n >= 1024 and n % 1024 == 0:
        n, unit = n / 1024, "GiB"
    return f"{max(n, 1):.{0 if n == int(n) or unit in ('', 'MiB') else 1}f}{unit}"


NUMBER = re.compile(r"\d{1,12}(\.\d{1,3})?")


def typed_size(nbytes: int) -> str:
    """A size as people write one after --ram: 18.6GiB."""
    gib = nbytes / (1 << 30)
    return f"{nbytes >> 20}MiB" if gib < 1 else f"{gib:.1f}GiB".replace(".0G", "G")


def compared(now: PlanForecast, then: PlanForecast, width: int, measured: float = 0.0) -> Content:
    """A table of what is and what would be."""
    speeds = [("context", f"{now.context:,}", f"{then.context:,}"), *_speeds(now, then)]
    rows = [("from disk each pass", _size(now.streamed_bytes), _size(then.streamed_bytes))]
    for name in dict.fromkeys([*now.memory, *then.memory]):
        rows.append((name, _size(now.memory.get(name, 0)), _size(then.memory.get(name, 0))))
    for device in dict.fromkeys([*now.devices, *then.devices]):
        mine, other = now.devices.get(device, {}), then.devices.get(device, {})
        for name in dict.fromkeys([*mine, *other]):
            rows.append((f"{device}: {name}", _size(mine.get(name, 0)), _size(other.get(name, 0))))
    name_width = min(max(len(name) for name, _, _ in (*speeds, *rows)), max(width - 26, 12))
    cells = [("", "now", "then"), *((name[:name_width], a, b) for name, a, b in (*speeds, *rows))]
    head, *texts = align_columns(cells, left={0}, least=(name_width, 11, 10))
    shown = [_styled(text, a != b) for text, (_, a, b) in zip(texts, (*speeds, *rows), strict=True)]
    lines = [Content.styled(head, "bold"), *shown[: len(speeds)]]
    lines += [Content.styled(note, "dim") for note in _of_speeds(now, then, measured)]
    lines += shown[len(speeds) :]
    told = [note for note in then.notes if not note.startswith("speeds are unknown")]  # that is said above
    lines += [Content.styled(visible(note), "dim") for note in told]
    return Content("\n").join(lines)


def _styled(row: str, is_changed: bool) -> Content:
    now, then = row[:-THEN], row[-THEN:]
    return Content(now) + Content.styled(then, "$text-primary bold" if is_changed else "")


def _speeds(now: PlanForecast, then: PlanForecast) -> list[tuple[str, str, str]]:
    """Those that are known of one of both."""
    rates = (
        ("decode, tokens/s", now.decode_tok_s, then.decode_tok_s),
        ("  with the context full", now.full_tok_s, then.full_tok_s),
        ("prefill, tokens/s", now.prefill_tok_s, then.prefill_tok_s),
    )
    return [(name, _rate(a), _rate(b)) for name, a, b in rates if a is not None or b is not None]


def _of_speeds(now: PlanForecast, then: PlanForecast, measured: float) -> list[str]:
    """Where they come from, and why the panel shows other ones."""
    if not _speeds(now, then):
        return ["Speeds cannot be predicted here: nothing was measured of this model on its machine."]
    where = "from times measured on this machine" if then.measured else "nothing was measured here yet"
    notes = [f"Speeds are predictions: {where}."]
    if measured:
        notes.append(f"The last answer ran at {measured:,.0f} tokens/s, beside all else that runs here.")
    return notes


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:,.1f}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"
