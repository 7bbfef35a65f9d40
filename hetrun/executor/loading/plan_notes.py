"""What a plan says of its model besides numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetrun.backend import Backend
from hetrun.errors import printable
from hetrun.graph import Graph, kept_by, states_of
from hetrun.graph.quant import QuantType
from hetrun.loader.hf_mapping import SEES
from hetrun.loader.source import ModelSource
from hetrun.loader.vision import NoVision, Vision
from hetrun.memory.kv.cache import checkpoint_distance, token_bytes
from hetrun.memory.kv.states import MOST_CHECKPOINTS, state_bytes
from hetrun.system.units import format_bytes


def about_states(graph: Graph, quant: QuantType) -> tuple[str, ...]:
    """What layers keep of a sequence that is not keys and values, and what it takes that it cannot be cut
    anywhere."""
    if not (size := state_bytes(states_of(graph.ops))):
        return ()
    every = checkpoint_distance(size, sum(token_bytes(shape, quant) for shape in kept_by(graph.ops).values()))
    return (
        f"a state of {format_bytes(size)} for each sequence, of any length; a running sequence has two. If "
        f"there is memory, copies are kept: one every {every:,} tokens (at most {MOST_CHECKPOINTS}), and one "
        "wherever two texts begin to differ. A text that continues from a place without a copy computes up "
        f"to {every:,} tokens again",
    )


def about_whole(backends: Mapping[str, Backend]) -> tuple[str, ...]:
    """Which backends leave attention to others because of pictures."""
    left_out = [name for name, b in backends.items() if b.whole and not b.sees_whole]
    if not left_out:
        return ()
    return (
        f"rows of this model's pictures see each other, which {' and '.join(left_out)} cannot compute: "
        "attention runs on other backends; with --mmproj none it need not",
    )


def about_vision(source: ModelSource, vision: Vision | NoVision | None) -> tuple[str, ...]:
    """What a model reads pictures with, or why it reads none though others of its kind do."""
    if isinstance(vision, Vision):
        took = format_bytes(vision.nbytes)
        return (
            f"reads pictures with {printable(os.path.basename(vision.path))}, which takes {took}, and work "
            "memory that depends on a picture's size, from the first picture on",
        )
    if vision is None or vision.usual:
        seen = "its vision tower is left out: the model reads texts here, and no pictures"
        return (seen,) if source.get_bool(SEES, False) else ()
    return (f"reads no pictures: {vision.reason}",)
