"""What a model reads pictures with: the file of its vision tower, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetrun.system.file_identity import Stamp


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower in a file of its own (mmproj), as its checked header describes it."""

    path: str
    stamp: Stamp
    family: str  # the projector, by the format's name: "qwen3vl_merger"
    nbytes: int  # of its weights
    width: int  # of a row that it makes: the text model's, times (1 + deepstack)
    deepstack: int  # further blocks of a row, one for each of the text's first layers
    spatial: bool  # rows have places in height and width (M-RoPE)
    whole: bool  # the rows of a picture see each other (not causal)


class NoVision(NamedTuple):
    """Why a model reads no pictures."""

    reason: str
