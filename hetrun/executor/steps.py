"""Steps as they are asked for, and the passes that they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Ints, Pass, SequencePart
from hetrun.graph import Graph
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import StateMark

Number = TypeVar("Number", bound=np.generic)
Between = Callable[[], None]
Slots = tuple[Ints, ...]  # KV rows of some tokens, in each group of layers


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence, and of which of them the result is wanted."""

    seq: int
    tokens: Ints
    wanted: Ints  # ascending
    marks: tuple[StateMark, ...] = ()  # positions of the sequence at which its states are kept
    hidden: int = 0  # the number of its last tokens whose hidden states are kept, with those of wanted ones
    given: tuple[Floats, ...] = ()  # what the graph is given beside tokens, each with a row for each
    # Rows in place of what its tokens are looked up as; wider ones have more for the first layers' results.
    embedded: Floats | None = None
    places: Ints | None = None  # of each its positions in time, height and width; None: as in a text
    whole: bool = False  # its rows see each other, and so they are in one pass

    @property
    def shown(self) -> Ints:
        """The tokens of which anything is wanted, ascending."""
        n, wanted, kept = len(self.tokens), self.wanted, min(self.hidden, len(self.tokens))
        if kept <= len(wanted) and (not kept or wanted[-kept] == n - kept):
            return wanted
        return np.union1d(wanted, np.arange(n - kept, n))


Piece = tuple[Chunk, int, int]  # tokens a to b of a chunk


@dataclass(frozen=True, slots=True)
class Step:
    """What the model does next: tokens of several sequences, each as long as it likes."""

    chunks: tuple[Chunk, ...]
    drafted: int = 0  # how many of their tokens are guesses
    hidden: bool = False  # wanted are hidden states behind the last norm, and no logits are computed

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def wanted(self) -> int:
        """Wanted results in all."""
        return sum(len(c.wanted) for c in self.chunks)


@dataclass(slots=True)
class Trip:
    """A pass, and what is wanted of its wanted rows."""

    work: Pass
    kept: Ints  # those whose hidden states are kept
    scored: Ints | None = None  # those whose logits are wanted; None: of all
    hidden: Floats | None = None  # what was kept
    embedded: bool = False  # rows have come in place of what tokens are looked up as
    deeper: tuple[Floats, ...] = ()  # what is added to the results of the first layers

    def keep(self, hidden: Floats) -> None:
        """The hidden states of all wanted rows have come, in memory that the next pass overwrites."""
        if len(self.kept):
            self.hidden = hidden[self.kept]


def cut(step: Step, most: int, most_logits: int) -> list[list[Piece]]:
    """What goes into each pass, within the limits on tokens and on rows of logits."""
    chunks = [c for c in step.chunks if len(c.tokens)]
    # A hidden state is no wider than what passes work in; logits are.
    most_wanted = most if step.hidden else most_logits
    alike = len({c.embedded is None for c in chunks}) == 1 and not (
        len(chunks) > 1 and any([c.whole for c in chunks])
    )
    if alike and step.tokens <= most and step.wanted <= most_wanted:
        return [[(c, 0, len(c.tokens)) for c in chunks]]
    passes: list[list[Piece]] = [[]]
    tokens = wanted = 0
    for chunk in chunks:
        a, n = 0, len(chunk.tokens)
        if passes[-1] and not _go_together(passes[-1][0][0], chunk):
            passes.append([])
            tokens = wanted = 0
        if chunk.whole:
            passes[-1].append((chunk, 0, n))
            continue
        while a < n:
            b = _fit(chunk, a, most - tokens, most_wanted - wanted)
            if b == a:
                passes.append([])
                tokens = wanted = 0
                continue
            passes[-1].append((chunk, a, b))
            tokens += b - a
            wanted += _count(chunk.wanted, a, b)
            a = b
    return [pieces for pieces in passes if pieces]


def _go_together(a: Chunk, b: Chunk) -> bool:
    """Whether a pass may have both: all tokens are looked up, or none, and what must not be cut
    has a pass for itself."""
    return (a.embedded is None) == (b.embedded is None) and not a.whole and not b.whole


def _fit(chunk: Chunk, a: int, tokens: int, wanted: int) -> int:
    """How far a chunk's tokens from `a` on go into what is left of a pass."""
    b = min(len(chunk.tokens), a + tokens)
    inside = chunk.wanted[(chunk.wanted >= a) & (chunk.wanted < b)]
    return int(inside[wanted]) if len(inside) > wanted else b


def prepare(
    pieces: Sequence[Piece], before: Mapping[int, int], slots: Mapping[int, Slots], kv: KvCache, graph: Graph
) -> Trip:
    """A pass of some pieces, of sequences with their tokens `before` the step; `slots`: the rows that
    their chunks were given, if at once."""
    parts, tokens, rows, wanted = [], [], [], []
    # One number for each piece: numpy adds them up for all pieces at once.
    sizes, behind, counts, offsets = [], [], [], []
    at = wanted_at = 0
    deeper: list[Floats] = []
    for chunk, a, b in pieces:
        n, start = b - a, before[chunk.seq] + a
        ids, mine, own = chunk.tokens, chunk.shown, slots.get(chunk.seq)
        if own is None:
            own = kv.extend(chunk.seq, n)
        elif n < len(ids):
            own = tuple([r[a:b] for r in own])
        if n < len(ids):
            ids, mine = ids[a:b], mine[(mine >= a) & (mine < b)]
        count = len(mine)
        views = kv.views(chunk.seq, start, start + n)
        states = kv.state_view(chunk.seq, start, start + n)
        parts.append(SequencePart(at, at + n, wanted_at, wanted_at + count, views, states))
        tokens.append(ids)
        rows.append(own)
        wanted.append(mine)
        sizes.append(n)
        behind.append(start - at)
        counts.append(count)
        offsets.append(at - a)
        at, wanted_at = at + n, wanted_at + count
    positions = np.arange(at) + np.repeat(behind, sizes)
    own_rows = rows[0] if len(rows) == 1 else tuple(map(np.concatenate, zip(*rows, strict=True)))
    rows_wanted = join(wanted) + np.repeat(offsets, counts)
    work = Pass(join(tokens), positions, own_rows, rows_wanted, tuple(parts))
    for i, value in enumerate(graph.given):
        work.values[value.name] = join([chunk.given[i][a:b] for chunk, a, b in pieces])
    if pieces[0][0].embedded is not None:
        rows_of = [chunk.embedded[a:b] for chunk, a, b in pieces if chunk.embedded is not None]
        first, *deeper = _blocks(join(rows_of), graph.embedded.width)
        work.values[graph.embedded.name] = first
    if any([chunk.places is not None for chunk, _, _ in pieces]):
        work.places = _places(work, pieces)
    if pieces[0][0].whole:
        work.whole = graph.whole
    trip = _trip(work, pieces)
    trip.deeper = tuple(deeper)
    return trip


def _blocks(rows: Floats, width: int) -> list[Floats]:
    """Rows, and what more they have for the first layers."""
    if rows.shape[1] == width:
        return [rows]
    return [np.ascontiguousarray(block) for block in np.split(rows, rows.shape[1] // width, axis=1)]


def _trip(work: Pass, pieces: Sequence[Piece]) -> Trip:
    """A pass of some pieces, and what they want of its rows."""
    embedded = pieces[0][0].embedded is not None
    if not any([chunk.hidden for chunk, _, _ in pieces]):
        return Trip(work, np.zeros(0, np.int64), embedded=embedded)
    kept, scored = [], []
    for part, (chunk, a, _) in zip(work.parts, pieces, strict=True):
        rows = np.arange(part.wanted_a, part.wanted_b)
        kept.append(rows if chunk.hidden else rows[:0])
        if len(chunk.shown) > len(chunk.wanted):
            tokens = work.wanted[part.wanted_a : part.wanted_b] - part.a + a
            rows = rows[np.isin(tokens, chunk.wanted)]
        scored.append(rows)
    logits = join(scored)
    return Trip(work, join(kept), logits if len(logits) < len(work.wanted) else None, embedded=embedded)


def _places(work: Pass, pieces: Sequence[Piece]) -> Ints:
    """Of each token its positions in time, height and width: those of a text are one."""
    found = np.repeat(work.positions[:, None], 3, 1)
    for part, (chunk, a, b) in zip(work.parts, pieces, strict=True):
        if chunk.places is not None:
            found[part.a : part.b] = chunk.places[a:b]
    return found


def join(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """Arrays one after the other; of one no copy is made."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _count(wanted: Ints, a: int, b: int) -> int:
    return int(np.count_nonzero((wanted >= a) & (wanted < b)))
