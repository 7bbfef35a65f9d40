"""Pictures of the conversation, as this terminal can show them."""

from __future__ import annotations

import os

from textual.screen import Screen

from hetrun.errors import HetrunError
from hetrun.tui.pictures import Gallery
from hetrun.tui.store.store import ConversationStore
from hetrun.tui.store.tree import Turn, TurnPicture
from hetrun.tui.transcript.thumbnails import Card, KittyPainter, Paint, has_placeholders, in_half_blocks
from hetrun.tui.transcript.turn import TurnLines
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.workers import begin_work


class PictureCards:
    """Cards for the pictures of turns; their thumbnails are decoded beside the chat."""

    def __init__(self, screen: Screen[None], store: ConversationStore) -> None:
        self._screen = screen
        self._store = store
        self._kitty: KittyPainter | None = None
        self._gallery = Gallery()

    def prepare(self) -> None:
        """Find out how this terminal shows pictures."""
        app = self._screen.app
        exact = app.console.color_system == "truecolor" and not app.no_color
        if exact and has_placeholders(os.environ) and not app.is_headless:  # a colour is their number
            self._kitty = KittyPainter(self._send_to_terminal)
            self._gallery = Gallery(KittyPainter.prepare)

    def _send_to_terminal(self, text: str) -> None:
        """In order with what Textual writes."""
        driver = self._screen.app._driver
        if driver is not None and text:
            driver.write(text)

    def close(self) -> None:
        """The chat ends."""
        self._gallery.close()
        if self._kitty is not None:
            self._kitty.close()

    async def examine(self, name: str, file: bytes) -> TurnPicture:
        """What there is to say of a picture that is to be sent; a UserError if it cannot be."""
        return await self._gallery.examined(name, file)

    def cards_of(self, turn: Turn) -> list[Card]:
        """Its pictures, to be shown; those that were never seen come later (`show_thumbnails`)."""
        paint: Paint = self._kitty or in_half_blocks
        cards = []
        for picture in turn.pictures:
            card = Card(picture.words, picture.width, picture.height, paint)
            card.show(self._gallery.known(picture.digest))
            cards.append(card)
        return cards

    def show_thumbnails(self) -> None:
        """Decode what is not shown yet, the newest first."""
        begin_work(self._screen, self._show_thumbnails, group="thumbnails", exclusive=True)

    async def _show_thumbnails(self) -> None:
        transcript = self._screen.query_one(Transcript)
        for entry in reversed(list(transcript.entries)):
            if entry.turn is not None:
                await self._show_those_of(entry, entry.turn, transcript)

    async def _show_those_of(self, entry: TurnLines, turn: Turn, transcript: Transcript) -> None:
        for card, picture in zip(entry.cards, turn.pictures, strict=True):
            if card.is_shown:
                continue
            try:
                found = await self._gallery.thumbnail(picture.digest, self._store.picture(picture.digest))
            except HetrunError as error:
                found = str(error)
            card.show(found)
            if entry in transcript.entries:
                transcript.changed(entry)
