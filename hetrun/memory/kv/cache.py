"""The key-value cache: host memory for the K and V rows of every sequence, one layout for all backends.

Each layer has two tables of rows (K and V), or one that is both; a row is one token's n_kv_heads x head_dim
numbers in one type.
Address space is reserved for all rows at once and the system gives memory when a row is first written, so a
table never moves and a backend may keep its address. Which rows a sequence has is said by the groups of
`paged_allocator`, one for all layers that see equally far; a sequence is one run of rows in each. How
sequences share memory all the same is `virtual_memory`'s.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import BackendError, BudgetError, DeviceLost
from hetrun.graph import KvShape, StateShape
from hetrun.graph.quant import QuantType
from hetrun.memory.kv.arrivals import Arrivals
from hetrun.memory.kv.paged_allocator import BLOCK, KvView, LayerGroup, PagedGroup, RowIndex, region_rows
from hetrun.memory.kv.states import LEAST_DISTANCE, StateMark, States, StateView, state_bytes
from hetrun.memory.kv.storage import KvTable as KvTable, Tables
from hetrun.memory.kv.virtual_memory import most_mappings, reserve, whole_pages
from hetrun.memory.kv.window_allocator import Runs
from hetrun.system.units import format_bytes

Floats = NDArray[np.float32]

MOST_UNITS = 1 << 21  # of addresses, of which each takes some bytes of our own
STATES_OF_ONE = 2  # that a sequence has at least: what a step reads, and what it writes
NO_STATES: Mapping[int, StateShape] = {}
STEP = 8 << 20  # bytes by which the cache asks for more memory: so seldom that it costs nothing


def token_bytes(shape: KvShape, quant: QuantType) -> int:
    """Memory of one token's K and V in one layer."""
    return tables_of(shape) * table_bytes(shape, quant)


def table_bytes(shape: KvShape, quant: QuantType) -> int:
    """Memory of one of its rows."""
    return quant.row_bytes(shape.n_heads * shape.head_dim)


def tables_of(shape: KvShape) -> int:
    """How many tables a layer has."""
    return 1 if shape.latent else 2


def sequence_bytes(
    shapes: Mapping[int, KvShape],
    quant: QuantType,
    most_tokens: int,
    context: int,
    states: Mapping[int, StateShape] = NO_STATES,
) -> int:
    """Memory of one sequence of `context` tokens, of which `most_tokens` come at once."""
    return STATES_OF_ONE * state_bytes(states) + sum(
        token_bytes(s, quant) * min(context, region_rows(s.window, context, most_tokens))
        for s in shapes.values()
    )


def promised_for(
    shapes: Mapping[int, KvShape],
    quant: QuantType,
    tokens: int,
    context: int,
    kv_bytes: Callable[[int], int],
) -> int:
    """What the cache asks for, in its steps, for a sequence of `tokens` beside one that is kept; at most for
    one of full length, whose memory the one that is kept is given up for."""
    unit = unit_rows([table_bytes(s, quant) for s in shapes.values() if not s.window], mmap.PAGESIZE)
    most = min(2 * kv_bytes(-(-tokens // unit) * unit), kv_bytes(-(-context // unit) * unit))
    return -(-most // STEP) * STEP


def checkpoint_distance(state: int, token: int) -> int:
    """Tokens from one state that is kept to the next: about as many as take its memory in rows, so that
    keeping states costs no more than those do."""
    return max(LEAST_DISTANCE, 1 << (state // max(1, token)).bit_length())


def unit_rows(row_bytes: Sequence[int], page: int) -> int:
    """The least number of rows, in blocks, that are whole pages in each of some tables."""
    return math.lcm(BLOCK, *(page // math.gcd(size, page) for size in row_bytes))


class KvCache:
    """The sequences, their rows in each group of layers, and the memory behind them."""

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        quant: QuantType,
        context: int,
        max_sequences: int,
        most_tokens: int,
        limit_bytes: int | None = None,
        states: Mapping[int, StateShape] = NO_STATES,
    ) -> None:
        """Address space for `max_sequences` of `context` tokens, of which each gets `most_tokens` at once.

        Where the system has less there are fewer. All together get memory up to a limit, in which one of
        full length fits in any case.
        """
        self.quant = quant
        whole = region_rows(0, context, most_tokens)
        # A window that no sequence outgrows is none; then no sequence may become longer than that.
        windows = {layer: s.window if s.window < whole else 0 for layer, s in shapes.items()}
        order = sorted(set(windows.values()))
        self._group_of = {layer: order.index(window) for layer, window in windows.items()}
        row_bytes = {layer: table_bytes(s, quant) for layer, s in shapes.items()}
        unit = unit_rows([row_bytes[layer] for layer, w in windows.items() if not w], mmap.PAGESIZE)
        regions = [region_rows(w, context, most_tokens) if w else -(-whole // unit) * unit for w in order]
        each = {layer: regions[self._group_of[layer]] * row_bytes[layer] for layer in shapes}
        units = -(-whole // unit) if 0 in order else 1
        fewer = min(max_sequences, max(2, MOST_UNITS // units))  # for texts of millions of tokens
        memory, self.max_sequences = reserve(each.values(), fewer)
        self._memory = memory
        self.tables: dict[int, tuple[KvTable, KvTable]] = {}  # K and V of each layer, and
        self.kept: dict[int, list[KvTable]] = {}  # the same, one where they are one
        self._tables: list[list[KvTable]] = [[] for _ in order]
        self._make_tables(shapes, regions)
        self.arrivals = Arrivals()
        self._lost: set[int] = set()  # sequences of which a device that failed had rows
        backing = [Tables(memory, tables, self.settle) for tables in self._tables]
        most = most_mappings() // 2 // sum(map(len, self._tables)) if memory.can_show and order else 0
        self.groups: tuple[LayerGroup, ...] = tuple(
            Runs(window, region, self.max_sequences, rows)
            if window
            else PagedGroup(whole, unit, self.max_sequences, rows, most)
            for window, region, rows in zip(order, regions, backing, strict=True)
        )
        self._row_bytes = [rows.row_bytes for rows in backing]
        self.states = States(states, self.max_sequences) if states else None
        # What sequences begin, are cut, shared and end in.
        self._parts: tuple[LayerGroup | States, ...] = (*self.groups, *([self.states] if self.states else []))
        self._state_bytes = state_bytes(states)
        # Windows' rows begin and end anywhere in a page, and none of it goes while a neighbour has the rest.
        self._edges = sum(2 * mmap.PAGESIZE * len(t) for t, w in zip(self._tables, order, strict=True) if w)
        self._most_sequences = self._promised = 0  # that there ever were at once; bytes
        self._one = sum(region * size for region, size in zip(regions, self._row_bytes, strict=True))
        self._one += STATES_OF_ONE * self._state_bytes
        self._limit = None if limit_bytes is None else max(limit_bytes, self._one)
        self._growth_guard: Callable[[int], None] | None = None
        # A window moves along: what comes in at once must leave room for what it sees.
        self.most_at_once = most_tokens if any(order) else sys.maxsize
        self._lengths, self._ids = dict[int, int](), count()

    def _make_tables(self, shapes: Mapping[int, KvShape], regions: Sequence[int]) -> None:
        """K and V of each layer, one table behind the other."""
        at = 0
        for layer, shape in shapes.items():
            rows = self.max_sequences * regions[self._group_of[layer]]
            size = table_bytes(shape, self.quant)
            made = []
            for _ in range(tables_of(shape)):
                raw = self._memory.bytes[at : at + rows * size].reshape(rows, size)
                made.append(KvTable(raw, self.quant, shape.n_heads, shape.head_dim))
                at += whole_pages(raw.nbytes)
            self.tables[layer], self.kept[layer] = (made[0], made[-1]), made
            self._tables[self._group_of[layer]] += made

    def group(self, layer: int) -> int:
        """The number of a layer's group."""
        return self._group_of[layer]

    @property
    def used_bytes(self) -> int:
        """Memory of the rows and states that are in use; what several sequences share counts once."""
        rows = sum(g.used_rows * size for g, size in zip(self.groups, self._row_bytes, strict=True))
        return rows + (self.states.used_bytes if self.states else 0)

    @property
    def touched_bytes(self) -> int:
        """The same, and what was in use before and the system was not given back."""
        rows = sum(g.touched_rows * size for g, size in zip(self.groups, self._row_bytes, strict=True))
        return rows + (self.states.touched_bytes if self.states else 0)

    @property
    def held_bytes(self) -> int:
        """Memory that the system has given: less than what is touched while rows are not yet written."""
        held = self._memory.held_bytes
        if held is None:
            return self.touched_bytes
        return held + (self.states.held_bytes if self.states else 0)

    def guard_growth(self, guard: Callable[[int], None] | None) -> None:
        """Have `guard` called with the bytes that the cache may hold from now on, before it does: memory that
        can be spared is given up there. If it raises, no rows are given. None: there is no guard any more."""
        self._growth_guard = guard

    @property
    def promised_bytes(self) -> int:
        """Bytes that the cache may hold before its guard is asked again; what is given back is taken off."""
        return self._promised

    @property
    def least_bytes(self) -> int:
        """The lowest limit that there could be now: what is in use, or room for one of full length."""
        return max(self._one, self.used_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """What all sequences together may have; None: as much as there is."""
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, limit: int | None) -> None:
        """From now on; as low as `least_bytes` at most, and who wants less drops sequences first."""
        self._limit = None if limit is None else max(limit, self.least_bytes)
        if self._limit is not None and max(self.touched_bytes, self._promised) > self._limit:
            self.trim()

    @property
    def token_bytes(self) -> int:
        """Memory of one more token, as long as no window moves along."""
        return sum(self._row_bytes)

    @property
    def room(self) -> int:
        """How many more tokens one sequence could get for sure, if it were not for its length."""
        if self._limit is None:
            return sys.maxsize
        unit = max((g.unit for g in self.groups if isinstance(g, PagedGroup)), default=1)
        left = self._limit - self.used_bytes - STATES_OF_ONE * self._state_bytes
        return max(0, left) // sum(self._row_bytes) // unit * unit

    @property
    def layout(self) -> str:
        """What rows are like, in words: those of a cache that says the same can be brought in here."""
        layers = (
            f"{layer}:{keys.n_heads}x{keys.head_dim}/{self.groups[self._group_of[layer]].window}"
            + (" latent" if len(self.kept[layer]) == 1 else "")
            for layer, (keys, _) in sorted(self.tables.items())
        )
        states = f" states {self.states.layout}" if self.states else ""
        return f"{self.quant.name} {' '.join(layers)}{states}"

    def heads(self, layer: int, first: int, n: int) -> tuple[KvTable, KvTable]:
        """K and V of some heads of a layer."""
        keys, values = self.tables[layer]
        return keys.heads(first, n), values.heads(first, n)

    def state(self, layer: int, kind: str) -> Floats:
        """What a layer keeps in states, a row for each slot; `kind` is that of its op."""
        assert self.states is not None
        return self.states.table(layer, kind)

    def settle(self) -> None:
        """Have all rows on the host that devices have written; BackendError where one of them has failed."""
        while self.advance(wait=True):
            pass

    def advance(self, wait: bool) -> bool:
        """Have one piece more of them there; False where nothing is on its way or, without `wait`, has
        arrived."""
        try:
            return self.arrivals.advance(wait)
        except DeviceLost as e:  # others go on without it
            self._lose()
            raise BackendError(f"keys and values were lost with the device that computed them: {e}") from e
        except BaseException:
            self._lose()
            raise

    def _lose(self) -> None:
        """Find out which sequences have rows that will not come any more."""
        for group, rows in self.arrivals.lost():
            for seq, length in self._lengths.items():
                view = self.groups[group].view(seq, length, length)
                if ((rows >= view.first) & (rows < view.end)).any():
                    self._lost.add(seq)

    def alloc(self) -> int:
        """A new, empty sequence; BudgetError where there are too many."""
        if len(self._lengths) == self.max_sequences:
            raise BudgetError(
                f"the KV cache has room for {self.max_sequences} sequences, all in use; ask for fewer"
            )
        seq = next(self._ids)
        self._lengths[seq] = 0
        self._most_sequences = max(self._most_sequences, len(self._lengths))
        for part in self._parts:
            part.alloc(seq)
        return seq

    def length(self, seq: int) -> int:
        """Tokens that a sequence holds."""
        return self._lengths[seq]

    def extend(self, seq: int, n: int) -> tuple[RowIndex, ...]:
        """Rows for the next n tokens in each group, `most_at_once` at most; nothing changes without room."""
        if seq in self._lost:
            raise BackendError(
                "the device that held the keys and values of a sequence failed; the sequence is "
                "computed again"
            )
        if n > self.most_at_once:
            raise ValueError(f"{n} tokens are more than the {self.most_at_once} that may come at once")
        length = self._lengths[seq]
        wanted = [g.wants(seq, length, n) for g in self.groups]
        states = self.states.wants(seq) if self.states else 0
        grows = self._check_room(wanted, states)
        if grows and any(g.copies(seq, length) for g in self.groups):
            self._keep_within(self._bytes_of(wanted))
        try:
            rows = tuple([g.extend(seq, length, n) for g in self.groups])
            if grows or self._growth_guard:
                self._keep_within(max(0, states) * self._state_bytes)
            if self.states:
                self.states.extend(seq, length, n)
        except BaseException:
            for part in self._parts:
                part.truncate(seq, length)
            raise
        self._lengths[seq] = length + n
        return rows

    def mark(self, seq: int, marks: Sequence[StateMark]) -> None:
        """After which of the tokens that were brought last, and are not computed yet, states are to be kept:
        as far as there is room when all sequences of a step have theirs."""
        if self.states is None or not marks:
            return
        spare = len(marks)
        if self._limit is not None:
            spare = min(spare, max(0, self._limit - self.used_bytes) // self._state_bytes)
        try:
            self._keep_within(spare * self._state_bytes)
        except BudgetError:  # weights need the memory
            return
        self.states.mark(seq, marks, spare)

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether there is memory for these numbers of more tokens of each of these sequences."""
        states = sum(max(0, self.states.wants(seq)) for seq, _ in chunks) if self.states else 0
        if self.states and not self.states.has_room(states):
            return False
        if self._limit is None:
            return True
        wanted = self._state_bytes * states + sum(
            g.wants(seq, self._lengths[seq], n) * size
            for seq, n in chunks
            for g, size in zip(self.groups, self._row_bytes, strict=True)
        )
        return not wanted or self.used_bytes + wanted <= self._limit

    def shareable(self, seq: int, n: int) -> int:
        """How many of a sequence's first n tokens a new one could begin with: all, or none where a window
        has moved on; with states as many as the last of them before that knows."""
        n = min(n, self._lengths[seq])
        if self.states:
            n = self.states.reach(seq, n)
        return n if self.keepable(seq, n) else 0

    def fork(self, seq: int, n: int | None = None) -> int:
        """A new sequence that begins with the first n tokens of another, or all: beginnings are shared in
        units of some rows, the rest and windows copied."""
        n = self._lengths[seq] if n is None else n
        if not self.keepable(seq, n):
            raise self._not_there(seq, n, "forked at")
        self.settle()
        wanted = [g.fork_wants(seq, n) for g in self.groups]
        new = self.alloc()
        try:
            self._check_room(wanted)
            self._keep_within(self._bytes_of(wanted))  # before rows are copied
            for part in self._parts:
                part.fork(seq, new, n)
        except BaseException:
            self.free(new)
            raise
        self._lengths[new] = n
        return new

    def keepable(self, seq: int, n: int) -> bool:
        """Whether a sequence can be cut to n tokens: to 0 always, else while what the next one sees is there.

        Without states the last `paged_allocator.SLACK` tokens can always be taken back, and those that came
        in at once; with states what the last step brought, and more only where a state was kept.
        """
        if n and seq in self._lost:
            return False
        return 0 <= n <= self._lengths[seq] and all(part.keepable(seq, n) for part in self._parts)

    def truncate(self, seq: int, n: int) -> None:
        """Forget every token from position n on, which must be keepable."""
        if not self.keepable(seq, n):
            raise self._not_there(seq, n, "cut to")
        for part in self._parts:
            part.truncate(seq, n)
        self._lengths[seq] = n
        if not n:
            self._lost.discard(seq)

    def rewind(self, seq: int, n: int) -> int:
        """Cut a sequence to n tokens or, where its state after those was not kept, to fewer; to how many."""
        n = self.states.reach(seq, n) if self.states else n
        self.truncate(seq, n)
        return n

    def free(self, seq: int) -> None:
        """Give everything back."""
        if self.arrivals:
            for group, view in enumerate(self.views(seq, self._lengths[seq], self._lengths[seq])):
                self.arrivals.forget(group, view.first, view.end)
        self._lost.discard(seq)
        for part in self._parts:
            part.free(seq)
        del self._lengths[seq]

    def views(self, seq: int, a: int, b: int) -> tuple[KvView, ...]:
        """Where, in each group, the tokens lie that those at positions a to b of a sequence see."""
        return tuple([g.view(seq, a, b) for g in self.groups])

    def state_view(self, seq: int, a: int, b: int) -> StateView | None:
        """Where the tokens at positions a to b of a sequence, in one pass, read and write its states."""
        return self.states.view(seq, a, b) if self.states else None

    @property
    def checkpoint_every(self) -> int:
        """Tokens after which a state is worth keeping; 0 where there are no states."""
        return checkpoint_distance(self._state_bytes, self.token_bytes) if self.states else 0

    def thin(self, over: Collection[int] = ()) -> bool:
        """Give up a checkpoint of some sequence; False if there is none. The last step of some is `over`."""
        return self.states is not None and self.states.thin(over)

    def trim(self) -> None:
        """Give the system back the memory that no sequence has."""
        for part in self._parts:
            part.trim()
        self._promised = min(self._promised, self._in_steps(self._most_held()))

    def close(self) -> None:
        """Give the system all memory back, whatever still knows this cache. Sequences are lost."""
        self._memory.close()
        if self.states:
            self.states.close()

    def export(self, seq: int, n: int) -> Iterator[memoryview]:
        """The bytes of what the token at position n sees, which must be keepable: table after table, good
        until the sequence changes."""
        if not self.keepable(seq, n):
            raise self._not_there(seq, n, "exported up to")
        self.settle()
        return self._bytes(seq, n, self.views(seq, n, n))

    def import_(self, n: int, fill: Callable[[memoryview], object]) -> int:
        """A new sequence of n tokens. `fill` is called with the memory of each table in turn, to write there
        what `export` gave of a cache with the same layout; if it raises, nothing has changed."""
        new = self.alloc()
        try:
            self._check_room([g.wants(new, 0, n) for g in self.groups], states=int(self.states is not None))
            views = tuple([g.place(new, n) for g in self.groups])
            if self.states:
                self.states.place(new, n)
            self._keep_within()
            for rows in self._bytes(new, n, views):
                fill(rows)
        except BaseException:
            self.free(new)
            raise
        self._lengths[new] = n
        return new

    def _bytes(self, seq: int, n: int, views: Sequence[KvView]) -> Iterator[memoryview]:
        for tables, view in zip(self._tables, views, strict=True):
            for table in tables:
                yield table.raw[view.first : view.end].reshape(-1).data
        if self.states:
            yield from self.states.export(seq, n)

    def _check_room(self, rows: Sequence[int], states: int = 0) -> bool:
        """Whether anything is wanted at all; BudgetError if it is more than there is."""
        if not any(rows) and states <= 0:
            return False
        more = self._bytes_of(rows) + max(0, states) * self._state_bytes
        if self._limit is not None and self.used_bytes + more > self._limit:
            raise BudgetError(
                f"the KV cache of {format_bytes(self._limit)} is full; "
                "ask for fewer sequences or a smaller --ctx"
            )
        return True

    def _keep_within(self, more: int = 0) -> None:
        """Give back what is not used any more before the limit is passed, and before others give memory up
        for what is about to be written."""
        if self._limit is not None and self.touched_bytes + more > self._limit:
            self.trim()
        if self._growth_guard is None or self._most_held() + more <= self._promised:
            return
        if self.touched_bytes > self.used_bytes:
            self.trim()
        if (most := self._most_held() + more) > self._promised:
            promised = self._in_steps(most)
            self._growth_guard(promised)
            self._promised = promised

    def _most_held(self) -> int:
        """What is held when every row that is touched has been written."""
        return self.touched_bytes + self._edges * self._most_sequences

    def _in_steps(self, nbytes: int) -> int:
        """What is asked for at once, up to the limit."""
        steps = -(-nbytes // STEP) * STEP
        return steps if self._limit is None else max(nbytes, min(steps, self._limit))

    def _bytes_of(self, rows: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(rows, self._row_bytes, strict=True))

    def _not_there(self, seq: int, n: int, done: str) -> ValueError:
        length = self._lengths[seq]
        why = "its state after those was not kept" if self.states else "its windows have moved on"
        moved = f"; {why}" if 0 <= n <= length else ""
        return ValueError(f"sequence {seq} has {length} tokens and cannot be {done} {n}{moved}")
