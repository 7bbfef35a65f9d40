"""What the chat says above the box."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from textual.screen import Screen

from hetrun.errors import HetrunError
from hetrun.tui.crash_report import explained
from hetrun.tui.widgets.notice import Notice
from hetrun.tui.widgets.prompt import Prompt


class ChatNotices:
    """Outcomes and errors of what the user asked for."""

    def __init__(self, screen: Screen[None], reports: Path | None) -> None:
        """`reports`: the folder for reports of the chat's own faults."""
        self._screen = screen
        self._reports = reports

    def say(self, text: str, error: bool = False) -> None:
        """What became of a command, or why it could not be done: above the box."""
        for notice in self._screen.query(Notice):  # there is none any more when the app ends
            notice.say(text, self._screen.query_one(Prompt).text, error)

    def hide(self) -> None:
        self._screen.query_one(Notice).hide()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What cannot be done is said above the box."""
        try:
            yield
        except HetrunError as error:
            self.say(str(error), error=True)

    def words_of(self, error: BaseException) -> str:
        """An error as people read it; an unexpected one is written down, to be reported."""
        return str(error) if isinstance(error, HetrunError) else explained(error, self._reports)

    def give_back(self, text: str) -> None:
        """A command could not be done: its text goes back into the box, unless another one is there."""
        prompt = self._screen.query_one(Prompt)
        if not prompt.text:
            prompt.put_back(text)
