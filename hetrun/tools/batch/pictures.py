"""Pictures that a line names by a path: read from the folder of its file, and sent with the request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hetrun.client.pictures import data_url, read_picture
from hetrun.errors import OptionError, PictureError, printable
from hetrun.pictures.kinds import format_of
from hetrun.tools.batch.request_lines import Ask

KINDS = ("image_url", "input_image", "image")  # of parts of messages
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
HOLDERS = ("messages", "input", "content", "output")  # fields that hold parts

Json = Any


def has_pictures(value: Json) -> bool:
    """Whether there are any among these parts."""
    if isinstance(value, list):
        return any(map(has_pictures, value))
    if not isinstance(value, dict):
        return False
    return value.get("type") in KINDS or any(has_pictures(value[name]) for name in HOLDERS if name in value)


def with_pictures(ask: Ask, folder: Path) -> Ask:
    """The request with its pictures in place of their paths; OptionError says what is wrong with one.

    Lines may come from strangers: only what lies in the folder is read.
    """
    found = {name: _changed(ask.body[name], folder) for name in HOLDERS if name in ask.body}
    if all(found[name] is ask.body[name] for name in found):
        return ask
    return replace(ask, body={**ask.body, **found})


def _changed(value: Json, folder: Path) -> Json:
    """The value, which stays the same object if there are no paths in it."""
    if isinstance(value, list):
        parts = [_changed(one, folder) for one in value]
        return value if all(map(_same, parts, value)) else parts
    if not isinstance(value, dict):
        return value
    if value.get("type") in KINDS:
        return _part(value, lambda address: _sent(address, folder))
    inner = {name: _changed(value[name], folder) for name in HOLDERS if name in value}
    return value if all(inner[name] is value[name] for name in inner) else {**value, **inner}


def _same(one: object, other: object) -> bool:
    return one is other


def _part(part: dict[str, Json], sent: Callable[[str], str]) -> dict[str, Json]:
    for name in ("image_url", "image", "url"):
        given = part.get(name)
        if isinstance(given, dict) and isinstance(address := given.get("url"), str):
            return part if (url := sent(address)) == address else {**part, name: {**given, "url": url}}
        if isinstance(given, str):
            return part if (url := sent(given)) == given else {**part, name: url}
    return part


def _sent(address: str, folder: Path) -> str:
    """The address that is sent; any but a path stays as it is."""
    path = address
    if address[:7].lower() == "file://":
        path = unquote(address[7:])
    elif SCHEME.match(address[:32]):
        return address
    where = f"the picture {printable(path[:200])}"
    whole = Path(os.path.realpath(folder / path)) if "\0" not in path else None
    if whole is None or not whole.is_relative_to(folder):
        raise OptionError(f"{where} does not lie in {folder}, the folder of the file")
    file = read_picture(str(whole), where)
    try:
        format_of(file)
    except PictureError as error:
        raise OptionError(f"{where}: {error}") from None
    return data_url(file)
