"""What goes with the next message, above the box: each can be taken away again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual import events
from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from hetrun.system.terminal_text import visible

LEAST_NAME = 6  # letters of a name that stay, however narrow the screen is


class Chip(NamedTuple):
    """One thing that goes with it."""

    name: str
    about: str
    kind: str = ""  # with the number what removes it: "" for what cannot be removed
    number: int = 0


class Chips(Static):
    """Lines of them, as many as it takes; hidden where there are none."""

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._chips: Sequence[Chip] = ()
        self.display = False

    @property
    def chips(self) -> Sequence[Chip]:
        return self._chips

    def show(self, chips: Sequence[Chip]) -> None:
        """These and no others."""
        self._chips = chips
        self.display = bool(chips)
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = (self.size or self.app.size).width or self.app.size.width
        lines: list[Content] = []
        for chip in self._chips:
            found = _content(chip, width)
            if lines and lines[-1].cell_length + 2 + found.cell_length <= width:
                lines[-1] = Content.assemble(lines[-1], "  ", found)
            else:
                lines.append(found)
        self.update(Content("\n").join(lines))


def _content(chip: Chip, width: int) -> Content:
    """A chip in one line; a long name is cut in the middle, for its end says what it is."""
    about = f" {chip.about}" if chip.about else ""
    room = max(width - len(about) - 4, LEAST_NAME)
    name = visible(" ".join(chip.name.split()))
    if len(name) > room:
        name = f"{name[: room // 2]}…{name[len(name) - (room - 1 - room // 2) :]}"
    if not chip.kind:
        return Content(f"{name}{about}")
    remove = Style.from_meta({"@click": f"screen.detach('{chip.kind}', {chip.number})"})
    cross = Content("✕").stylize("$text-error").stylize(remove)
    return Content.assemble((name, "$text-primary"), about, " ", cross)
