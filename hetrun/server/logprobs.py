"""Log-probabilities in answers."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hetrun.client.events import TokenLogprob
from hetrun.server.json_stream import LazyList

LEAST_LOGPROB = -9999.0  # OpenAI's value for an impossible token; minus infinity is not JSON

Json = dict[str, object]


def finite(logprob: float) -> float:
    """A log-probability that is valid JSON."""
    return max(logprob, LEAST_LOGPROB)


# --- chat


def entry(scored: TokenLogprob) -> Json:
    """A token of an answer, in the chat's format."""
    pieces = scored.top_pieces or (None,) * len(scored.top)
    top = [_token(token, score, piece) for (token, score), piece in zip(scored.top, pieces, strict=True)]
    return _token(scored.token, scored.logprob, scored.piece) | {"top_logprobs": top}


def _token(token: int, logprob: float, piece: bytes | None) -> Json:
    """One token; its text may be part of a character, which only the bytes show."""
    if piece is None:
        return {"token": f"token_id:{token}", "logprob": finite(logprob), "bytes": None}
    return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


def ranked(scored: TokenLogprob) -> Json:
    """One token of the prompt and the best alternatives, by id, in vLLM's format."""
    ranks = {token: rank for rank, (token, _) in enumerate(scored.top, 1)}
    pieces = dict(zip(ranks, scored.top_pieces, strict=False)) | {scored.token: scored.piece}
    scores = {scored.token: scored.logprob} | dict(scored.top)
    return {
        str(token): {
            "logprob": finite(score),
            "rank": ranks.get(token),
            "decoded_token": None if (piece := pieces.get(token)) is None else piece.decode(errors="replace"),
        }
        for token, score in scores.items()
    }


# --- the older endpoint


@dataclass
class Offsets:
    """The offsets of tokens in a text, in characters; the next one begins at `at`."""

    at: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def of(self, piece: bytes) -> int:
        """Add a token with these bytes."""
        begins = self.at
        self.at += len(self._decoder.decode(piece))
        return begins


@dataclass(frozen=True, slots=True)
class Echo:
    """The tokens of an echoed prompt, and their scores; the first has none."""

    text: str
    pieces: Sequence[bytes]
    scores: Sequence[TokenLogprob]

    def offsets(self) -> Iterator[int]:
        """The tokens' offsets. What a tokenizer adds in front (a blank, a token) is not part of the text."""
        length, offsets = len(self.text), Offsets()
        ahead = max(len(b"".join(self.pieces).decode(errors="replace")) - length, 0)
        for piece in self.pieces:
            yield min(max(offsets.of(piece) - ahead, 0), length)


def legacy(echo: Echo | None, answer: Sequence[TokenLogprob], offsets: Offsets, top: int) -> Json:
    """A prompt, if it is echoed, and an answer as four lists; without alternatives their list is null."""
    echo = echo or Echo("", (), ())
    first = [None] if echo.pieces else []
    scored = (*first, *echo.scores, *answer)
    assert len(scored) == len(echo.pieces) + len(answer), "a token of the prompt has no score"
    # Each list is made separately while it is written, so each names its tokens.
    return {
        "tokens": LazyList(_names(echo, answer)),
        "token_logprobs": LazyList(None if one is None else finite(one.logprob) for one in scored),
        "top_logprobs": LazyList(map(_top, scored, _names(echo, answer))) if top else None,
        "text_offset": LazyList(echo.offsets(), (offsets.of(one.piece or b"") for one in answer)),
    }


def _names(echo: Echo, answer: Sequence[TokenLogprob]) -> Iterator[str]:
    yield from map(piece_text, echo.pieces)
    yield from (_name(one.token, one.piece) for one in answer)


def _top(scored: TokenLogprob | None, text: str) -> dict[str, float] | None:
    """A token and the best alternatives."""
    if scored is None:
        return None
    pieces = scored.top_pieces or (None,) * len(scored.top)
    top: dict[str, float] = {}
    for (token, score), piece in zip(scored.top, pieces, strict=True):
        top.setdefault(_name(token, piece), finite(score))  # the better one of two with the same text
    top.setdefault(text, finite(scored.logprob))
    return top


def _name(token: int, piece: bytes | None) -> str:
    return f"token_id:{token}" if piece is None else piece_text(piece)


def piece_text(piece: bytes) -> str:
    """A token's text; for part of a character its bytes, in OpenAI's notation."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
