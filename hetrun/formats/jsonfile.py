"""JSON out of a stranger's file: one object, of bounded size."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from hetrun.errors import ModelFileError
from hetrun.formats.cursor import DAMAGED, open_cursor
from hetrun.formats.gguf_values import shown

# Settings and templates have some hundred kilobytes, the index of the largest models ten megabytes.
MAX_BYTES = 64 << 20
# A value in JSON takes two bytes and a comma, and in memory a hundred; the largest index has 150,000.
MAX_ITEMS = 1 << 20


def read_object(path: str | os.PathLike[str], unique: bool = False) -> dict[str, object]:
    """The object that a whole file holds; `unique` refuses names that are there twice."""
    raw = read_bytes(path, MAX_BYTES)
    try:
        return parse_object(raw, unique)
    except ValueError as e:
        raise ModelFileError(os.fspath(path), f"is not a JSON object: {e}; {DAMAGED}") from e


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """A whole file of at most `limit` bytes."""
    with open_cursor(path, limit) as cursor:
        cursor.where = "the file"
        return cursor.take(cursor.size, "it")


def parse_object(raw: bytes, unique: bool = False) -> dict[str, object]:
    """The object in these bytes; ValueError says what is wrong with them."""
    if (commas := raw.count(b",")) > MAX_ITEMS:
        raise ValueError(f"it has {commas} commas, hetrun reads up to {MAX_ITEMS}")
    try:
        found = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once if unique else None)
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found
