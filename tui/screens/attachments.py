"""What goes with a message: text files, and pictures that are typed, dropped or pasted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from textual import on, work

from hetrun.client.pictures import read_picture, type_of
from hetrun.errors import HetrunError, UserError
from hetrun.tui.clipboard import Reader, copied_picture, reader
from hetrun.tui.conversation import attached
from hetrun.tui.paths import dropped, path_of
from hetrun.tui.pictures import Attached, Gallery, check_number, check_readable, seems_picture
from hetrun.tui.screens.dialogs import Ask
from hetrun.tui.screens.navigation import Sights
from hetrun.tui.store.tree import Turn
from hetrun.tui.transcript.thumbnails import Card, KittyPainter, Paint, has_placeholders, in_half_blocks
from hetrun.tui.transcript.turn import Entry
from hetrun.tui.transcript.widget import Transcript
from hetrun.tui.widgets.chips import Chip, Chips
from hetrun.tui.widgets.prompt import Prompt

READING = "one moment: a picture is being read"


class Attachments(Sights):
    """The part of the chat screen that has what goes with the next message, and shows pictures."""

    editing: bool

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}  # that go with the next message, by name
        self.pictures: list[Attached] = []  # that go with it
        self.coming: list[str] = []  # names of those that are being read
        self.kitty: KittyPainter | None = None
        self.gallery = Gallery()
        self._reading = asyncio.Lock()  # one after the other, so that they keep their order

    def prepare_pictures(self) -> None:
        """Find out how this terminal shows them."""
        exact = self.app.console.color_system == "truecolor" and not self.app.no_color
        if exact and has_placeholders(os.environ) and not self.app.is_headless:  # a colour is their number
            self.kitty = KittyPainter(self._send_to_terminal)
            self.gallery = Gallery(KittyPainter.prepare)

    def _send_to_terminal(self, text: str) -> None:
        """In order with what Textual writes."""
        driver = self.app._driver
        if driver is not None and text:
            driver.write(text)

    def close_pictures(self) -> None:
        """The chat ends."""
        self.gallery.close()
        if self.kitty is not None:
            self.kitty.close()

    # --- above the box

    def show_files(self) -> None:
        """What goes with the next message, and whether it replaces one."""
        chips = [Chip("editing an earlier message (Esc cancels)", "")] if self.editing else []
        chips += [
            Chip(name, f"{len(text):,} characters", "file", i)
            for i, (name, text) in enumerate(self.files.items())
        ]
        chips += [Chip(p.what.name, p.what.size, "picture", i) for i, p in enumerate(self.pictures)]
        chips += [Chip(name, "…") for name in self.coming]
        for found in self.query(Chips):  # there are none any more when the app ends
            found.show(chips)

    def action_detach(self, kind: str, number: int) -> None:
        """Take away what goes with the next message."""
        if kind == "file" and number < len(self.files):
            del self.files[list(self.files)[number]]
        elif kind == "picture" and number < len(self.pictures):
            del self.pictures[number]
        self.show_files()

    @on(Prompt.Erasing)
    def _detach_last(self) -> None:
        if self.pictures or self.files:
            kind = "picture" if self.pictures else "file"
            self.action_detach(kind, len(self.pictures or self.files) - 1)

    # --- from files

    @work(group="dialog", exit_on_error=False)
    async def action_attach(self) -> None:
        if name := await self.app.push_screen_wait(Ask("Attach a text file or a picture", "", "PATH")):
            self.attach(name)

    def attach(self, name: str) -> None:
        """A file goes with the next message."""
        path = path_of(name)
        if seems_picture(path):
            check_readable(self.info)
            self._bring([path], f"/attach {name}")
        else:
            found, text = attached(path)
            self.files[found] = text
            self.show_files()

    def stop_reading(self) -> None:
        """Pictures that are still being read are not wanted any more; their message is back in the box."""
        for group in ("pictures", "sending"):
            self.workers.cancel_group(self, group)

    @on(Prompt.Pasted)
    def _pasted(self, message: Prompt.Pasted) -> None:
        """What is dropped on a terminal comes as its path."""
        paths = dropped(message.text)
        with self.telling():
            if paths:
                try:
                    check_readable(self.info)
                except UserError:
                    message.prompt.insert_pasted(message.text)  # first: a new text ends what is said
                    raise
                self._bring(paths)
                return
            message.prompt.insert_pasted(message.text)

    @work(group="pictures", exit_on_error=False)
    async def _bring(self, paths: Sequence[Path], command: str = "") -> None:
        try:
            await self.read_pictures(paths)
        except HetrunError:
            if command:
                self.give_back(command)
            raise

    async def read_pictures(self, paths: Sequence[Path]) -> None:
        """All of them go with the next message, or none; those before are read first."""
        await self._read([(path.name, str(path)) for path in paths])

    async def _read(self, sources: Sequence[tuple[str, str | bytes]]) -> None:
        names = [name for name, _ in sources]
        self.coming += names
        self.show_files()
        try:
            async with self._reading:
                found = []
                for name, source in sources:
                    file = (
                        await asyncio.to_thread(read_picture, source, name)
                        if isinstance(source, str)
                        else source
                    )
                    found.append(Attached(await self.gallery.examined(name, file), file))
                self.pictures += found
        finally:
            for name in names:
                self.coming.remove(name)
            self.show_files()

    # --- from the clipboard

    @on(Prompt.Pasting)
    def _pasting(self, message: Prompt.Pasting) -> None:
        """Ctrl+V: a picture if there is one, else what was copied in the chat."""
        try:
            found = reader()
        except UserError as error:
            if self.app.clipboard:
                message.prompt.paste_text()
            else:
                self.say(str(error), error=True)
            return
        self._paste(found, message.prompt)

    @work(group="pictures", exit_on_error=False)
    async def _paste(self, found: Reader, prompt: Prompt) -> None:
        file = await copied_picture(found)
        if file is None:
            prompt.paste_text()
            return
        check_readable(self.info)
        await self._read([(f"pasted {datetime.now():%H.%M.%S}.{type_of(file).rpartition('/')[2]}", file)])

    # --- in the conversation

    def with_files_of(self, turn: Turn) -> list[Attached]:
        """Its pictures, to be sent again."""
        return [Attached(picture, self.talk.store.picture(picture.digest)) for picture in turn.pictures]

    def still_kept(self, turn: Turn) -> list[Attached]:
        """The same, or nothing if another program has deleted the conversation meanwhile."""
        try:
            return self.with_files_of(turn)
        except HetrunError:
            return []

    def check_pictures(self, end: int | None, more: int = 0) -> None:
        """A UserError if the turns up to this one, and this many more pictures, cannot be sent."""
        path = self.talk.tree.path_to(end)
        if more or any(turn.pictures for turn in path):
            check_readable(self.info, has_begun=not more)
            check_number(path, more)

    def cards_of(self, turn: Turn) -> list[Card]:
        """Its pictures, to be shown; those that were never seen come later (`show_thumbnails`)."""
        paint: Paint = self.kitty or in_half_blocks
        cards = []
        for picture in turn.pictures:
            card = Card(picture.words, picture.width, picture.height, paint)
            card.show(self.gallery.known(picture.digest))
            cards.append(card)
        return cards

    @work(group="thumbnails", exclusive=True, exit_on_error=False)
    async def show_thumbnails(self) -> None:
        """Decode what is not shown yet, the newest first."""
        transcript = self.query_one(Transcript)
        for entry in reversed(list(transcript.entries)):
            if entry.turn is not None:
                await self._show_those_of(entry, entry.turn, transcript)

    async def _show_those_of(self, entry: Entry, turn: Turn, transcript: Transcript) -> None:
        for card, picture in zip(entry.cards, turn.pictures, strict=True):
            if card.is_shown:
                continue
            try:
                found = await self.gallery.thumbnail(picture.digest, self.talk.store.picture(picture.digest))
            except HetrunError as error:
                found = str(error)
            card.show(found)
            if entry in transcript.entries:
                transcript.changed(entry)
