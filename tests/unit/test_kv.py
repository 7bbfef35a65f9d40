"""The KV cache against the simplest model of it: a list of tokens for each sequence."""

from __future__ import annotations

import gc
import os
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetrun.errors import BackendError, BudgetError
from hetrun.graph import KvShape
from hetrun.graph.quant import by_name
from hetrun.memory.kv import paged_allocator, virtual_memory
from hetrun.memory.kv.cache import MOST_UNITS, KvCache, unit_rows
from hetrun.memory.kv.paged_allocator import BLOCK, KvView, PagedGroup, RowIndex
from hetrun.memory.kv.virtual_memory import ZeroedMemory
from hetrun.memory.kv.window_allocator import Runs
from tests.support.examples import examples

F32 = by_name("F32")
CONTEXT, SEQUENCES = 7 * BLOCK - 7, 4
MOST = 4 * BLOCK
WIDTH = 32  # numbers in a row: 32 rows are a page of 4 KiB
LENGTHS = st.one_of(st.integers(0, MOST), st.sampled_from((1, BLOCK - 1, BLOCK, BLOCK + 1, MOST)))


def cache(
    context: int = CONTEXT,
    sequences: int = SEQUENCES,
    windows: tuple[int, ...] = (0, 0),
    most: int = MOST,
    limit: int | None = None,
    width: int = WIDTH,
) -> KvCache:
    """Layers whose rows are one number, again and again."""
    shapes = {3 * i: KvShape(1, width, window) for i, window in enumerate(windows)}
    return KvCache(shapes, F32, context, sequences, most, limit)


def tables(kv: KvCache) -> list[tuple[int, Any]]:
    """All tables, each with the number of its group."""
    return [(kv.group(layer), table) for layer, kept in kv.kept.items() for table in kept]


def write(kv: KvCache, rows: tuple[RowIndex, ...], tokens: list[int]) -> None:
    """Another number in each table for each token."""
    for i, (group, table) in enumerate(tables(kv)):
        numbers = np.array(tokens, np.float32).reshape(-1, 1) * (i + 1)
        table.write(rows[group], numbers.repeat(table.head_dim, 1))


def read(kv: KvCache, views: tuple[KvView, ...]) -> list[list[int]]:
    """The tokens that were written to some rows of each group; all of its tables must agree."""
    found: list[list[int]] = [[] for _ in views]
    for i, (group, table) in enumerate(tables(kv)):
        numbers = table.read(views[group].rows)[:, 0]
        assert (numbers == numbers[:, :1]).all()
        tokens = [int(x) for x in numbers[:, 0] / (i + 1)]
        assert found[group] in ([], tokens)
        found[group] = tokens
    return found


def seen(kv: KvCache, seq: int, n: int | None = None) -> tuple[KvView, ...]:
    """What a token at position n would see of those before it."""
    n = kv.length(seq) if n is None else n
    return kv.views(seq, n, n)


def in_memory(kv: KvCache) -> int:
    """Bytes that the system has given for a cache."""
    assert kv._memory._fd is not None
    return os.fstat(kv._memory._fd).st_blocks * 512


class Sequences(RuleBasedStateMachine):
    """Whatever is done, what a token sees are the tokens that were written before it."""

    windows: ClassVar[tuple[int, ...]] = (0, 0)
    width: ClassVar[int] = WIDTH
    units: ClassVar[int | None] = None  # of memory, for all
    shows: ClassVar[bool] = True  # memory can be shown in several places

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(paged_allocator, "SLACK", 5)
        if not self.shows:
            self.patch.setattr(virtual_memory, "_file", lambda size: None)
        self.kv = cache(windows=self.windows, width=self.width)
        if self.units:
            one = self.kv.groups[0].rows // SEQUENCES
            size = 8 * self.width * len(self.windows)
            self.kv = cache(windows=self.windows, width=self.width, limit=one * size + self.units)
        self.group = next((g for g in self.kv.groups if isinstance(g, PagedGroup)), None)
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}  # by each sequence: a name for each unit of memory
        self.safe: dict[int, int] = {}  # where a sequence can be cut in any case
        self.numbers = count(1)
        # What a device would have that keeps copies of rows and trusts their stamps.
        self.known = [np.zeros(g.rows, np.int64) for g in self.kv.groups]
        self.copies = [np.zeros((g.rows, 4 * self.width), np.uint8) for g in self.kv.groups]

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def grow(self, held: list[int], length: int, n: int) -> list[int]:
        """The units of a sequence that gets n more tokens."""
        if not self.group or not n:
            return held
        unit = self.group.unit
        if length % unit and sum(held[-1] in other for other in self.held.values()) > 1:
            held = [*held[:-1], next(self.numbers)]
        missing = -(-(length + n) // unit) - len(held)
        return held + [next(self.numbers) for _ in range(missing)]

    def is_full(self, held: list[int]) -> bool:
        """Whether memory does not hold these units besides those of the sequences."""
        if self.kv.limit_bytes is None or not self.group:
            return False
        units = {u for other in self.held.values() for u in other} | set(held)
        return len(units) * self.group.unit * self.size() > self.kv.limit_bytes

    def size(self) -> int:
        """Bytes of a row in all tables of the layers that see everything."""
        return 8 * self.width * sum(not w for w in self.windows)

    def has_place(self) -> bool:
        return len(self.tokens) < SEQUENCES

    def state(self) -> tuple[object, ...]:
        return {seq: seen(self.kv, seq) for seq in self.tokens}, self.kv.used_bytes

    @rule()
    def alloc(self) -> None:
        if not self.has_place():
            with pytest.raises(BudgetError, match=f"room for {SEQUENCES} sequences, all in use"):
                self.kv.alloc()
            return
        new = self.kv.alloc()
        assert new not in self.tokens
        self.tokens[new], self.held[new], self.safe[new] = [], [], 0

    @rule(data=st.data(), n=LENGTHS)
    @precondition(lambda self: self.tokens)
    def extend(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data)
        length = len(self.tokens[seq])
        held = self.grow(self.held[seq], length, n)
        before = self.state()
        fits = self.kv.fits([(seq, n)])
        too_long = self.group is not None and length + n > -(-CONTEXT // BLOCK) * BLOCK
        own, self.held[seq] = self.held[seq], []
        full = self.is_full(held)
        self.held[seq] = own
        if not too_long:
            assert fits is not full
        if too_long or full:
            with pytest.raises(BudgetError):
                self.kv.extend(seq, n)
            assert self.state() == before
            return
        rows = self.kv.extend(seq, n)
        assert {s: v for s, v in before[0].items() if s != seq} == {  # type: ignore[attr-defined]
            s: seen(self.kv, s) for s in self.tokens if s != seq
        }
        fresh = [next(self.numbers) for _ in range(n)]
        write(self.kv, rows, fresh)
        self.tokens[seq] += fresh
        self.held[seq] = held
        self.safe[seq] = length

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def fork(self, data: st.DataObject) -> None:
        seq = self.some(data)
        n = data.draw(st.one_of(st.just(len(self.tokens[seq])), st.integers(0, len(self.tokens[seq]))))
        before = self.state()
        assert self.kv.shareable(seq, n) == (n if self.kv.keepable(seq, n) else 0)
        if not self.kv.keepable(seq, n):
            with pytest.raises(ValueError, match="its windows have moved on"):
                self.kv.fork(seq, n)
            assert self.state() == before
            return
        held: list[int] = []
        if self.group:
            whole = n // self.group.unit if self.shows else 0
            held = self.grow(self.held[seq][:whole], whole * self.group.unit, n - whole * self.group.unit)
        if self.is_full(held) or not self.has_place():
            with pytest.raises(BudgetError):
                self.kv.fork(seq, n)
            assert self.state() == before
            return
        new = self.kv.fork(seq, n) if n < len(self.tokens[seq]) else self.kv.fork(seq)
        self.tokens[new], self.held[new], self.safe[new] = self.tokens[seq][:n], held, n
        assert {seq: seen(self.kv, seq) for seq in before[0]} == before[0]  # type: ignore[attr-defined]

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def truncate(self, data: st.DataObject) -> None:
        seq = self.some(data)
        n = data.draw(st.integers(0, len(self.tokens[seq])))
        if self.kv.keepable(seq, n):
            self.kv.truncate(seq, n)
            del self.tokens[seq][n:]
            if self.group:
                del self.held[seq][-(-n // self.group.unit) :]
            self.safe[seq] = min(self.safe[seq], n)
            return
        before = self.state()
        with pytest.raises(ValueError, match="its windows have moved on"):
            self.kv.truncate(seq, n)
        assert self.state() == before

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def free(self, data: st.DataObject) -> None:
        seq = self.some(data)
        self.kv.free(seq)
        del self.tokens[seq], self.held[seq]

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        assert self.kv.touched_bytes == self.kv.used_bytes

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def carry(self, data: st.DataObject) -> None:
        """What is exported and brought in again is the same."""
        seq = self.some(data)
        n = data.draw(st.integers(0, len(self.tokens[seq])))
        if not self.kv.keepable(seq, n):
            return
        held = self.grow([], 0, n)
        pieces = [bytes(piece) for piece in self.kv.export(seq, n)]
        if self.is_full(held) or not self.has_place():
            with pytest.raises(BudgetError):
                self.kv.import_(n, lambda into: None)
            return
        left = iter(pieces)

        def fill(into: memoryview) -> None:
            into[:] = next(left)

        new = self.kv.import_(n, fill)
        assert list(left) == []
        self.tokens[new], self.held[new], self.safe[new] = self.tokens[seq][:n], held, n

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Copies are good that have the stamp of their row; without a window that of the last row tells."""
        views = seen(self.kv, self.some(data))
        for i, (group, view) in enumerate(zip(self.kv.groups, views, strict=True)):
            table = next(table for j, table in tables(self.kv) if j == i)
            if not view.length:
                continue
            rows, known = view.rows, self.known[i]
            if group.window or known[rows[-1]] != group.stamps[rows[-1]]:
                missing = rows[known[rows] != group.stamps[rows]]
                self.copies[i][missing] = table.raw[missing]
                known[missing] = group.stamps[missing]
            assert (self.copies[i][rows] == table.raw[rows]).all()

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        for seq, tokens in self.tokens.items():
            length = self.kv.length(seq)
            assert length == len(tokens)
            for n in {length, *range(0, length, 31), self.safe[seq]}:
                if not self.kv.keepable(seq, n):
                    continue
                found = read(self.kv, seen(self.kv, seq, n))
                for group, some in zip(self.kv.groups, found, strict=True):
                    assert some == tokens[max(0, n + 1 - group.window) if group.window else 0 : n]

    @invariant()
    def what_came_last_can_be_taken_back(self) -> None:
        for seq, tokens in self.tokens.items():
            keepable = [self.kv.keepable(seq, n) for n in range(len(tokens) + 1)]
            assert keepable[0]
            assert all(keepable[self.safe[seq] :])
            assert keepable[1:] == sorted(keepable[1:])
            assert all(keepable) or any(self.windows)

    @invariant()
    def what_is_shared_counts_once(self) -> None:
        expected = 0
        for group in self.kv.groups:
            layers = sum(w == group.window for w in self.windows)
            if isinstance(group, Runs):
                kept = [min(len(t), group.window - 1) for t in self.tokens.values()]
                assert sum(kept) <= group.used_rows <= group.region * sum(n > 0 for n in kept)
                expected += group.used_rows * 8 * self.width * layers
            elif self.group:
                held = {u for units in self.held.values() for u in units}
                expected += len(held) * self.group.unit * self.size()
        assert self.kv.used_bytes == expected <= self.kv.touched_bytes
        limit = self.kv.limit_bytes
        assert limit is None or self.kv.touched_bytes <= limit
        if self.shows and not any(self.windows):
            assert in_memory(self.kv) <= self.kv.touched_bytes

    @invariant()
    def runs_of_memory_are_counted(self) -> None:
        if self.group:
            assert self.group._runs == 1 + int((np.diff(self.group._shown) != 1).sum())

    @invariant()
    def no_sequence_has_the_rows_of_another(self) -> None:
        for i in range(len(self.kv.groups)):
            rows = [r for seq in self.tokens for r in seen(self.kv, seq)[i].rows.tolist()]
            assert len(rows) == len(set(rows))

    def teardown(self) -> None:
        for seq in getattr(self, "tokens", {}):
            self.kv.free(seq)
        if hasattr(self, "kv"):
            self.patch.undo()
            assert self.kv.used_bytes == 0
            self.kv.trim()
            if self.shows and not any(self.windows):
                assert in_memory(self.kv) == 0


class LittleMemory(Sequences):
    units: ClassVar[int | None] = 3 * BLOCK * 8 * WIDTH


class RowsOfOddSizes(Sequences):
    width: ClassVar[int] = 24


class NothingIsShown(Sequences):
    shows: ClassVar[bool] = False


class WindowedSequences(Sequences):
    windows: ClassVar[tuple[int, ...]] = (9, 0, 40, 9)


class OnlyWindows(Sequences):
    windows: ClassVar[tuple[int, ...]] = (9, 40)


LIMITS: Any = settings(max_examples=examples(25), stateful_step_count=30)
TestSequences = Sequences.TestCase
TestLittleMemory = LittleMemory.TestCase
TestRowsOfOddSizes = RowsOfOddSizes.TestCase
TestNothingIsShown = NothingIsShown.TestCase
TestWindowedSequences = WindowedSequences.TestCase
TestOnlyWindows = OnlyWindows.TestCase
for case in (
    TestSequences,
    TestLittleMemory,
    TestRowsOfOddSizes,
    TestNothingIsShown,
    TestWindowedSequences,
    TestOnlyWindows,
):
    case.settings = LIMITS
del case  # it would be found once more


def unit_of(kv: KvCache) -> int:
    group = kv.groups[0]
    assert isinstance(group, PagedGroup)
    return group.unit


def test_a_sequence_is_one_run_of_rows_however_others_grow() -> None:
    kv = cache()
    a, b = kv.alloc(), kv.alloc()
    for _ in range(CONTEXT):  # in turn, a token each, as two answers grow
        kv.extend(a, 1)
        kv.extend(b, 1)
    (mine,), (other,) = seen(kv, a), seen(kv, b)
    assert mine.rows.tolist() == list(range(CONTEXT))
    assert other.first == kv.groups[0].rows // SEQUENCES


def test_a_view_of_the_beginning_of_a_sequence() -> None:
    kv = cache()
    a = kv.alloc()
    kv.extend(a, 70)
    (view,) = kv.views(a, 20, 33)
    assert view == KvView(0, 33)
    assert (view.first, view.end) == (0, 33)


def test_whole_units_are_shared_and_the_rest_is_copied() -> None:
    unit = unit_of(cache())
    kv = cache(context=4 * unit)
    a = kv.alloc()
    tokens = list(range(1, 3 * unit - 2))
    write(kv, kv.extend(a, len(tokens)), tokens)
    before, in_use = in_memory(kv), kv.used_bytes
    b = kv.fork(a)
    size = unit * 8 * WIDTH * 2
    assert (in_use, kv.used_bytes) == (3 * size, 4 * size)
    assert before < in_memory(kv) <= before + size
    write(kv, kv.extend(b, 1), [1000])
    assert read(kv, seen(kv, a)) == [tokens]
    assert read(kv, seen(kv, b)) == [[*tokens, 1000]]
    c = kv.fork(b, 2 * unit)
    assert kv.used_bytes == 4 * size
    assert read(kv, seen(kv, c)) == [tokens[: 2 * unit]]


@pytest.mark.parametrize("parent_is_cut", [False, True])
def test_writing_behind_a_cut_does_not_reach_the_other_holder(parent_is_cut: bool) -> None:
    unit = unit_of(cache())
    kv = cache(context=4 * unit)
    a = kv.alloc()
    tokens = list(range(1, 3 * unit + 1))
    write(kv, kv.extend(a, len(tokens)), tokens)
    b = kv.fork(a)
    cut, other = (a, b) if parent_is_cut else (b, a)
    kv.truncate(cut, unit + 5)
    assert kv.fits([(cut, 2 * unit)])
    write(kv, kv.extend(cut, 2 * unit), [7] * 2 * unit)
    assert read(kv, seen(kv, other)) == [tokens]
    assert read(kv, seen(kv, cut)) == [tokens[: unit + 5] + [7] * 2 * unit]


def test_what_comes_after_a_parent_gets_memory_of_its_own() -> None:
    unit = unit_of(cache())
    kv = cache(context=3 * unit, sequences=2)
    a = kv.alloc()
    write(kv, kv.extend(a, 2 * unit), [5] * 2 * unit)
    b = kv.fork(a)
    kv.free(a)
    for number in (6, 7, 8):  # the only place left, whose first memory is still seen by b
        c = kv.alloc()
        write(kv, kv.extend(c, 3 * unit), [number] * 3 * unit)
        assert read(kv, seen(kv, c)) == [[number] * 3 * unit]
        assert read(kv, seen(kv, b)) == [[5] * 2 * unit]
        kv.free(c)
    kv.free(b)
    assert kv.used_bytes == 0


def test_what_a_full_cache_says() -> None:
    kv = cache(context=BLOCK, sequences=2)
    kv.extend(kv.alloc(), 1)
    kv.alloc()
    for more in (kv.alloc, lambda: kv.fork(0), lambda: kv.import_(1, lambda into: None)):
        with pytest.raises(BudgetError, match=r"has room for 2 sequences, all in use; ask for fewer"):
            more()
    with pytest.raises(BudgetError, match=r"a sequence holds up to 32 tokens here; ask for more with --ctx"):
        kv.extend(0, BLOCK)
    kv = cache(context=MOST, limit=1)
    a = kv.alloc()
    kv.extend(a, MOST)
    assert kv.room == 0
    assert not kv.fits([(kv.alloc(), 1)])
    with pytest.raises(BudgetError, match=r"the KV cache of 64 KiB is full; ask for fewer sequences or a sm"):
        kv.extend(kv.alloc(), 1)
    with pytest.raises(BudgetError, match=r"the KV cache of 64 KiB is full"):
        kv.fork(a, BLOCK // 2)
    kv.free(a)
    assert kv.room == MOST
    assert cache().room > 1 << 40


@pytest.mark.parametrize("n", [-1, 6])
def test_a_cut_behind_the_end(n: int) -> None:
    kv = cache()
    a = kv.alloc()
    kv.extend(a, 5)
    with pytest.raises(ValueError, match=f"sequence 0 has 5 tokens and cannot be cut to {n}"):
        kv.truncate(a, n)
    with pytest.raises(ValueError, match=f"sequence 0 has 5 tokens and cannot be forked at {n}"):
        kv.fork(a, n)
    with pytest.raises(ValueError, match=f"sequence 0 has 5 tokens and cannot be exported up to {n}"):
        kv.export(a, n)
    assert kv.length(a) == 5


def test_a_sequence_that_was_freed_is_unknown() -> None:
    kv = cache()
    a = kv.alloc()
    kv.free(a)
    with pytest.raises(KeyError):
        kv.extend(a, 1)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "F32"])
def test_tables_keep_rows_of_heads_in_their_type(name: str) -> None:
    quant = by_name(name)
    kv = KvCache({0: KvShape(2, 32)}, quant, 64, 1, 64)
    keys, _ = kv.tables[0]
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    (rows,) = kv.extend(kv.alloc(), 3)
    keys.write(rows, x)
    expected = quant.dequantise(quant.quantise(x), 64).reshape(3, 2, 32)
    assert (keys.read(rows) == expected).all()
    assert keys.row_bytes == quant.row_bytes(64)
    assert kv.used_bytes == unit_of(kv) * 2 * keys.row_bytes
    assert keys.address == keys.raw.ctypes.data
    assert keys.raw.shape == (-(-64 // unit_of(kv)) * unit_of(kv), keys.row_bytes)


@pytest.mark.parametrize(
    ("sizes", "page", "rows"),
    [
        ((384, 384), 4096, 32),
        ((204, 204), 4096, 1024),
        ((1024, 544), 4096, 128),
        ((384, 384), 1 << 16, 512),
        ((68,), 1 << 16, 16384),
        ((), 4096, 32),
    ],
)
def test_units_are_whole_pages_whatever_a_page_is(sizes: tuple[int, ...], page: int, rows: int) -> None:
    assert unit_rows(sizes, page) == rows
    assert all(rows * size % page == 0 for size in sizes)


def test_memory_that_is_left_over_goes_before_the_limit_is_passed() -> None:
    unit = unit_of(cache())
    size = unit * 8 * WIDTH * 2
    kv = cache(context=4 * unit, sequences=4, limit=6 * size)
    a, b = kv.alloc(), kv.alloc()
    write(kv, kv.extend(a, 4 * unit), [1] * 4 * unit)
    write(kv, kv.extend(b, 2 * unit), [2] * 2 * unit)
    assert in_memory(kv) == kv.used_bytes == 6 * size
    kv.free(a)
    assert in_memory(kv) == kv.touched_bytes == 6 * size
    c = kv.alloc()
    write(kv, kv.extend(c, unit), [3] * unit)  # where the first one was: nothing has to go
    assert kv.touched_bytes == 6 * size
    write(kv, kv.extend(b, 2 * unit), [4] * 2 * unit)
    assert in_memory(kv) == kv.used_bytes == 5 * size
    assert read(kv, seen(kv, b)) == [[2] * 2 * unit + [4] * 2 * unit]
    assert read(kv, seen(kv, c)) == [[3] * unit]
    kv.free(b)
    kv.trim()
    assert in_memory(kv) == size
    assert read(kv, seen(kv, c)) == [[3] * unit]


def test_where_mappings_run_out_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_of(cache())
    tokens = list(range(1, 3 * unit))
    # So few are left for us that nothing is shared.
    monkeypatch.setattr("hetrun.memory.kv.cache.most_mappings", lambda: 8)
    kv = cache(context=4 * unit)
    a = kv.alloc()
    write(kv, kv.extend(a, len(tokens)), tokens)
    b = kv.fork(a)
    assert kv.used_bytes == 6 * unit * 8 * WIDTH * 2
    assert read(kv, seen(kv, b)) == [tokens]
    monkeypatch.undo()
    # Others take them: the system refuses in the middle of a fork.
    kv = cache(context=4 * unit, sequences=2)
    a = kv.alloc()
    write(kv, kv.extend(a, len(tokens)), tokens)
    ends, show = [False, True], ZeroedMemory.show  # the second of the next calls

    def refuse(self: ZeroedMemory, at: int, pages: int, size: int) -> None:
        if ends and ends.pop(0):
            raise OSError(12, "mmap")
        show(self, at, pages, size)

    monkeypatch.setattr(ZeroedMemory, "show", refuse)
    b = kv.fork(a)
    assert kv.used_bytes == 6 * unit * 8 * WIDTH * 2
    assert read(kv, seen(kv, b)) == [tokens]
    # Who must not write where another one reads, and gets nothing else, stays as it was.
    monkeypatch.undo()
    kv.free(b)
    b = kv.fork(a)
    kv.truncate(b, unit + 1)
    monkeypatch.setattr(ZeroedMemory, "show", refuse)
    for n in (0, 1, 2, 3):
        ends[:] = [*[False] * n, True]
        monkeypatch.setattr(kv.groups[0], "_spare", lambda at: 7)
        with pytest.raises(BudgetError, match=r"no more mappings for the KV cache.* raise vm\.max_map_count"):
            kv.extend(b, 1)
        assert read(kv, seen(kv, b)) == [tokens[: unit + 1]]
        assert read(kv, seen(kv, a)) == [tokens]


def test_where_there_is_little_address_space_there_are_fewer_places(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []

    class Little(ZeroedMemory):
        def __init__(self, size: int) -> None:
            wanted.append(size)
            if size > 1 << 20:
                raise OSError(12, "Cannot allocate memory")
            super().__init__(size)

    monkeypatch.setattr(virtual_memory, "ZeroedMemory", Little)
    kv = cache(context=512, sequences=65)
    assert kv.max_sequences == 3
    assert kv.groups[0].rows == 3 * 512
    assert len(wanted) == 6
    with pytest.raises(
        BudgetError, match=r"not have enough address space for 0\.\d GiB of keys and values; use a smaller"
    ):
        cache(context=1 << 20, sequences=3)


def test_rows_that_could_not_be_brought_in_leave_nothing() -> None:
    kv = cache()

    def fill(into: memoryview) -> None:
        raise EOFError

    with pytest.raises(EOFError):
        kv.import_(50, fill)
    assert kv.used_bytes == 0


def test_a_layout_says_all_that_rows_depend_on() -> None:
    shapes = {0: KvShape(2, 64), 1: KvShape(2, 64, 100)}
    layouts = [
        KvCache(shapes, by_name("F16"), 512, 2, 8).layout,
        KvCache(shapes, by_name("Q8_0"), 512, 2, 8).layout,
        KvCache(shapes | {1: KvShape(2, 64)}, by_name("F16"), 512, 2, 8).layout,
        KvCache(shapes | {2: KvShape(2, 64)}, by_name("F16"), 512, 2, 8).layout,
        KvCache(shapes | {0: KvShape(1, 64)}, by_name("F16"), 512, 2, 8).layout,
        KvCache(shapes | {0: KvShape(2, 64, latent=True)}, by_name("F16"), 512, 2, 8).layout,
    ]
    assert len(set(layouts)) == 6
    assert KvCache(shapes, by_name("F16"), 4096, 3, 16).layout == layouts[0]


@pytest.mark.parametrize("plain", [False, True])
def test_memory_goes_when_the_tables_do(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setattr(virtual_memory, "_file", lambda size: None)

    gc.collect()
    gc.freeze()  # the collections below need not look at what other tests left

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("hetrun-kv" in line for line in maps)

    before = held()
    for _ in range(3):
        unit = unit_of(cache())
        kv = cache(context=4 * unit)
        a = kv.alloc()
        write(kv, kv.extend(a, 3 * unit), [1] * 3 * unit)
        b = kv.fork(a, 2 * unit)
        keys = kv.tables[0][0]
        del kv
        gc.collect()
        assert (keys.read(np.arange(5)) == 1).all()  # a table keeps its memory alone
        del keys, b
        assert held() == before
    gc.unfreeze()


def test_very_long_texts_leave_room_for_fewer() -> None:
    """What is kept about units of addresses takes memory of its own, whatever a model says of its context."""
    kv = KvCache({0: KvShape(1, 32)}, by_name("F16"), 1 << 28, 129, 8)
    assert 2 <= kv.max_sequences < 129
    group = kv.groups[0]
    assert isinstance(group, PagedGroup)
    assert group._shown.size <= max(MOST_UNITS, 2 * (1 << 28) // group.unit)
    seq = kv.alloc()
    kv.extend(seq, 100)
    assert kv.length(kv.fork(seq, 70)) == 70


class Lost:
    """Rows that a device had which has failed."""

    layers, group, over = frozenset({0}), 0, False

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.forgotten = rows, list[tuple[int, int]]()

    def send(self) -> bool:
        return True

    def advance(self, wait: bool) -> bool:
        if wait:
            raise BackendError("the device is gone")
        return False

    def left(self) -> np.ndarray:
        return self.rows

    def forget(self, first: int, end: int) -> None:
        self.forgotten.append((first, end))


def test_a_sequence_whose_rows_are_lost_begins_anew() -> None:
    kv = cache(300, 3, (0,), 48)
    lost, other = kv.alloc(), kv.alloc()
    (rows,) = kv.extend(lost, 20)
    kv.extend(other, 20)
    arrival = Lost(rows)
    kv.arrivals.expect(arrival)
    assert not kv.advance(wait=False)
    with pytest.raises(BackendError, match="gone"):
        kv.fork(other)  # which has all rows at home first
    assert not kv.arrivals
    assert kv.keepable(other, 20)
    assert kv.fork(other) is not None
    assert not kv.keepable(lost, 20)
    assert kv.shareable(lost, 20) == 0
    with pytest.raises(BackendError, match="the sequence is computed again"):
        kv.extend(lost, 1)
    kv.truncate(lost, 0)
    kv.extend(lost, 5)
    assert kv.keepable(lost, 5)


def test_rows_of_a_sequence_that_is_over_are_not_wanted() -> None:
    kv = cache(300, 3, (0,), 48)
    seq = kv.alloc()
    (rows,) = kv.extend(seq, 20)
    arrival = Lost(rows)
    kv.arrivals.expect(arrival)
    kv.free(seq)
    assert arrival.forgotten == [(rows[0], rows[-1] + 1)]
