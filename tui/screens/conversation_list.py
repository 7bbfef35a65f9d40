"""The conversations of the store, in the sidebar."""

from __future__ import annotations

from textual.screen import Screen

from hetrun.tui.conversation import Talk
from hetrun.tui.notices import ChatNotices
from hetrun.tui.widgets.sidebar import Sidebar


class ConversationList:
    """What the sidebar lists: all conversations, or those that were searched for."""

    def __init__(self, screen: Screen[None], talk: Talk, notices: ChatNotices) -> None:
        self._screen = screen
        self._talk = talk
        self._notices = notices

    def show(self) -> None:
        """The conversations as the store has them now; nothing is read while the sidebar is hidden."""
        sidebar = self._screen.query_one(Sidebar)
        if not sidebar.display:
            return
        with self._notices.telling():
            sidebar.show(self._talk.store.conversations(sidebar.searched), self._talk.number)
