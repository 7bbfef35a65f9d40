"""Which pieces of the weights stay in memory where not all of them fit.

A pass reads what does not stay, once, in the order in which it is needed. So what counts is how many bytes
stay, and that every layer leaves the disk the same share to do while it is computed: with the first layers
whole, the disk would rest through them, and all other layers would wait for it.

A decision is an order of all pieces and how many of them stay. The order depends on the room that there was
when it was made; after that, more or less room only moves the border, and nothing is read that was there
before (`resize`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, product
from typing import Literal, get_args

from hetrun.backend.weight_streaming import Cut, Piece
from hetrun.system.units import format_bytes

Policy = Literal["balanced", "unbalanced", "attention-first", "ffn-first", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

LAYER = re.compile(r"(blk\.\d+)\.(.+)")
MOST_SUBSETS = 12  # columns that are combined in every way; the smaller ones of more are split at most
SMALL_FIRST = ("k", "v", "out", "q")  # attention's columns, where they are equally large


@dataclass(frozen=True, eq=False)
class PinnedPieces:
    """Which pieces stay: the first `count` of an order."""

    cut: Cut
    policy: Policy
    order: tuple[int, ...]  # all pieces, by their number in the cut; the first ones are given up last
    count: int

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The pieces that stay, by their number in the cut."""
        return frozenset(self.order[: self.count])

    @cached_property
    def pieces(self) -> frozenset[Piece]:
        """The pieces that stay."""
        return frozenset(self.cut.pieces[i] for i in self.order[: self.count])

    @cached_property
    def streamed(self) -> tuple[Piece, ...]:
        """The others, in the order in which a pass takes them."""
        return tuple(p for i, p in enumerate(self.cut.pieces) if i not in self.numbers)

    @cached_property
    def locked_bytes(self) -> int:
        """Memory that the pieces take that stay."""
        return sum(self.cut.pieces[i].kept_bytes for i in self.order[: self.count])

    @cached_property
    def streamed_bytes(self) -> int:
        """What a pass reads, as long as it takes all pieces."""
        return sum(p.nbytes for p in self.streamed)

    @cached_property
    def why(self) -> str:
        """What was decided, in one sentence."""
        return _explain(self)


def choose(cut: Cut, room: int, policy: Policy = "balanced") -> PinnedPieces:
    """Which pieces stay in `room` bytes: at most that, and less by less than one piece unless all stay."""
    return _fill(cut, policy, tuple(_ORDERS[policy](cut, max(room, 0))), room)


def resize(kept: PinnedPieces, room: int) -> PinnedPieces:
    """The same decision with another room: with more, pieces only come, and with less they only go.

    For what changes while a model runs, such as the KV cache. All orders use the room equally well, so there
    is never a need to choose again: the result of `choose` is expected only after another budget was set.
    """
    return _fill(kept.cut, kept.policy, kept.order, room)


def switch(before: PinnedPieces, after: PinnedPieces) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """What to drop and what to bring in to get from one decision to another, in the order of the cut."""
    if before.cut is not after.cut and before.cut != after.cut:
        raise ValueError("these decisions are about pieces that were cut in different ways")
    pieces, a, b = before.cut.pieces, before.numbers, after.numbers
    return tuple(pieces[i] for i in sorted(a - b)), tuple(pieces[i] for i in sorted(b - a))


def _fill(cut: Cut, policy: Policy, order: tuple[int, ...], room: int) -> PinnedPieces:
    """As many pieces as fit. It ends at the first that does not: what fits must not depend on tiny pieces."""
    if policy == "none":
        room = 0
    ends = accumulate(cut.pieces[i].kept_bytes for i in order)
    count = next((n for n, end in enumerate(ends) if end > room), len(order))
    return PinnedPieces(cut, policy, order, count)


# --- what lies together ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightColumn:
    """A weight of every layer, as one layer has it."""

    name: str  # attn.q
    numbers: tuple[int, ...]  # of its pieces
    nbytes: int  # that they take in memory
    saved: int  # that they would be read with

    @property
    def attention(self) -> bool:
        return self.name.split(".")[0] == "attn"


Layer = tuple[WeightColumn, ...]


def layers_of(cut: Cut) -> dict[str, Layer]:
    """Every layer's columns, in the order of the cut; what lies outside of them (the head) is under ""."""
    found: dict[str, dict[str, list[int]]] = {}
    for i, piece in enumerate(cut.pieces):
        match = LAYER.fullmatch(piece.scope)
        layer, column = match.groups() if match else ("", piece.scope)
        found.setdefault(layer, {}).setdefault(column, []).append(i)
    return {name: tuple(_column(cut, c, n) for c, n in columns.items()) for name, columns in found.items()}


def _column(cut: Cut, name: str, numbers: Sequence[int]) -> WeightColumn:
    pieces = [cut.pieces[i] for i in numbers]
    return WeightColumn(
        name, tuple(numbers), sum(p.kept_bytes for p in pieces), sum(p.nbytes for p in pieces)
    )


def _bytes(columns: Iterable[WeightColumn]) -> int:
    return sum(c.nbytes for c in columns)


# --- policies ----------------------------------------------------------------------------------------------


def _balanced(cut: Cut, room: int) -> Iterable[int]:
    layers = layers_of(cut)
    total = max(1, sum(map(_bytes, layers.values())))
    known: dict[tuple[object, ...], list[str]] = {}

    def preferred(columns: Layer) -> Layer:
        # Layers of one kind are decided once. The head is one more layer: it has its share of the room.
        kind = tuple((c.name, c.nbytes, c.saved) for c in columns)
        if kind not in known:
            share = room * _bytes(columns) // total
            known[kind] = [c.name for c in regime(columns, share)]
        by_name = {c.name: c for c in columns}
        return tuple(by_name[name] for name in known[kind])

    return _evenly(cut, {name: preferred(columns) for name, columns in layers.items()})


def regime(columns: Layer, share: int) -> Layer:
    """The columns of a layer, those first that should stay if it has `share` bytes for them.

    This is our reconstruction of FlexInfer's "flexible tensor preservation", of which only the regimes are
    known, not the code. Little room, no column of the feed-forward part fits: attention first, its smallest
    columns (k and v) before the others. Otherwise those whole columns that save most bytes; of equally good
    sets that with more of the feed-forward part. So with much room that part stays and attention fills the
    rest, and between the two as many of its columns stay as fit. What is left of the room goes to a part of
    the smallest column that does not fit.
    """
    attention = sorted((c for c in columns if c.attention), key=_small_first)
    others = sorted((c for c in columns if not c.attention), key=_small_first)
    if not others or others[0].nbytes > share:
        return *attention, *others
    whole = _best_subset((*others, *attention), share)
    rest = sorted((c for c in columns if c not in whole), key=_small_first)
    return *whole, *rest


def _best_subset(columns: Layer, room: int) -> Layer:
    """The columns that fit together and save most bytes, exactly; of equally good sets the one that saves
    more outside of attention, then the one that has the columns named first."""
    largest = sorted(columns, key=lambda c: -c.nbytes)[:MOST_SUBSETS]
    candidates = [c for c in columns if c in largest]
    best: Layer = ()
    most = -1, -1
    for chosen in product((True, False), repeat=len(candidates)):
        found = tuple(c for c, yes in zip(candidates, chosen, strict=True) if yes)
        if _bytes(found) > room:
            continue
        saved = sum(c.saved for c in found), sum(c.saved for c in found if not c.attention)
        if saved > most:
            best, most = found, saved
    return best


def _small_first(column: WeightColumn) -> tuple[int, int]:
    part = column.name.rsplit(".")[-1]
    return column.nbytes, SMALL_FIRST.index(part) if part in SMALL_FIRST else len(SMALL_FIRST)


def _attention_first(cut: Cut, room: int) -> Iterable[int]:
    return _evenly(cut, _sorted_columns(cut, lambda c: (not c.attention, *_small_first(c))))


def _ffn_first(cut: Cut, room: int) -> Iterable[int]:
    return _evenly(cut, _sorted_columns(cut, lambda c: (c.attention, *_small_first(c))))


def _sorted_columns(cut: Cut, key: Callable[[WeightColumn], tuple[int, ...]]) -> dict[str, Layer]:
    return {name: tuple(sorted(columns, key=key)) for name, columns in layers_of(cut).items()}


def _in_turn(cut: Cut, room: int) -> Iterable[int]:
    """The first layers whole."""
    return range(len(cut.pieces))


_ORDERS: Mapping[Policy, Callable[[Cut, int], Iterable[int]]] = {
    "balanced": _balanced,
    "unbalanced": _in_turn,
    "attention-first": _attention_first,
    "ffn-first": _ffn_first,
    "none": _in_turn,
}


# --- balance -----------------------------------------------------------------------------------------------


def _evenly(cut: Cut, layers: Mapping[str, Layer]) -> list[int]:
    """All pieces, so that after any number of them all layers have the same share of theirs, within a piece.

    A piece comes when its layer would have this share with it. Pieces of equal layers come at the same time:
    then layers that lie far apart come first, so that what is too little for all of them is spread evenly.
    """
    keys: list[tuple[Fraction, int, int]] = []
    for turn, columns in zip(_spread(len(layers)), layers.values(), strict=True):
        total, so_far = max(1, _bytes(columns)), 0
        for number in chain.from_iterable(_spread_column(c) for c in columns):
            so_far += cut.pieces[number].kept_bytes
            keys.append((Fraction(so_far, total), turn, number))
    return [number for _, _, number in sorted(keys)]


def _spread_column(column: WeightColumn) -> list[int]:
    """The pieces of a column, so that any first few of them lie evenly in it."""
    turns = _spread(len(column.numbers))
    return [number for _, number in sorted(zip(turns, column.numbers, strict=True))]


def _spread(n: int) -> list[int]:
    """For each of n places in a row its turn, so that those that had theirs always lie about evenly.

    The first comes first, then the middle one, the quarters and so on: the bits of the place backwards.
    """
    bits = max(1, (n - 1).bit_length())
    return [int(f"{place:0{bits}b}"[::-1], 2) for place in range(n)]


# --- in words ----------------------------------------------------------------------------------------------


def _explain(kept: PinnedPieces) -> str:
    total = sum(p.kept_bytes for p in kept.cut.pieces)
    if not kept.count or kept.count == len(kept.order):
        what = (
            "all weights stay in memory" if kept.count else f"none of {format_bytes(total)} stays in memory"
        )
        return f"{kept.policy}: {what}"
    layers = layers_of(kept.cut)
    per_layer = [_held(kept, columns) for name, columns in layers.items() if name]
    parts = [f"{format_bytes(kept.locked_bytes)} of {format_bytes(total)} stay in memory"]
    if per_layer:
        sizes = [_bytes(columns) for name, columns in layers.items() if name]
        parts.append(f"{_range(per_layer)} of each layer's {_range(sizes)}")
    said = _whole_layers(kept, layers) if kept.policy == "unbalanced" else _columns(kept, layers)
    return f"{kept.policy}: {', '.join(parts)}: {said}"


def _whole_layers(kept: PinnedPieces, layers: Mapping[str, Layer]) -> str:
    inside = [columns for name, columns in layers.items() if name]
    whole = sum(1 for columns in inside if _held(kept, columns) == _bytes(columns))
    return f"the first {whole} of {len(inside)} layers whole, and what fits of what follows"


def _columns(kept: PinnedPieces, layers: Mapping[str, Layer]) -> str:
    shares = _shares(kept, layers)
    whole = [name for name, share in shares.items() if share == 1]
    split = [f"{100 * share:.0f} % of {name}" for name, share in shares.items() if 0 < share < 1]
    named = " and ".join([", ".join(whole[:-1]), whole[-1]] if len(whole) > 1 else whole)
    return ", ".join([*([f"{named} whole"] if whole else []), *split])


def _held(kept: PinnedPieces, columns: Iterable[WeightColumn]) -> int:
    pieces = kept.cut.pieces
    return sum(pieces[i].kept_bytes for c in columns for i in c.numbers if i in kept.numbers)


def _shares(kept: PinnedPieces, layers: Mapping[str, Layer]) -> dict[str, float]:
    """How much of every column stays, over all layers."""
    together: dict[str, list[WeightColumn]] = defaultdict(list)
    for columns in layers.values():
        for c in columns:
            together[c.name].append(c)
    return {name: _held(kept, columns) / max(1, _bytes(columns)) for name, columns in together.items()}


def _range(sizes: Sequence[int]) -> str:
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return least if least == most else f"{least} to {most}"
