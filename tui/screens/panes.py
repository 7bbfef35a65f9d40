"""The panes beside the conversation: which are shown."""

from __future__ import annotations

from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Input

from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.machine_watch import MachineWatch
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.widgets.sidebar import Sidebar, Titles

SIDEBAR_FROM, MACHINE_FROM = 128, 100  # columns from which a pane is shown without being asked for


class SidePanes:
    """Shows and hides the sidebar and the machine, by the width of the screen and by hand."""

    def __init__(self, screen: Screen[None], listing: ConversationList, machine: MachineWatch) -> None:
        self._screen = screen
        self._listing = listing
        self._machine = machine
        self._asked_for: dict[str, bool] = {}  # panes that were shown or hidden by hand

    def fit(self, size: Size) -> None:
        """Those that have room."""
        query = self._screen.query_one
        for name, least in (("sidebar", SIDEBAR_FROM), ("machine", MACHINE_FROM)):
            query(f"#{name}").display = self._asked_for.get(name, size.width >= least)
        if size.width < MACHINE_FROM and query("#machine").display:
            query("#sidebar").display = False  # one at a time
        self._listing.show()
        self._machine.show()

    def toggle(self, name: str) -> None:
        """Show a pane, or hide it; on a narrow screen one at a time."""
        screen = self._screen
        pane = screen.query_one(f"#{name}")
        self._asked_for[name] = pane.display = not pane.display
        if pane.display and screen.size.width < MACHINE_FROM:
            other = "machine" if name == "sidebar" else "sidebar"
            self._asked_for[other] = screen.query_one(f"#{other}").display = False
        self._listing.show()
        if name == "sidebar" and pane.display:
            screen.set_focus(screen.query_one(Titles))
        elif not pane.display:
            screen.set_focus(screen.query_one(Prompt))
        self._machine.look(at_once=True)

    def open_search(self) -> None:
        """The box of the sidebar in which one searches."""
        sidebar = self._screen.query_one(Sidebar)
        if not sidebar.display:
            self.toggle("sidebar")
        self._screen.set_focus(sidebar.query_one(Input))  # at once: the next key is for it
