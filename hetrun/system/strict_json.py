"""JSON of others: read within a limit, and only what the standard has, not what Python takes beyond it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, Callable
from typing import NoReturn

# JSON can spell half of a surrogate pair, which is no text and cannot be encoded again.
MOST_WORDS = 200  # letters of what Python says of other errors
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def join_bounded(parts: AsyncIterable[bytes], most: int, too_large: Callable[[], Exception]) -> bytes:
    """All parts together; `too_large` makes the error for more than `most` bytes."""
    joined = bytearray()
    async for part in parts:
        joined += part
        if len(joined) > most:
            raise too_large()
    return bytes(joined)


def parsed(raw: bytes) -> object:
    """The value. UnicodeError: it is no text, or has half a character; RecursionError: it is nested too
    deeply; another ValueError: it is not JSON."""
    value = json.loads(raw, parse_constant=_refuse_constant)
    if SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def fault_in_json(error: Exception) -> str:
    """Why a text is not JSON, with the place as editors count it."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)[:MOST_WORDS]
    what = error.msg[:1].lower() + error.msg[1:]
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{what} at {line}character {error.colno}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
