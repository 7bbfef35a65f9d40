"""JSON of answers. Long ones are made and written in parts, with breaks for other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from time import perf_counter

from starlette.responses import Response

PART = 32  # items at a time; 5 ms of the largest ones, tokens with 20 alternatives each
TURN_S = 0.002  # of writing, before a break for other requests


class LazyList:
    """A list whose items are made when they are written; it can be written once."""

    def __init__(self, *items: Iterable[object]) -> None:
        self._items = chain(*items)

    def parts(self) -> Iterator[list[object]]:
        """A few items at a time."""
        while part := list(islice(self._items, PART)):
            yield part

    def all(self) -> list[object]:
        """As a list."""
        return list(self._items)


def _known(value: object) -> list[object]:
    if isinstance(value, LazyList):
        return value.all()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


def json_text(value: object) -> str:
    """JSON in one line, without blanks."""
    return _ENCODER.encode(value)


# json.dumps makes a new encoder for every call with separators, and there is a call for every token.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_known)


async def long_text(value: object) -> str:
    """The same, made in parts with breaks for other requests."""
    texts, begin = list[str](), perf_counter()
    for text in _texts(value):
        texts.append(text)
        if perf_counter() - begin > TURN_S:
            await asyncio.sleep(0)
            begin = perf_counter()
    return "".join(texts)


async def json_response(value: object) -> Response:
    """A response of this JSON."""
    return Response((await long_text(value)).encode(), media_type="application/json")


def _texts(value: object) -> Iterator[str]:
    """Piece by piece."""
    match value:
        case dict() if value:
            between = "{"
            for name, item in value.items():
                yield f"{between}{json_text(name)}:"
                yield from _texts(item)
                between = ","
            yield "}"
        case LazyList():
            yield "["
            for i, part in enumerate(value.parts()):
                yield f"{',' if i else ''}{json_text(part)[1:-1]}"
            yield "]"
        case list() if len(value) > PART:
            yield from _texts(LazyList(value))
        case list():
            yield "["
            for i, item in enumerate(value):
                yield "," if i else ""
                yield from _texts(item)
            yield "]"
        case _:
            yield json_text(value)
