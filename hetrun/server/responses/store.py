"""Stored responses, which can be retrieved or continued."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetrun.client.events import PICTURE, Message
from hetrun.server.pictures.parts import FILE

MOST_BYTES = 32 * 2**20  # of all stored responses
OVERHEAD = 1024  # of one stored response, and of each turn of a conversation: 64
OF_A_TURN = 64
BASE64 = "base64"  # how a picture is kept


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to it, without instructions.

    Each turn is a list of messages in JSON, so that continued conversations share the bytes of earlier turns.
    """

    owner: str
    body: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Its size, as if nothing were shared."""
        return OVERHEAD + len(self.body) + sum(len(turn) + OF_A_TURN for turn in self.turns)

    def messages(self) -> Iterator[Message]:
        """All messages."""
        for turn in self.turns:
            yield from json.loads(turn, object_hook=_with_file)


def turn(messages: Sequence[Message]) -> bytes:
    """Messages in their stored form."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"), default=_in_base64).encode()


def _in_base64(file: bytes) -> dict[str, str]:
    return {BASE64: base64.b64encode(file).decode()}


def _with_file(value: dict[str, object]) -> object:
    """A picture's part with its file; no field of a client has this name alone."""
    file = value.get(FILE)
    if value.get("type") == PICTURE and isinstance(file, dict) and isinstance(text := file.get(BASE64), str):
        return value | {FILE: base64.b64decode(text)}
    return value


class Archive:
    """The most recently used responses, within a limit of bytes, in this process's memory only.

    Each owner finds only its own responses.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # the most recently used last
        self._bytes = 0

    def keep(self, name: str, kept: StoredResponse) -> None:
        """Store it, and evict the least recently used ones; one larger than the limit is not stored."""
        if kept.size > self._most_bytes:
            return
        self._bytes += kept.size
        self._kept[name] = kept
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, owner: str, name: str) -> StoredResponse | None:
        """The owner's response with this id."""
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            return None
        self._kept.move_to_end(name)
        return kept

    def drop(self, owner: str, name: str) -> bool:
        """Remove it; returns whether it was there."""
        kept = self.find(owner, name)
        if kept is not None:
            del self._kept[name]
            self._bytes -= kept.size
        return kept is not None
