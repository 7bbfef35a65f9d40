"""Which tokens of a text stay when it fills the context: its beginning and its end, as in llama.cpp."""

from __future__ import annotations

from hetrun.client.events import ContextShift

LEAST_ROOM = 4  # tokens of the context that the beginning which is kept leaves in any case


def shortened(tokens: list[int], shift: ContextShift, context: int) -> list[int]:
    """A prompt that the context does not hold, without blocks from its middle: half of the room that its
    beginning leaves each, as many as needed. Room for an answer is left."""
    if len(tokens) < context:
        return tokens
    keep = _kept(shift, len(tokens), context)
    block = max((context - keep) // 2, 1)
    dropped = max((len(tokens) - keep - block) // block, 1) * block
    return tokens[:keep] + tokens[keep + dropped :]


def after_shift(tokens: list[int], shift: ContextShift, n_prompt: int, context: int) -> list[int]:
    """The tokens of a text that has filled the context, without the oldest after its beginning."""
    keep = _kept(shift, n_prompt, context)
    left = len(tokens) - keep
    dropped = min(shift.discard or max(left // 2, 1), left - 1)
    return tokens[:keep] + tokens[keep + dropped :]


def _kept(shift: ContextShift, n_prompt: int, context: int) -> int:
    """How many tokens at the beginning stay."""
    most = max(context - LEAST_ROOM, 0)
    return min(n_prompt if shift.keep < 0 else shift.keep, n_prompt, most)
