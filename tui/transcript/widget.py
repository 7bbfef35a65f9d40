"""The turns so far, scrolled to the end unless the user has scrolled away from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.timer import Timer

from hetrun.tui.transcript.turn import LineStyle, TurnLines

LEFT = 2  # cells before the text: the bar, and a space
MARGIN = LEFT + 1
SLICE_S = 0.03  # of drawing old turns, between two looks at the keyboard
SCROLLBAR_S = 0.5  # between two times that it moves while an answer comes: each is a new layout of the screen
HINT = "Enter: what can be done · Esc: back to your message"
MOST_STRIPS = 4096  # lines that are kept as they are shown


class Transcript(ScrollView, can_focus=True):
    """Turns, of which one may be selected."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "transcript--text",
        "transcript--user",
        "transcript--error",
        "transcript--bar",
        "transcript--error-bar",
        "transcript--selected",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        # No letters: they begin a message, wherever they are typed.
        Binding("up", "select(-1)", "Turn above", show=False),
        Binding("down", "select(1)", "Turn below", show=False),
        Binding("home", "scroll_home", "First line", show=False),
        Binding("end", "scroll_end", "Last line", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("enter", "menu", "Menu"),
        Binding("left", "do('before')", "Earlier version", show=False),
        Binding("right", "do('after')", "Later version", show=False),
    ]
    selected: reactive[int | None] = reactive(None)  # an entry's index

    @dataclass
    class Copy(Message):
        """The user wants this text."""

        text: str

    @dataclass
    class Menu(Message):
        """The user wants to do something with a turn."""

        entry: TurnLines

    @dataclass
    class Do(Message):
        """The user wants this done with a turn."""

        what: str
        entry: TurnLines

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[TurnLines] = []
        self._drawn = 0  # how many at the end have lines; those before come soon
        self._starts: list[int] = [0]  # of the drawn ones' lines, and where the last ends
        self._follow = True
        self._strips: dict[tuple[int, bool, Segment], tuple[Strip, Strip]] = {}
        self._hint = Strip([Segment(HINT, Style(dim=True))])  # below the selected turn
        self._late: Timer | None = None  # the scrollbar has not moved yet
        self.offers: Callable[[TurnLines], Collection[str]] = lambda entry: ()  # what can be done with one

    # --- what is shown

    @property
    def entries(self) -> Sequence[TurnLines]:
        return self._entries

    def show(self, entries: Sequence[TurnLines]) -> None:
        """These and no others; the newest at once, the rest in the next moments."""
        self._entries = list(entries)
        self.selected = None
        self._follow = True
        self._redraw()

    def add(self, entry: TurnLines) -> None:
        """One more at the end, and show it."""
        entry.draw(self._look)
        self._entries.append(entry)
        self._drawn += 1
        self._follow = True
        self._measure()

    def drop(self, entry: TurnLines) -> None:
        """Take one away."""
        at = self._entries.index(entry)
        self._drawn -= at >= len(self._entries) - self._drawn
        del self._entries[at]
        self.selected = None
        self._measure()

    def changed(self, entry: TurnLines) -> None:
        """An entry's text has changed."""
        entry.draw(self._look)
        self._measure()

    # --- lines

    @property
    def _look(self) -> LineStyle:
        # While it is hidden it has no width; lines as wide as the screen are fewer than narrow ones.
        width = self.scrollable_content_region.width or self.app.size.width
        return LineStyle(max(width - MARGIN, 8), self.app.current_theme.dark)

    def _redraw(self) -> None:
        self._drawn = 0
        self._draw_some()

    def _draw_some(self) -> None:
        """Draw from the newest to the oldest, a little at a time."""
        begun, look, before = perf_counter(), self._look, self._starts[-1]
        while self._drawn < len(self._entries) and perf_counter() - begun < SLICE_S:
            self._drawn += 1
            self._entries[-self._drawn].draw(look)
        self._measure()
        if not self._follow:
            # What was drawn stands above what is looked at, which stays where it is.
            self.scroll_to(y=self.scroll_y + self._starts[-1] - before, animate=False, immediate=True)
        if self._drawn < len(self._entries):
            self.set_timer(0.01, self._draw_some)

    def _shown(self) -> list[TurnLines]:
        return self._entries[len(self._entries) - self._drawn :]

    def _measure(self) -> None:
        """Count the lines. While they follow the end, the scrollbar comes later: it costs more than lines."""
        before, starts = self._starts[-1], [0]
        for entry in self._shown():
            starts.append(starts[-1] + len(entry.lines))
        self._starts = starts
        if not self._follow or starts[-1] < before:
            self.catch_up()
        elif self._late is None and starts[-1] != self.virtual_size.height:
            self._late = self.set_timer(SCROLLBAR_S, self.catch_up)
        self.refresh()

    def catch_up(self) -> None:
        """Have the scrollbar agree with the lines."""
        if self._late is not None:
            self._late.stop()
            self._late = None
        follow = self._follow
        self.virtual_size = Size(max(self.scrollable_content_region.width, 1), self._starts[-1])
        if follow:
            self.scroll_end(animate=False, immediate=True, x_axis=False)
            self._follow = True

    @property
    def _top(self) -> int:
        """The line at the upper edge."""
        end = max(self._starts[-1] - self.size.height, 0)
        return end if self._follow else min(self.scroll_offset.y, end)

    def _at(self, line: int) -> tuple[int, int] | None:
        """The entry's index at a line, and the line within it."""
        if not 0 <= line < self._starts[-1]:
            return None
        i = bisect_right(self._starts, line) - 1
        return len(self._entries) - self._drawn + i, line - self._starts[i]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Straight to the compositor: what Textual does for borders and the like, these lines do not have."""
        width, top = self.size.width, self._top
        return [self._strip(y + top, width).crop(crop.x, crop.right) for y in crop.line_range]

    def _strip(self, y: int, width: int) -> Strip:
        base = self.get_component_rich_style("transcript--text")
        found = self._at(y)
        if found is None:
            return Strip.blank(width, base)
        index, line = found
        entry = self._entries[index]
        strip, last = entry.lines[line], line == len(entry.lines) - 1
        if index == self.selected and y == self._last_shown(index):
            strip, last = self._hint, True
        plain = last or entry.kind == "assistant"
        style = base if plain else self.get_component_rich_style(f"transcript--{entry.kind}")
        bar = self._bar(entry, index, last, style)
        # A line that was drawn is the same object as long as it says the same.
        key = (id(strip), plain, bar)
        known = self._strips.get(key)
        if known is not None and known[0] is strip and known[1].cell_length == width:
            return known[1]
        text = strip.apply_style(style)
        shown = Strip([bar, Segment(" ", style), *text]).extend_cell_length(width, style).crop(0, width)
        if len(self._strips) >= MOST_STRIPS:
            self._strips.clear()
        self._strips[key] = (strip, shown)
        return shown

    def _last_shown(self, index: int) -> int:
        """The last line of an entry that is in sight."""
        end = self._starts[index - (len(self._entries) - self._drawn) + 1] - 1
        return min(end, self._top + self.size.height - 1)

    def _bar(self, entry: TurnLines, index: int, last: bool, style: Style) -> Segment:
        if index == self.selected and not last:
            return Segment("┃", style + self.get_component_rich_style("transcript--selected"))
        if entry.kind == "assistant" or last:
            return Segment(" ", style)
        name = "transcript--bar" if entry.kind == "user" else "transcript--error-bar"
        return Segment("▌", style + self.get_component_rich_style(name, partial=True))

    # --- the view

    def on_resize(self, event: events.Resize) -> None:
        if self._entries and self._entries[-1].look != self._look:
            self._redraw()
        else:
            self.catch_up()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()
        if self.is_mounted and self._entries and self._entries[-1].look != self._look:
            self._redraw()

    def on_mouse_scroll_up(self) -> None:
        self.catch_up()

    def on_mouse_scroll_down(self) -> None:
        self.catch_up()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follow = new_value >= self.max_scroll_y - 1

    def watch_show_vertical_scrollbar(self, shown: bool) -> None:
        """Before there is a scrollbar nothing scrolls."""
        if shown:
            self.catch_up()

    def watch_selected(self, selected: int | None) -> None:
        self.refresh()
        self.app.refresh_bindings()

    def action_select(self, step: int) -> None:
        """The turn above or below; above the first and below the last there is none."""
        if not self._entries:
            return
        at = (len(self._entries) if self.selected is None else self.selected) + step
        self.select(max(0, min(at, len(self._entries) - 1)))

    def select(self, index: int) -> None:
        """This one, in view."""
        self.catch_up()
        self.selected = index
        shown = index - (len(self._entries) - self._drawn)
        if shown >= 0:
            top, end = self._starts[shown], self._starts[shown + 1]
            region = Region(0, top, 1, min(end - top, self.scrollable_content_region.height))
            self.scroll_to_region(region, animate=False, immediate=True)

    @property
    def selection(self) -> TurnLines | None:
        """The selected entry."""
        return None if self.selected is None else self._entries[self.selected]

    def on_blur(self) -> None:
        if self.app.screen is self.screen:  # no dialog asks about the turn
            self.selected = None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only what can be done is offered."""
        if action == "menu":
            return self.selection is not None
        if action == "do":
            return self.selection is not None and str(parameters[0]) in self.offers(self.selection)
        return True

    def action_menu(self) -> None:
        if entry := self.selection:
            self.post_message(self.Menu(entry))

    def action_do(self, what: str) -> None:
        if entry := self.selection:
            self.post_message(self.Do(what, entry))

    def on_click(self, event: events.Click) -> None:
        """Select a turn, or do what its line offers; a second click opens its menu."""
        place = event.get_content_offset(self)
        found = self._at(place.y + self._top) if place else None
        if found is None:
            self.selected = None
            return
        index, line = found
        entry = self._entries[index]
        if (code := entry.code_at(line)) is not None:
            self.post_message(self.Copy(code))
        elif entry.is_fold(line):
            self.fold(entry)
        elif index == self.selected:
            self.post_message(self.Menu(entry))
        else:
            self.select(index)

    def fold(self, entry: TurnLines) -> None:
        """Show a thought, or hide it."""
        entry.unfolded = not entry.unfolded
        self.changed(entry)
