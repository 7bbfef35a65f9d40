"""JSON out of a stranger's file: one object, of bounded size."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hetrun.errors import ModelFileError
from hetrun.loader.formats.bounded_reader import DAMAGED, open_cursor
from hetrun.loader.formats.gguf_file import shown
from hetrun.system.strict_json import fault_in_json

# Settings and templates have some hundred kilobytes, the index of the largest models ten megabytes.
MAX_BYTES = 32 << 20
# A value in JSON takes two bytes and a comma, and in memory a hundred; the largest index has 150,000.
MAX_ITEMS = 1 << 20

# Escapes that are halves of a character, and among all that might be those that have no other half.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_ALONE = re.compile(r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..))")

Make = Callable[[list[tuple[str, Any]]], object]


def read_object(path: str | os.PathLike[str], make: Make | None = None) -> dict[str, object]:
    """The object that a whole file holds; `make` puts each object in it together."""
    try:
        return parse_object(read_bytes(path, MAX_BYTES), make)
    except ValueError as e:
        raise ModelFileError(os.fspath(path), f"is not a JSON object: {fault_in_json(e)}; {DAMAGED}") from e


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    with open_cursor(path, limit) as cursor:
        cursor.where = "the file"
        return cursor.take(cursor.size, "it")


def parse_object(raw: bytes, make: Make | None = None) -> dict[str, object]:
    """The object in these bytes; ValueError says what is wrong with them."""
    if (commas := raw.count(b",")) > MAX_ITEMS:
        raise ValueError(f"it has {commas} commas, hetrun reads up to {MAX_ITEMS}")
    try:
        text = raw.decode("utf-8-sig")
        del raw  # nothing else holds it, and it may be large
        _check_characters(text)
        found = json.loads(text, object_pairs_hook=make)
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found


def _check_characters(text: str) -> None:
    """Refuse what is no text: half of a character, which could not be printed, compared or passed on."""
    for found in _ALONE.finditer(text) if _HALF.search(text) else ():
        if found[1]:
            raise ValueError(f"the {found[1]} at character {found.start(1)} is half of a character")


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object that has no name twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} appears twice")
    return found
