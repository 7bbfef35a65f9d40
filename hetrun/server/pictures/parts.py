"""Content parts with pictures: read from the shapes of each API, and taken out for the engine.

While a request is read, a part carries its picture's file. `taken_out` puts the files beside the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as short
from typing import TypeVar

from hetrun.client.events import MOST_PICTURE_BYTES, MOST_PICTURES, PICTURE, PICTURE_MARK, Message, ModelInfo
from hetrun.client.pictures import DATA_URL, from_base64 as decoded, from_data_url
from hetrun.errors import PictureError
from hetrun.pictures.kinds import format_of
from hetrun.server.errors import ApiError, wrong_type
from hetrun.system.units import counted, format_bytes

FILE, WHERE = "file", "where"  # of a part, while the request is read
DETAILS = ("auto", "low", "high", "original", None)
HOW = "give the picture itself, as data:image/png;base64,..."

Decoded = TypeVar("Decoded", bytes, bytes | None)
# Pictures that the server has got from addresses in a request: a file, or why there is none.
Loaded = Mapping[str, bytes | str]
Part = dict[str, object]


def part_of(part: Mapping[str, object], where: str, loaded: Loaded) -> Part:
    """A picture in a part of one of these types."""
    kind = str(part.get("type"))
    field, url = _address(part, kind, where)
    return from_url(url, field, loaded)


def url_of(part: Mapping[str, object]) -> str | None:
    """The address in a part, if it has one."""
    try:
        return _address(part, str(part.get("type")), "")[1]
    except ApiError:
        return None


def _address(part: Mapping[str, object], kind: str, where: str) -> tuple[str, str]:
    """The field with the picture, and its text."""
    name = "image_url" if kind != "image" or "image_url" in part else "image" if "image" in part else "url"
    given, field = part.get(name), f"{where}.{name}"
    if given is None and part.get("file_id"):
        message = f"{where}.file_id: this server keeps no files; {HOW}"
        raise ApiError(message, f"{where}.file_id", "unsupported_parameter")
    if isinstance(given, dict):
        _check_detail(given, field)
        given, field = given.get("url"), f"{field}.url"
    else:
        _check_detail(part, where)
    if given is None:
        raise ApiError(f"{field} is missing", field, "missing_required_parameter")
    if not isinstance(given, str):
        raise wrong_type(field, "a string", given)
    return field, given


def _check_detail(values: Mapping[str, object], where: str) -> None:
    """It has no effect: each model has sizes of its own."""
    detail = values.get("detail")
    if detail not in DETAILS:
        message = f"{where}.detail must be auto, low or high, not {short(detail)}"
        raise ApiError(message, f"{where}.detail", "invalid_value")


def from_url(url: str, where: str, loaded: Loaded) -> Part:
    """The picture at an address: within a data URL, or one that the server has got."""
    found = _decoded(url, where, from_data_url) if DATA_URL.match(url) else loaded.get(url)
    if isinstance(found, bytes):
        return picture(found, where)
    said = found or f"this server reads no such address; {HOW}"
    raise ApiError(f"{where}: {said}", where, "invalid_image_url")


def from_base64(text: object, where: str) -> Part:
    """A picture in base64; as a data URL, too, since clients mix them up."""
    if not isinstance(text, str):
        raise wrong_type(where, "a string in base64", text)
    if DATA_URL.match(text):
        return from_url(text, where, {})
    return picture(_decoded(text, where, decoded), where)


def _decoded(text: str, where: str, decode: Callable[[str], Decoded]) -> Decoded:
    if len(text) > 2 * MOST_PICTURE_BYTES:  # so that nothing of this length is copied
        raise _too_large(where)
    try:
        return decode(text)
    except ValueError:
        raise ApiError(f"{where} is not valid base64", where, "invalid_base64") from None


def picture(file: bytes, where: str) -> Part:
    """A part with this file, if it can be a picture."""
    if len(file) > MOST_PICTURE_BYTES:
        raise _too_large(where)
    try:
        format_of(file)
    except PictureError as error:
        raise ApiError(f"{where}: {error}", where, "invalid_image") from None
    return {"type": PICTURE, FILE: file, WHERE: where}


def _too_large(where: str) -> ApiError:
    message = f"{where}: a picture may have {format_bytes(MOST_PICTURE_BYTES)}"
    return ApiError(message, where, "image_too_large")


def content_of(parts: Sequence[str | Part], between: str) -> str | list[Part]:
    """The content of a message: its texts in one, or a list of parts where there are pictures."""
    if all(isinstance(part, str) for part in parts):
        return between.join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def texts_of(content: object) -> str:
    """The texts of a content, without its pictures."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")


def taken_out(messages: Iterable[Message], info: ModelInfo) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    """The messages with places for pictures, and the pictures; ApiError if the model takes none."""
    files: list[bytes] = []
    said = tuple(_without_files(message, files, info) for message in messages)
    return said, tuple(files)


def _without_files(message: Message, files: list[bytes], info: ModelInfo) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(FILE in part for part in content):
        return message
    parts = []
    for part in content:
        if isinstance(file := part.get(FILE), bytes):
            check(info, len(files) + 1, str(part.get(WHERE)))
            files.append(file)
            part = {"type": PICTURE}
        parts.append(part)
    return {**message, "content": parts}


def marked(text: str, given: object, where: str, info: ModelInfo) -> tuple[bytes, ...]:
    """The pictures of a text that has a mark for each: llama.cpp's multimodal_data."""
    field = f"{where}.multimodal_data"
    if not isinstance(given, list):
        raise wrong_type(field, "a list of strings in base64", given)
    parts = [from_base64(one, f"{field}[{i}]") for i, one in enumerate(given)]
    (_,), files = taken_out([{"content": parts}], info)
    if files and (marks := text.count(PICTURE_MARK)) != len(files):
        message = (
            f"{where}.prompt_string has {PICTURE_MARK} {counted(marks, 'time')}, and multimodal_data has "
            f"{counted(len(files), 'picture')}: each needs its place"
        )
        raise ApiError(message, f"{where}.prompt_string", "invalid_value")
    return files


def without_mark(text: str, where: str, pictures: Sequence[bytes]) -> str:
    """A text to which marks of pictures are added; it must have none of its own."""
    if pictures and PICTURE_MARK in text:
        message = (
            f"{where} has {PICTURE_MARK}, which stands for a picture, and places for pictures of its own"
        )
        raise ApiError(message, where, "invalid_value")
    return text


def check(info: ModelInfo, count: int, where: str) -> None:
    """Refuse pictures that the model does not read, or too many."""
    if not info.pictures:
        message = (
            f"{where}: {info.id} reads text only here; for pictures, serve a model that reads them, with its "
            "encoder (the mmproj file) beside it or named with --mmproj FILE"
        )
        raise ApiError(message, where, "unsupported_parameter")
    if count > MOST_PICTURES:
        raise ApiError(
            f"{where}: a request may have {MOST_PICTURES} pictures", where, "array_above_max_length"
        )
