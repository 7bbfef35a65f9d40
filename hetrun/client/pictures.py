"""Pictures of a request on their way to a running server: files in base64, in the parts where they belong."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from hetrun.client.events import MOST_PICTURE_BYTES, PICTURE, GenerateRequest, Message, ModelInfo
from hetrun.errors import OptionError, printable
from hetrun.system.files import open_regular
from hetrun.system.units import format_bytes

# Types of parts of messages that are pictures: those of OpenAI's two APIs, and that of templates.
PART_TYPES = ("image_url", "input_image", "image")
DATA_URL = re.compile(r"data:(?P<type>[^,]{0,200}?)(?P<base64>;\s*base64)?,", re.IGNORECASE)
BLANK = re.compile(r"\s+")
# By their first bytes.
TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
UNKNOWN = "application/octet-stream"


def in_base64(file: bytes) -> str:
    """A file as JSON can carry it."""
    return base64.b64encode(file).decode()


def from_base64(text: str) -> bytes:
    """A file in base64, which may have blanks and lack padding; ValueError if it is not base64."""
    text = BLANK.sub("", text).rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def from_data_url(url: str) -> bytes | None:
    """The file that an address holds, None if it holds none; ValueError if that is not base64."""
    match = DATA_URL.match(url)
    if match is None:
        return None
    data = url[match.end() :]
    return from_base64(data) if match["base64"] else unquote_to_bytes(data)


def type_of(file: bytes) -> str:
    """A file's media type, as far as its first bytes say it."""
    return next((found for magic, found in TYPES.items() if file.startswith(magic)), UNKNOWN)


def data_url(file: bytes) -> str:
    """A file as an address that holds it."""
    return f"data:{type_of(file)};base64,{in_base64(file)}"


def openai_messages(request: GenerateRequest) -> list[dict[str, Any]]:
    """The messages with their pictures, as OpenAI has them."""

    def part(file: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(file)}}

    return [dict(message) | more for message, more in _with_parts(request, part)]


def anthropic_content(message: Message, files: Iterator[bytes]) -> list[dict[str, Any]]:
    """The content of a message with pictures in blocks, as Anthropic has it."""
    found: list[dict[str, Any]] = []
    for part in _parts(message):
        if part.get("type") == PICTURE:
            file = next(files)
            source = {"type": "base64", "media_type": type_of(file), "data": in_base64(file)}
            found.append({"type": "image", "source": source})
        elif part.get("text"):
            found.append({"type": "text", "text": part["text"]})
    return found


def pictures_of(message: Message, files: Iterator[bytes]) -> list[bytes]:
    """The pictures of a message; the others' are left."""
    return [next(files) for part in _parts(message) if part.get("type") == PICTURE]


def read_picture(path: str, where: str) -> bytes:
    """A picture's file; OptionError says why it is not read. `where` names it in messages."""
    try:
        with open(open_regular(path), "rb") as file:
            return bounded(file.read(MOST_PICTURE_BYTES + 1), where)
    except OSError as error:
        raise OptionError(f"{where} cannot be read: {error.strerror}") from None


def bounded(file: bytes, where: str) -> bytes:
    """A picture's file, if it is not too large."""
    if len(file) > MOST_PICTURE_BYTES:
        raise OptionError(
            f"{where} is larger than {format_bytes(MOST_PICTURE_BYTES)}; make the picture smaller"
        )
    return file


def check_reads(info: ModelInfo, pictures: Sequence[bytes]) -> None:
    """OptionError if there are pictures and the model reads none."""
    if pictures and not info.pictures:
        raise OptionError(
            f"{printable(info.id)} reads text only here: for pictures take a model that reads them, with its "
            "encoder (the mmproj file) beside it or named with --mmproj FILE"
        )


def _with_parts(request: GenerateRequest, part: Any) -> Iterator[tuple[Message, dict[str, Any]]]:  # noqa: ANN401
    files = iter(request.pictures)
    for message in request.messages or ():
        content = message.get("content")
        if not isinstance(content, list | tuple):
            yield message, {}
            continue
        yield message, {"content": [part(next(files)) if p.get("type") == PICTURE else p for p in content]}


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()
