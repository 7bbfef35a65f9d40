"""What a compiled graph's run has to fill in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from hetrun.backends.llamacpp.attention_layout import HeadLayout
from hetrun.backends.llamacpp.decode_attention import Common, Span
from hetrun.backends.llamacpp.delta_net import StateNodes
from hetrun.backends.llamacpp.graph_builder import TensorRef
from hetrun.backends.llamacpp.mixture.cached_experts import CachedNode, HintNode
from hetrun.backends.llamacpp.mixture.expert_matmul import ExpertNode
from hetrun.backends.llamacpp.mixture.partial_moe import LeftOutExperts, SortNodes
from hetrun.backends.llamacpp.packed_matmul import LookupNode, MatmulNode
from hetrun.backends.llamacpp.page_in import PagedInNodes
from hetrun.graph import Rows
from hetrun.graph.ops import Grow
from hetrun.memory.kv.cache import KvTable


@dataclass(frozen=True, slots=True)
class KvSlice:
    """The rows of a KV table that one sequence attends over: patched before each run."""

    tensor: int
    table: KvTable
    group: int
    part: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Which of those rows each token of a sequence sees: patched and filled before each run."""

    tensor: int
    group: int
    part: int
    rows: Rows
    window: int
    times: int  # rows that each token has in it, one behind the other


@dataclass(frozen=True, slots=True)
class PaddedQueries:
    """Query rows with zeros behind them, and what comes of them: each run decides whether the zeros count."""

    queries: int
    result: int
    group: int
    part: int
    own: int
    rows: int


@dataclass(slots=True)
class Inputs:
    """What a run has to fill in."""

    tokens: int = 0
    wanted: int = 0
    # Of which rows, what is added, and along which axis (None: in their sequences).
    positions: dict[tuple[Rows, int, int | None], int] = field(default_factory=dict)
    growth: dict[tuple[Rows, Grow], int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # of which group
    values: dict[str, TensorRef] = field(default_factory=dict)
    kv: list[KvSlice] = field(default_factory=list)
    padded: list[PaddedQueries] = field(default_factory=list)
    masks: dict[tuple[int, int, Rows, HeadLayout], Mask] = field(default_factory=dict)
    products: list[MatmulNode | ExpertNode] = field(default_factory=list)
    lookups: list[LookupNode] = field(default_factory=list)
    cached: list[CachedNode] = field(default_factory=list)
    hints: list[HintNode] = field(default_factory=list)
    brought: list[PagedInNodes] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)  # by router the experts of each row
    sorted: list[SortNodes] = field(default_factory=list)
    leaves: list[LeftOutExperts] = field(default_factory=list)
    kept: list[NDArray[Any]] = field(default_factory=list)  # numbers in memory of ours that the graph reads
    states: StateNodes = field(default_factory=StateNodes)
    few: dict[tuple[int, Rows, tuple[Span, ...]], Common] = field(default_factory=dict)
