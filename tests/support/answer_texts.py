"""What tests of answers have in common: texts with something odd in them, and texts under a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hetrun.client.sampling_params import Structure
from hetrun.sampling.grammar.token_mask import Grammars


def disturbed(data: st.DataObject, text: str, odd: Sequence[str]) -> tuple[str, list[str]]:
    """A text that was cut off, or has something else in its middle, and its pieces."""
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    text = text[:begin] + data.draw(st.sampled_from(odd)) + text[end:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def allowed_part(
    grammars: Grammars, parts: str, text: str, pieces: Sequence[bytes], marks: Sequence[str]
) -> tuple[str, bool]:
    """As much of a text as the parts allow, and whether an answer may end there (with the last piece)."""
    constraint = grammars.constraint(Structure("parts", parts))
    taken = ""
    while taken != text:
        rest = text[len(taken) :]
        piece = next((mark for mark in marks if rest.startswith(mark)), rest[:1])
        token = pieces.index(piece.encode())
        if constraint.finished or not constraint.allowed()[token]:
            return taken, False
        constraint.accept(token)
        taken += piece
    return taken, bool(constraint.allowed()[len(pieces) - 1])
