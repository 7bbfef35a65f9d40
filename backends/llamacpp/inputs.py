"""What a compiled graph's run has to fill in."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetrun.backends.llamacpp.writer import Ref
from hetrun.graph import Rows
from hetrun.kv import KvTable


@dataclass(frozen=True, slots=True)
class KvSlice:
    """The window of a KV table that one sequence attends over: patched before each run."""

    tensor: int
    table: KvTable
    part: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Which rows of its window each token of a sequence sees: patched and filled before each run."""

    tensor: int
    part: int
    rows: Rows


@dataclass(slots=True)
class Inputs:
    """What a run has to fill in."""

    tokens: int = 0
    slots: int = 0
    wanted: int = 0
    positions: dict[Rows, int] = field(default_factory=dict)
    values: dict[str, Ref] = field(default_factory=dict)
    kv: list[KvSlice] = field(default_factory=list)
    masks: dict[tuple[int, Rows], Mask] = field(default_factory=dict)
