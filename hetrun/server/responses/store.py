"""Responses that may be asked for again, or be gone on from."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetrun.client.events import Message

MOST_BYTES = 32 * 2**20  # of all that are kept
OVERHEAD = 1024  # of one that is kept, and of each turn of a conversation: 64
OF_A_TURN = 64


@dataclass(frozen=True)
class Kept:
    """A response as it was answered, and the conversation up to it, without instructions.

    Each turn is a list of messages in JSON: conversations that go on share the bytes of their beginnings.
    """

    owner: str
    body: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """What it counts for, as if nothing were shared."""
        return OVERHEAD + len(self.body) + sum(len(turn) + OF_A_TURN for turn in self.turns)

    def messages(self) -> Iterator[Message]:
        """All that was said."""
        for turn in self.turns:
            yield from json.loads(turn)


def turn(messages: Sequence[Message]) -> bytes:
    """Messages as they are kept."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()


class Archive:
    """The responses that were used last, within so many bytes, in the memory of this process only.

    Nobody finds those of another owner.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # those used last come last
        self._bytes = 0

    def keep(self, name: str, kept: Kept) -> None:
        """Keep it, and give up what was not used for longest; what is larger than all of that is not kept."""
        if kept.size > self._most_bytes:
            return
        self._bytes += kept.size
        self._kept[name] = kept
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, owner: str, name: str) -> Kept | None:
        """The owner's response of this name."""
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            return None
        self._kept.move_to_end(name)
        return kept

    def drop(self, owner: str, name: str) -> bool:
        """Forget it; whether it was there."""
        kept = self.find(owner, name)
        if kept is not None:
            del self._kept[name]
            self._bytes -= kept.size
        return kept is not None
