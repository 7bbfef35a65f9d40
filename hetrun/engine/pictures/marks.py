"""Pictures in prompts: the mark that stands for one in a text, and the tokens that stand for its rows.

A row of a picture has no token. What is made of the picture's digest stands in its place: negative numbers,
which no vocabulary has, so that the prefix cache and its files know a picture by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from secrets import token_hex
from typing import NamedTuple

import numpy as np

from hetrun.backend import Ints
from hetrun.backend.picture_encoder import Piece, PromptRows
from hetrun.client.events import PICTURE, PICTURE_MARK, Message
from hetrun.errors import OptionError

TOKEN_BYTES = 4


def new_mark() -> str:
    """A mark that no text can contain: it is random and cannot be foreseen."""
    return f"__media_{token_hex(16)}__"  # no template escapes any of it


def marked(messages: Sequence[Message], mark: str) -> tuple[Message, ...]:
    """The messages with the mark in the place of each picture."""
    return tuple(_marked(message, mark) for message in messages)


def _marked(message: Message, mark: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(_is_picture(part) for part in content):
        return message
    parts = [{"type": "text", "text": mark} if _is_picture(part) else part for part in content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return {**message, "content": parts}  # what is wrong with the others is said where they are read
    return {**message, "content": _joined([str(text) for text in texts], mark)}


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == PICTURE


def _joined(texts: Sequence[str], mark: str) -> str:
    """Texts as llama.cpp joins them: on lines of their own, but for those next to a picture."""
    found = ""
    for i, text in enumerate(texts):
        beside = text == mark or (i > 0 and texts[i - 1] == mark)
        found += text if beside or not found else f"\n{text}"
    return found


def parts_of(text: str, mark: str, pictures: int) -> list[str]:
    """The text before, between and after its pictures."""
    found = text.split(mark or PICTURE_MARK)
    if len(found) != pictures + 1:
        raise OptionError(
            f"the chat template writes {len(found) - 1} of {pictures} pictures: it does not know messages "
            "with pictures in these places; use another with --chat-template FILE"
        )
    return found


class LaidPicture(NamedTuple):
    """A picture as it was laid out: what stands for it in a prompt. Its rows have no `key`."""

    name: bytes  # of the picture and what encodes it: equal for equal rows
    pieces: tuple[Piece, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that it takes."""
        return sum(p.count if isinstance(p, PromptRows) else len(p.tokens) for p in self.pieces)


def part_name(seen: LaidPicture, number: int) -> bytes:
    """The name of one of its parts' rows."""
    return seen.name + number.to_bytes(4, "little")


def pseudo_tokens(name: bytes, count: int) -> list[int]:
    """What stands for the rows of a part of a picture: negative, and as good as never the same for others."""
    raw = np.frombuffer(shake_256(name).digest(TOKEN_BYTES * count), "<u4")
    numbers: list[int] = (-1 - (raw & 0x7FFFFFFF).astype(np.int64)).tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a picture, or of a part of it, in a prompt."""

    start: int  # the number of its first token
    place: int  # the position in time at which it begins
    rows: PromptRows
    name: bytes
    picture: int  # its number in the request
    part: int  # its number among the picture's pieces

    @property
    def end(self) -> int:
        """The number of the first token after it."""
        return self.start + self.rows.count

    @property
    def shift(self) -> int:
        """How much further the places of tokens after it are than their numbers."""
        return self.place + self.rows.advance - self.end


class PicturePrompt(NamedTuple):
    """The tokens of a prompt, and where there are pictures among them."""

    tokens: list[int]
    spans: tuple[Span, ...] = ()


def with_pictures(texts: Sequence[Sequence[int]], pictures: Sequence[LaidPicture]) -> PicturePrompt:
    """Tokens of texts, and between each two of them a picture."""
    tokens, spans, shift = list(texts[0]), list[Span](), 0
    for number, (seen, text) in enumerate(zip(pictures, texts[1:], strict=True)):
        for part, piece in enumerate(seen.pieces):
            if not isinstance(piece, PromptRows):
                tokens += piece.tokens
                continue
            name = part_name(seen, part)
            span = Span(len(tokens), len(tokens) + shift, piece, name, number, part)
            spans.append(span)
            shift = span.shift
            tokens += pseudo_tokens(name, piece.count)
        tokens += text
    return PicturePrompt(tokens, tuple(spans))


def places_between(spans: Sequence[Span], a: int, b: int) -> Ints | None:
    """The positions in time, height and width of the tokens a to b, none of which is in a picture beside one
    that is not; None: as in a text."""
    before = [span for span in spans if span.start <= a]
    if not before:
        return None
    last = before[-1]
    if a < last.end:
        return last.place + last.rows.places[a - last.start : b - last.start]
    return np.repeat(np.arange(a, b)[:, None] + last.shift, 3, 1)


def span_at(spans: Sequence[Span], at: int) -> Span | None:
    """The picture that a token belongs to, if it belongs to one."""
    return next((span for span in spans if span.start <= at < span.end), None)


def boundary(spans: Sequence[Span], at: int) -> int:
    """How many tokens from one on are all of texts, or all of the same picture; 0: all that follow."""
    ends = (end for span in spans for end in (span.start, span.end))
    return next((end - at for end in ends if end > at), 0)
