"""The next message: what goes with it, and whether it takes the place of an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from textual.screen import Screen

from hetrun.client.events import Message
from hetrun.client.pictures import read_picture, type_of
from hetrun.errors import HetrunError, UserError
from hetrun.tui.clipboard import ClipboardReader, copied_picture, reader
from hetrun.tui.conversation import Talk, attached, with_files, with_pictures
from hetrun.tui.notices import ChatNotices
from hetrun.tui.paths import dropped, path_of
from hetrun.tui.pictures import PictureAttachment, check_number, check_readable, seems_picture
from hetrun.tui.screens.dialogs import TextDialog
from hetrun.tui.screens.engine_control import EngineControl
from hetrun.tui.screens.picture_cards import PictureCards
from hetrun.tui.store.tree import Turn
from hetrun.tui.widgets.chips import Chip, Chips
from hetrun.tui.widgets.prompt import Prompt
from hetrun.tui.workers import begin_work

READING = "one moment: a picture is being read"


class MessageDraft:
    """Files and pictures of the next message, and the turn it follows."""

    def __init__(
        self,
        screen: Screen[None],
        talk: Talk,
        engine: EngineControl,
        notices: ChatNotices,
        *,
        cards: PictureCards,
    ) -> None:
        self.files: dict[str, str] = {}  # that go with the next message, by name
        self.pictures: list[PictureAttachment] = []  # that go with it
        self.coming: list[str] = []  # names of those that are being read
        self.editing = False  # the next message takes the place of an earlier one
        self._parent_of_next: int | None = None  # where it goes then
        self._screen = screen
        self._talk = talk
        self._engine = engine
        self._notices = notices
        self._cards = cards
        self._reading = asyncio.Lock()  # one after the other, so that they keep their order

    # --- its place

    @property
    def parent(self) -> int | None:
        """The turn that the next message follows."""
        return self._parent_of_next if self.editing else self._talk.tree.leaf

    def edit(self, turn: Turn) -> None:
        """The next message takes the place of this one, whose text and pictures it begins with."""
        self.editing, self._parent_of_next = True, turn.parent
        prompt = self._screen.query_one(Prompt)
        prompt.put(turn.text)
        self.pictures = self.with_files_of(turn)
        self._screen.set_focus(prompt)
        self.show()
        self._screen.refresh_bindings()

    def stop_editing(self) -> None:
        """The next message is a new one; pictures of the one that was edited stay with that."""
        if self.editing:
            self.pictures.clear()
        self.editing = False
        self.show()

    def cancel(self) -> None:
        """The earlier message stays as it is."""
        self.stop_editing()
        self._screen.query_one(Prompt).clear()
        self._screen.refresh_bindings()

    def keep(self, text: str, parent: int | None) -> Turn:
        """The message as a turn of the conversation; the next one is empty."""
        turn = self._talk.say(with_files(text, self.files), parent, self.pictures)
        self.editing = False
        self.files.clear()
        self.pictures.clear()
        self.show()
        return turn

    def next_prompt(self) -> tuple[str, tuple[Message, ...]]:
        """What Enter would send now, or else what the last answer was an answer to."""
        draft, talk = self._screen.query_one(Prompt).text.strip(), self._talk
        if draft and not draft.startswith("/"):
            content = with_pictures(with_files(draft, self.files), len(self.pictures))
            said: Message = {"role": "user", "content": content}
            return "The prompt that Enter would send", (*talk.messages(self.parent), said)
        asked = next((turn.id for turn in reversed(talk.tree.path) if turn.role == "user"), None)
        if asked is not None:
            return "The prompt of the last answer", talk.messages(asked)
        example: Message = {"role": "user", "content": "(your message)"}
        return "The prompt of a first message", (*talk.messages(None), example)

    # --- above the box

    def show(self) -> None:
        """What goes with the next message, and whether it replaces one."""
        chips = [Chip("editing an earlier message (Esc cancels)", "")] if self.editing else []
        chips += [
            Chip(name, f"{len(text):,} characters", "file", i)
            for i, (name, text) in enumerate(self.files.items())
        ]
        chips += [Chip(p.what.name, p.what.size, "picture", i) for i, p in enumerate(self.pictures)]
        chips += [Chip(name, "…") for name in self.coming]
        for found in self._screen.query(Chips):  # there are none any more when the app ends
            found.show(chips)

    def detach(self, kind: str, number: int) -> None:
        """Take away what goes with the next message."""
        if kind == "file" and number < len(self.files):
            del self.files[list(self.files)[number]]
        elif kind == "picture" and number < len(self.pictures):
            del self.pictures[number]
        self.show()

    def detach_last(self) -> None:
        """Take away what was attached last."""
        if self.pictures or self.files:
            kind = "picture" if self.pictures else "file"
            self.detach(kind, len(self.pictures or self.files) - 1)

    # --- from files

    def ask_for_file(self) -> None:
        """A file whose name the user is asked for goes with the next message."""
        begin_work(self._screen, self._ask_for_file, group="dialog")

    async def _ask_for_file(self) -> None:
        if name := await self._screen.app.push_screen_wait(
            TextDialog("Attach a text file or a picture", "", "PATH")
        ):
            self.attach(name)

    def attach(self, name: str) -> None:
        """A file goes with the next message."""
        path = path_of(name)
        if seems_picture(path):
            check_readable(self._engine.info)
            self._begin_reading([path], f"/attach {name}")
        else:
            found, text = attached(path)
            self.files[found] = text
            self.show()

    def stop_reading(self) -> None:
        """Pictures that are still being read are not wanted any more; their message is back in the box."""
        for group in ("pictures", "sending"):
            self._screen.workers.cancel_group(self._screen, group)

    def take_pasted(self, message: Prompt.Pasted) -> None:
        """What is dropped on a terminal comes as its path."""
        paths = dropped(message.text)
        with self._notices.telling():
            if paths:
                try:
                    check_readable(self._engine.info)
                except UserError:
                    message.prompt.insert_pasted(message.text)  # first: a new text ends what is said
                    raise
                self._begin_reading(paths)
                return
            message.prompt.insert_pasted(message.text)

    def _begin_reading(self, paths: Sequence[Path], command: str = "") -> None:
        bring = partial(self._bring, paths, command)
        begin_work(self._screen, bring, group="pictures")

    async def _bring(self, paths: Sequence[Path], command: str) -> None:
        try:
            await self.read_pictures(paths)
        except HetrunError:
            if command:
                self._notices.give_back(command)
            raise

    async def read_pictures(self, paths: Sequence[Path]) -> None:
        """All of them go with the next message, or none; those before are read first."""
        await self._read([(path.name, str(path)) for path in paths])

    async def _read(self, sources: Sequence[tuple[str, str | bytes]]) -> None:
        names = [name for name, _ in sources]
        self.coming += names
        self.show()
        try:
            async with self._reading:
                found = []
                for name, source in sources:
                    file = (
                        await asyncio.to_thread(read_picture, source, name)
                        if isinstance(source, str)
                        else source
                    )
                    found.append(PictureAttachment(await self._cards.examine(name, file), file))
                self.pictures += found
        finally:
            for name in names:
                self.coming.remove(name)
            self.show()

    # --- from the clipboard

    def paste_copied(self, message: Prompt.Pasting) -> None:
        """Ctrl+V: a picture if there is one, else what was copied in the chat."""
        try:
            found = reader()
        except UserError as error:
            if self._screen.app.clipboard:
                message.prompt.paste_text()
            else:
                self._notices.say(str(error), error=True)
            return
        paste = partial(self._paste, found, message.prompt)
        begin_work(self._screen, paste, group="pictures")

    async def _paste(self, found: ClipboardReader, prompt: Prompt) -> None:
        file = await copied_picture(found)
        if file is None:
            prompt.paste_text()
            return
        check_readable(self._engine.info)
        await self._read([(f"pasted {datetime.now():%H.%M.%S}.{type_of(file).rpartition('/')[2]}", file)])

    # --- in the conversation

    def with_files_of(self, turn: Turn) -> list[PictureAttachment]:
        """Its pictures, to be sent again."""
        return [
            PictureAttachment(picture, self._talk.store.picture(picture.digest)) for picture in turn.pictures
        ]

    def still_kept(self, turn: Turn) -> list[PictureAttachment]:
        """The same, or nothing if another program has deleted the conversation meanwhile."""
        try:
            return self.with_files_of(turn)
        except HetrunError:
            return []

    def check_pictures(self, end: int | None, more: int = 0) -> None:
        """A UserError if the turns up to this one, and this many more pictures, cannot be sent."""
        path = self._talk.tree.path_to(end)
        if more or any(turn.pictures for turn in path):
            check_readable(self._engine.info, has_begun=not more)
            check_number(path, more)
