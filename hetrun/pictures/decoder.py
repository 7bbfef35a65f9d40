"""Strangers' pictures as pixels, decoded in a process that may die at any time, or an error that says why."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from hetrun.client.events import MOST_PICTURE_BYTES
from hetrun.errors import PictureError
from hetrun.pictures import limits
from hetrun.pictures.kinds import format_of
from hetrun.pictures.picture import Picture
from hetrun.system import subprocesses
from hetrun.system.run_queue import TimeLimit
from hetrun.system.sandbox.child import Child, ChildGone, computed_too_long
from hetrun.system.sandbox.framing import HEAD
from hetrun.system.sandbox.kept_child import KeptChild
from hetrun.system.terminal_text import visible
from hetrun.system.units import format_bytes

CHILD = "from hetrun.pictures.decoder_main import main; main({pipe})"
MOST_MESSAGE = 4096  # bytes
MOST_REASON = 300  # characters
UNREADABLE = "its process sent an unreadable answer"


class Refusal(NamedTuple):
    """Why the process does not decode a picture."""

    reason: str


class PictureDecoder:
    """Decodes pictures. Any thread may call; one is decoded at a time.

    The process is kept for the next picture, ends when it had none for a while, and is started again.
    """

    def __init__(self) -> None:
        self._kept = KeptChild(DecoderProcess, "a picture was decoded")

    @property
    def pid(self) -> int | None:
        """The process, where one runs."""
        return self._kept.pid

    def decode(self, data: bytes) -> Picture:
        """The picture in a file: PNG, JPEG, WebP, the first frame of GIF, or BMP.

        It is upright as its EXIF says, and what is transparent is white. One of more than 16 Mi pixels is
        scaled down. PictureError says why a file is not decoded.
        """
        if len(data) > MOST_PICTURE_BYTES:
            size, most = format_bytes(len(data)), format_bytes(MOST_PICTURE_BYTES)
            raise PictureError(f"the picture's file has {size}, and up to {most} are read")
        name = format_of(data)
        try:
            answer = self._asked(name, data)
        except DecoderGone as gone:
            raise self._failed(name, str(gone)) from None
        if isinstance(answer, Refusal):
            raise self._failed(name, answer.reason)
        return answer

    def close(self) -> None:
        """End the process, also while it decodes. A fork leaves the process of its parent alone."""
        self._kept.close()

    def __enter__(self) -> PictureDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, name: str, data: bytes) -> Picture | Refusal:
        try:
            return self._kept.ask(lambda process: process.ask(name, data))
        except DecoderGone as gone:
            if not gone.idle:
                raise
        return self._kept.ask(lambda process: process.ask(name, data))  # it ended just when the picture came

    @staticmethod
    def _failed(name: str, reason: str) -> PictureError:
        said = " ".join(visible(reason[:MOST_REASON]).split())
        return PictureError(f"the {'WebP' if name == 'WEBP' else name} picture cannot be read: {said}")


class DecoderGone(ChildGone):
    """The process ended; `idle`: by itself, because it had no picture for a while."""

    def __init__(self, reason: str, idle: bool = False) -> None:
        super().__init__(reason)
        self.idle = idle


class DecoderProcess(Child):
    """One life of the child. After anything but a picture or a reason it must be ended."""

    def __init__(self) -> None:
        super().__init__(CHILD, "pictures", "PIL.Image")
        self._was_asked = False

    def ask(self, name: str, data: bytes) -> Picture | Refusal:
        """The picture, or what is wrong with it."""
        again, self._was_asked = self._was_asked, True
        self.wait_until_ready()
        limit = self.limit(limits.WALL_PER_CPU * (limits.OPEN_S + 2 * limits.seconds(limits.MOST_PIXELS)))
        try:
            self.send(name.encode().ljust(HEAD.size) + HEAD.pack(len(data)), limit)
            self.send(data, limit)
            return self._answer(self.receive(MOST_MESSAGE, limit), limit)
        except TimeoutError:
            raise DecoderGone(limits.FAULTS[limits.NO_TIME]) from None
        except (EOFError, OSError):
            code = self.exit_code()
            raise DecoderGone(_obituary(code), idle=again and code == 0) from None
        except (ValueError, RecursionError):
            raise DecoderGone(UNREADABLE) from None

    def _answer(self, answer: object, limit: TimeLimit) -> Picture | Refusal:
        """What the process says, checked: a picture may have found a way to speak for it."""
        match answer:
            case {"width": int() as width, "height": int() as height} if (
                0 < width <= limits.MOST_SIDE
                and 0 < height <= limits.MOST_SIDE
                and width * height <= limits.MOST_KEPT + width + height  # divided sides are rounded up
            ):
                return Picture.of(width, height, self.read(3 * width * height, limit))
            case {"reason": str() as reason, "over": bool() as over}:
                if over:
                    self.end()
                return Refusal(reason)
        raise ValueError(UNREADABLE)


def _obituary(code: int) -> str:
    if computed_too_long(code):
        code = limits.NO_TIME
    return limits.FAULTS.get(code) or f"its process {subprocesses.ending(code)}"
