"""Texts that were recently cut into tokens: one that begins like them is cut only from where it differs.

Prompts go on where others ended: a conversation, a document with another question. To cut ten thousand
characters takes milliseconds, as long as it takes to compute a token or two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEAST = 1 << 10  # bytes of a text that are worth it
MOST = 4 << 20  # bytes of all texts; their tokens take up to four times as much
KEPT = 16  # texts
BACK = 256  # tokens before the first difference that are looked at


@dataclass(frozen=True, slots=True)
class _Text:
    raw: bytes
    tokens: npt.NDArray[np.int32]


class RecentTexts:
    """For vocabularies that end a token before each space between two letters, whatever follows."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._texts: deque[_Text] = deque()
        self._nbytes = 0

    def beginning(self, raw: bytes) -> tuple[list[int], int]:
        """The first tokens of a text, as far as another one says, and how many bytes they stand for."""
        same, text = max(
            ((_alike(raw, t.raw), t) for t in self._texts), key=lambda p: p[0], default=(0, None)
        )
        if text is None or same < LEAST:
            return [], 0
        n, at = self._cut(text, same)
        return text.tokens[:n].tolist(), at

    def add(self, raw: bytes, tokens: Sequence[int]) -> None:
        """Remember a text; those of longest ago are forgotten."""
        if not LEAST <= len(raw) <= MOST or any(raw == t.raw for t in self._texts):
            return
        self._texts.appendleft(_Text(raw, np.array(tokens, np.int32)))
        self._nbytes += len(raw)
        while len(self._texts) > KEPT or self._nbytes > MOST:
            self._nbytes -= len(self._texts.pop().raw)

    def _cut(self, text: _Text, same: int) -> tuple[int, int]:
        """The last token that ends between two words of the first `same` bytes, and where; or zeros.

        From behind, as texts mostly differ near their ends. What is in front of a text does not matter so.
        """
        tokens, at = text.tokens.tolist(), len(text.raw)
        pieces: list[bytes] = []  # the last one first
        while at > same and len(pieces) < len(tokens):
            pieces.append(self._piece(tokens[-1 - len(pieces)]))
            at -= len(pieces[-1])
        for _ in range(min(BACK, len(tokens) - len(pieces))):
            if at > 0 and _between_words(text.raw[at - 1 : min(at + 2, same)]):
                spelled = b"".join(reversed(pieces)) == text.raw[at:]
                return (len(tokens) - len(pieces), at) if spelled else (0, 0)
            pieces.append(self._piece(tokens[-1 - len(pieces)]))
            at -= len(pieces[-1])
        return 0, 0


def _between_words(around: bytes) -> bool:
    """A letter, and behind it a space and another letter."""
    return len(around) == 3 and around[1:2] == b" " and around[:1].isalpha() and around[2:].isalpha()


def _alike(a: bytes, b: bytes) -> int:
    """How many bytes at the beginning are the same; 0 for less than is worth it."""
    if a[:LEAST] != b[:LEAST]:
        return 0
    most = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, most) != np.frombuffer(b, np.uint8, most)
    return int(differ.argmax()) if differ.any() else most
