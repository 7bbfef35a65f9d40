"""Pictures that go with messages: read from files, decoded elsewhere, and made small to be shown."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from hetrun.client.events import MOST_PICTURES, PICTURE_MARK, GenerateRequest, ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.queries import Render
from hetrun.errors import HetrunError, UserError
from hetrun.pictures.decoder import PictureDecoder
from hetrun.system.files import open_regular
from hetrun.tui.paths import is_picture
from hetrun.tui.store.tree import Turn, TurnPicture
from hetrun.tui.transcript.thumbnails import Thumbnail, reduced

MOST_THUMBNAILS = 128  # that are kept, each of 190 kB at most
# A text in UTF-8 begins with none of them. BMP's two letters may begin a text: for that the name counts.
MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF87a", b"GIF89a")


class PictureAttachment(NamedTuple):
    """A picture that goes with the next message."""

    what: TurnPicture
    file: bytes


class Gallery:
    """Decodes pictures, one after the other and never on the event loop, and keeps them small."""

    def __init__(self, prepare: Callable[[], object] = lambda: None) -> None:
        """`prepare` imports what drawing takes; it is called on a thread."""
        self._prepare = prepare
        self._decoder: PictureDecoder | None = None
        self._kept: OrderedDict[str, Thumbnail | str] = OrderedDict()  # or why there is none
        self._closed = False

    async def examined(self, name: str, file: bytes) -> TurnPicture:
        """What a picture is; a UserError if it cannot be read."""
        digest = sha256(file).hexdigest()
        found = await self.thumbnail(digest, file)
        if isinstance(found, str):
            raise UserError(f"{name}: {found}")
        return TurnPicture(digest, name, *size_before(file, found.width, found.height), len(file))

    async def thumbnail(self, digest: str, file: bytes) -> Thumbnail | str:
        """A picture made small, or why it cannot be read."""
        if (known := self.known(digest)) is None:
            known = await asyncio.to_thread(self._made, file)
            self._kept[digest] = known
            if len(self._kept) > MOST_THUMBNAILS:
                self._kept.popitem(last=False)
        return known

    def known(self, digest: str) -> Thumbnail | str | None:
        """The same, where it was made already."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def _made(self, file: bytes) -> Thumbnail | str:
        if self._decoder is None:
            self._decoder = PictureDecoder()
        if self._closed:  # meanwhile
            self._decoder.close()
        self._prepare()
        try:
            return reduced(self._decoder.decode(file))
        except HetrunError as error:
            return str(error)

    def close(self) -> None:
        """End the process that decodes."""
        self._closed = True
        if self._decoder is not None:
            self._decoder.close()


def size_before(file: bytes, width: int, height: int) -> tuple[int, int]:
    """A picture's size by the pixels that were decoded of it: large ones are scaled down, some turned."""
    sides = _header(file)
    if sides[0] * sides[1] <= width * height:
        return width, height
    return (max(sides), min(sides)) if width > height else (min(sides), max(sides))


def _header(file: bytes) -> tuple[int, int]:
    """What PNG and JPEG, which photographs are, say of their size; 0 of others."""
    if file.startswith(MAGIC[0]) and len(file) > 24:
        return int.from_bytes(file[16:20]), int.from_bytes(file[20:24])
    at = 2
    while file.startswith(MAGIC[1]) and at + 9 < len(file) and file[at] == 0xFF:
        if 0xC0 <= file[at + 1] <= 0xCF and file[at + 1] not in (0xC4, 0xC8, 0xCC):  # a frame begins
            return int.from_bytes(file[at + 7 : at + 9]), int.from_bytes(file[at + 5 : at + 7])
        at += 2 + int.from_bytes(file[at + 2 : at + 4])
    return 0, 0


def seems_picture(path: Path) -> bool:
    """Whether a file is meant as a picture: by its name, or by how it begins."""
    if is_picture(path):
        return True
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(16).startswith(MAGIC)
    except OSError:
        return False  # it is said when it is read


def check_readable(info: ModelInfo | None, has_begun: bool = False) -> None:
    """A UserError if this model does not read pictures; one that still loads may.

    `has_begun`: earlier messages have pictures.
    """
    if info is None or info.pictures:
        return
    what = f"{info.id} does not read pictures"
    if has_begun:
        raise UserError(
            f"{what}, and this conversation has some: choose a model that does (/model), or begin a new "
            "conversation (Ctrl+N)"
        )
    raise UserError(
        f"{what}: choose a model that does (/model), with its picture encoder (an mmproj file) beside it or "
        "given by --mmproj"
    )


def check_number(path: Sequence[Turn], more: int = 0) -> None:
    """A UserError if a conversation would have too many."""
    n = more + sum(len(turn.pictures) for turn in path)
    if n > MOST_PICTURES:
        raise UserError(
            f"this conversation would have {n} pictures, and up to {MOST_PICTURES} are sent: Ctrl+N begins a "
            "new one"
        )


async def as_text(client: ChatClient, asked: GenerateRequest) -> str:
    """The prompt of a request as text, with a mark for each of its pictures."""
    prompt = await client.ask(Render(asked.messages or ()))
    if asked.pictures and prompt.count(PICTURE_MARK) != len(asked.pictures):
        raise UserError("the prompt of this answer has pictures, and cannot be had as text here")
    return prompt
