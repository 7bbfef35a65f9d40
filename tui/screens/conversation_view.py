"""The open conversation on the screen."""

from __future__ import annotations

from textual.screen import Screen

from hetrun.tui.conversation import Talk
from hetrun.tui.screens.conversation_list import ConversationList
from hetrun.tui.screens.conversation_settings import ConversationSettings
from hetrun.tui.screens.figures import AnswerFigures
from hetrun.tui.screens.picture_cards import PictureCards
from hetrun.tui.store.tree import Turn
from hetrun.tui.transcript.turn import TurnLines
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.welcome import Welcome


class ConversationView:
    """Shows the turns of the open conversation, with its system prompt and its figures."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        *,
        cards: PictureCards,
        figures: AnswerFigures,
        settings: ConversationSettings,
        listing: ConversationList,
    ) -> None:
        self._screen = screen
        self._talk = talk
        self._cards = cards
        self._figures = figures
        self._settings = settings
        self._listing = listing

    @property
    def transcript(self) -> Transcript:
        return self._screen.query_one(Transcript)

    def show(self) -> None:
        """The open conversation as the store has it."""
        path = self._talk.tree.path
        entries = [self.entry_of(turn) for turn in path]
        self.transcript.show(entries)
        self._settings.show()
        self._figures.show_path(path)
        self._show_welcome()
        self._listing.show()
        self._screen.refresh_bindings()
        if any(entry.cards for entry in entries):
            self._cards.show_thumbnails()

    def entry_of(self, turn: Turn) -> TurnLines:
        """A turn as it is shown."""
        entry = TurnLines(turn.role, turn)
        entry.cards = self._cards.cards_of(turn)
        versions = self._talk.tree.versions(turn)
        if len(versions) > 1:
            entry.place = f"version {versions.index(turn) + 1} of {len(versions)}"
        return entry

    def _show_welcome(self) -> None:
        empty = not self.transcript.entries
        self._screen.query_one(Welcome).display = empty
        self.transcript.display = not empty

    def add(self, entry: TurnLines) -> TurnLines:
        """An entry at the end."""
        transcript = self.transcript
        self._screen.query_one(Welcome).display = False
        transcript.display = True
        transcript.add(entry)
        return entry

    def add_turn(self, turn: Turn) -> None:
        """A turn at the end, with its pictures."""
        self.add(self.entry_of(turn))
        if turn.pictures:
            self._cards.show_thumbnails()

    def complain(self, text: str) -> None:
        """Something went wrong; it is said in the conversation, and not kept with it."""
        self.add(TurnLines("error", text=text))

    def draw(self, entry: TurnLines) -> None:
        """An entry has another text."""
        for transcript in self._screen.query(Transcript):  # there is none any more when the app ends
            if entry in transcript.entries:
                transcript.changed(entry)

    def number_versions(self) -> None:
        """Answers may have become versions of each other."""
        transcript = self.transcript
        for entry in transcript.entries:
            if entry.turn is not None and entry.turn.id in self._talk.tree.turns:
                place = self.entry_of(entry.turn).place
                if place != entry.place:
                    entry.place = place
                    transcript.changed(entry)
