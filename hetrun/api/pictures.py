"""Pictures in Python: paths, bytes, Pillow's images and data URLs become files beside the messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from hetrun.client.events import PICTURE, PICTURE_MARK, ModelInfo
from hetrun.client.pictures import PART_TYPES, bounded, check_reads, from_data_url, read_picture
from hetrun.errors import OptionError, PictureError
from hetrun.pictures.kinds import format_of

if TYPE_CHECKING:
    from PIL.Image import Image

PictureSource: TypeAlias = "str | PathLike[str] | bytes | Image"


def picture_file(source: object, where: str) -> bytes:
    """The file of a picture; OptionError says what is wrong. `where` names it in messages."""
    match source:
        case bytes() | bytearray() | memoryview():
            file = bounded(bytes(source), where)
        case str() if source[:5].lower() == "data:":
            file = bounded(_of_data_url(source, where), where)
        case str() if source.partition("://")[0].lower() in ("http", "https"):
            raise OptionError(f"{where} is an address: download the picture, and give its path or its bytes")
        case str() if source[:7].lower() == "file://":
            file = read_picture(unquote(source[7:]), where)
        case str() | PathLike():
            file = read_picture(os.path.expanduser(os.fspath(source)), f"{where} ({os.fspath(source)})")
        case _:
            file = bounded(_of_pillow(source, where), where)
    try:
        format_of(file)
    except PictureError as error:
        raise OptionError(f"{where}: {error}") from None
    return file


def _of_data_url(url: str, where: str) -> bytes:
    try:
        file = from_data_url(url)
    except ValueError:
        raise OptionError(f"{where} is not valid base64") from None
    if file is None:
        raise OptionError(f"{where} is no data URL: it has no comma")
    return file


def _of_pillow(source: object, where: str) -> bytes:
    """An image of Pillow as PNG; a caller that has one has imported it."""
    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(source, pillow.Image):
        raise OptionError(f"{where} must be a path, bytes or an image of Pillow, not {type(source).__name__}")
    from io import BytesIO

    image: Any = source
    file = BytesIO()
    exif = image.getexif()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


def without_pictures(messages: Any) -> tuple[Any, tuple[bytes, ...]]:  # noqa: ANN401 - not checked yet
    """The messages with places for their pictures, and the pictures."""
    files: list[bytes] = []
    if not isinstance(messages, list | tuple):
        return messages, ()
    return [_without_pictures(message, f"messages[{i}]", files) for i, message in enumerate(messages)], tuple(
        files
    )


def _without_pictures(message: Any, where: str, files: list[bytes]) -> Any:  # noqa: ANN401
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(_is_picture, content)):
        return message
    parts = [_part(part, f"{where}.content[{i}]", files) for i, part in enumerate(content)]
    return {**message, "content": parts}


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def _part(part: Any, where: str, files: list[bytes]) -> Any:  # noqa: ANN401 - as a message has it
    if not _is_picture(part):
        return part
    name = "image" if part["type"] == "image" and "image" in part else "image_url"
    source = part.get(name)
    if isinstance(source, Mapping):  # {"url": ...}
        source = source.get("url")
    if source is None:
        raise OptionError(f"{where}.{name} is missing")
    files.append(picture_file(source, f"{where}.{name}"))
    return {"type": PICTURE}


def marked_prompt(
    prompt: object, sources: Sequence[object], info: ModelInfo
) -> tuple[str, tuple[bytes, ...]]:
    """A text that has a mark for each picture, before it where it has none, and the pictures."""
    if isinstance(sources, str | bytes | PathLike) or not isinstance(sources, Sequence):
        raise OptionError("pictures is a list of paths, bytes or images of Pillow")
    files = tuple(picture_file(source, f"pictures[{i}]") for i, source in enumerate(sources))
    check_reads(info, files)
    if not isinstance(prompt, str):
        raise OptionError("pictures belong to a prompt that is one text")
    marks = prompt.count(PICTURE_MARK)
    if not marks:
        prompt, marks = PICTURE_MARK * len(files) + prompt, len(files)
    if marks != len(files):
        raise OptionError(f"the prompt has {PICTURE_MARK} {marks} times, and there are {len(files)} pictures")
    return prompt, files
