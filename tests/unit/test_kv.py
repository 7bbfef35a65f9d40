"""The KV cache against the simplest model of it: a list of tokens for each sequence."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetrun import kvrows
from hetrun.errors import BudgetError
from hetrun.graph import KvShape
from hetrun.kv import KvCache
from hetrun.kvrows import BLOCK, Blocks, KvView, RowIndex, Runs, rows_of
from hetrun.quant import by_name

F32 = by_name("F32")
CONTEXT, SEQUENCES = 3 * BLOCK - 7, 3
LONGER = 5 * BLOCK - 7
MOST = 2 * BLOCK
LENGTHS = st.one_of(st.integers(0, MOST), st.sampled_from((1, BLOCK - 1, BLOCK, BLOCK + 1, MOST)))


def cache(
    contiguous: bool = False,
    context: int = CONTEXT,
    sequences: int = SEQUENCES,
    windows: tuple[int, ...] = (0, 0),
    most: int = MOST,
) -> KvCache:
    """Layers whose rows are one number."""
    shapes = {3 * i: KvShape(1, 1, window) for i, window in enumerate(windows)}
    return KvCache(shapes, F32, context, sequences, most, contiguous)


def tables(kv: KvCache) -> list[tuple[int, Any]]:
    """All tables, each with the number of its group."""
    return [(kv.group(layer), table) for layer, pair in kv.tables.items() for table in pair]


def write(kv: KvCache, rows: tuple[RowIndex, ...], tokens: list[int]) -> None:
    """Another number in each table for each token."""
    for i, (group, table) in enumerate(tables(kv)):
        table.write(rows[group], np.array(tokens, np.float32).reshape(-1, 1) * (i + 1))


def read(kv: KvCache, views: tuple[KvView, ...]) -> list[list[int]]:
    """The tokens that were written to some rows of each group; all of its tables must agree."""
    found: list[list[int]] = [[] for _ in views]
    for i, (group, table) in enumerate(tables(kv)):
        tokens = [int(x) for x in table.read(views[group].rows).reshape(-1) / (i + 1)]
        assert found[group] in ([], tokens)
        found[group] = tokens
    return found


def seen(kv: KvCache, seq: int, n: int | None = None) -> tuple[KvView, ...]:
    """What a token at position n would see of those before it."""
    n = kv.length(seq) if n is None else n
    return kv.views(seq, n, n)


def blocks_of(view: KvView) -> list[int]:
    """The blocks that hold a view's tokens."""
    return list(dict.fromkeys((view.rows // BLOCK).tolist()))


class Sequences(RuleBasedStateMachine):
    """Whatever is done, what a token sees are the tokens that were written before it."""

    contiguous: ClassVar[bool] = False
    windows: ClassVar[tuple[int, ...]] = (0, 0)

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kvrows, "SLACK", 5)
        self.kv = cache(self.contiguous, LONGER if any(self.windows) else CONTEXT, windows=self.windows)
        self.tokens: dict[int, list[int]] = {}
        self.safe: dict[int, int] = {}  # where a sequence can be cut in any case
        self.next = 1

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def blocks(self) -> Counter[int]:
        """Of the layers that see everything: who is held by how many."""
        if self.kv.groups[0].window:
            return Counter()
        return Counter(b for seq in self.tokens for b in blocks_of(seen(self.kv, seq)[0]))

    def has_room(self, length: int, n: int, shared_tail: bool) -> bool:
        """Shared, any free block will do; contiguous or with a window, a sequence has a region of its own."""
        begun = sum(len(tokens) > 0 for tokens in self.tokens.values())
        if any(self.windows) and not length and n and begun == SEQUENCES:
            return False
        group = self.kv.groups[0]
        if not isinstance(group, Blocks):
            return True
        held, needed = -(-length // BLOCK), -(-(length + n) // BLOCK)
        if not self.contiguous:
            return needed - held + shared_tail <= group.n_blocks - len(self.blocks())
        return needed <= group.region and (held > 0 or needed == 0 or begun < SEQUENCES)

    def state(self) -> tuple[object, ...]:
        views = {seq: seen(self.kv, seq) for seq in self.tokens}
        return views, [g._references.tolist() for g in self.kv.groups if isinstance(g, Blocks)]

    @rule()
    @precondition(lambda self: len(self.tokens) < 6)
    def alloc(self) -> None:
        new = self.kv.alloc()
        assert new not in self.tokens
        self.tokens[new], self.safe[new] = [], 0

    @rule(data=st.data(), n=LENGTHS)
    @precondition(lambda self: self.tokens)
    def extend(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data)
        length, last = len(self.tokens[seq]), seen(self.kv, seq)[0].rows[-1:]
        shared = bool(n and length % BLOCK and self.blocks()[int(last[0]) // BLOCK] > 1)
        before = self.state()
        if not self.has_room(length, n, shared):
            with pytest.raises(BudgetError):
                self.kv.extend(seq, n)
            assert self.state() == before
            return
        rows = self.kv.extend(seq, n)
        fresh = list(range(self.next, self.next + n))
        self.next += n
        write(self.kv, rows, fresh)
        self.tokens[seq] += fresh
        self.safe[seq] = length

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.tokens) < 6)
    def fork(self, data: st.DataObject) -> None:
        seq = self.some(data)
        length = len(self.tokens[seq])
        copied = length if self.contiguous else length % BLOCK
        before = self.state()
        begun = sum(len(tokens) > 0 for tokens in self.tokens.values())
        fits = not any(self.windows) or not length or begun < SEQUENCES
        if not (fits and self.has_room(0, copied, shared_tail=False)):
            with pytest.raises(BudgetError):
                self.kv.fork(seq)
            assert self.state() == before
            return
        new = self.kv.fork(seq)
        self.tokens[new], self.safe[new] = list(self.tokens[seq]), length
        assert {seq: seen(self.kv, seq) for seq in before[0]} == before[0]  # type: ignore[attr-defined]

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def truncate(self, data: st.DataObject) -> None:
        seq = self.some(data)
        n = data.draw(st.integers(0, len(self.tokens[seq])))
        if self.kv.keepable(seq, n):
            self.kv.truncate(seq, n)
            del self.tokens[seq][n:]
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
        del self.tokens[seq]

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        for seq, tokens in self.tokens.items():
            length = self.kv.length(seq)
            assert length == len(tokens)
            for n in {length, *range(0, length, 13), self.safe[seq]}:
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
    def every_holder_is_counted(self) -> None:
        held = self.blocks()
        expected = 0
        for group in self.kv.groups:
            layers = sum(w == group.window for w in self.windows)
            if isinstance(group, Blocks):
                assert group._references.tolist() == [held[b] for b in range(group.n_blocks)]
                assert not self.contiguous or all(n == 1 for n in held.values())
                expected += len(held) * BLOCK * 8 * layers
            else:
                assert isinstance(group, Runs)
                expected += group.used_rows * 8 * layers
                kept = [min(len(t), group.window - 1) for t in self.tokens.values()]
                assert sum(kept) <= group.used_rows <= group.region * sum(n > 0 for n in kept)
        assert self.kv.used_bytes == expected

    @invariant()
    def views_say_where_the_rows_lie(self) -> None:
        for seq in self.tokens:
            for group, view in zip(self.kv.groups, seen(self.kv, seq), strict=True):
                run = list(range(view.first, view.first + view.length))
                assert view.contiguous is (view.rows.tolist() == run)
                assert view.contiguous or not (self.contiguous or group.window)
                assert view.end <= group.rows
                if view.length:
                    assert view.first == min(blocks_of(view)) * BLOCK or group.window
                    assert view.first <= view.rows.min()
                    assert view.rows.max() < view.end
                assert not view.contiguous or view.end == view.first + view.length

    @invariant()
    def nobody_has_the_window_of_another(self) -> None:
        for i, group in enumerate(self.kv.groups):
            if group.window:
                rows = [r for seq in self.tokens for r in seen(self.kv, seq)[i].rows.tolist()]
                assert len(rows) == len(set(rows))

    def teardown(self) -> None:
        for seq in getattr(self, "tokens", {}):
            self.kv.free(seq)
        if hasattr(self, "kv"):
            self.patch.undo()
            assert self.kv.used_bytes == 0


class ContiguousSequences(Sequences):
    contiguous: ClassVar[bool] = True


class WindowedSequences(Sequences):
    windows: ClassVar[tuple[int, ...]] = (9, 0, 40, 9)


class OnlyWindows(Sequences):
    contiguous: ClassVar[bool] = True
    windows: ClassVar[tuple[int, ...]] = (9, 40)


LIMITS: Any = settings(max_examples=40, stateful_step_count=30)
TestSequences = Sequences.TestCase
TestContiguousSequences = ContiguousSequences.TestCase
TestWindowedSequences = WindowedSequences.TestCase
TestOnlyWindows = OnlyWindows.TestCase
for case in (TestSequences, TestContiguousSequences, TestWindowedSequences, TestOnlyWindows):
    case.settings = LIMITS


def test_a_sequence_that_grows_alone_or_beside_others_is_one_run_of_rows() -> None:
    kv = cache()
    a, b = kv.alloc(), kv.alloc()
    for _ in range(CONTEXT):  # in turn, a token each, as two answers grow
        kv.extend(a, 1)
        kv.extend(b, 1)
    (mine,), (other,) = seen(kv, a), seen(kv, b)
    assert mine.contiguous
    assert other.contiguous
    assert mine.rows.tolist() == list(range(CONTEXT))
    assert other.first == 3 * BLOCK


def test_a_view_of_the_beginning_of_a_sequence() -> None:
    kv = cache()
    a = kv.alloc()
    kv.extend(a, 70)
    (view,) = kv.views(a, 20, 33)
    assert view == KvView(0, 33)
    assert (view.first, view.end) == (0, 33)


def test_full_blocks_are_shared_and_a_partial_one_is_copied() -> None:
    kv = cache()
    a = kv.alloc()
    write(kv, kv.extend(a, 64), list(range(64)))
    write(kv, kv.extend(a, 6), list(range(64, 70)))
    b = kv.fork(a)
    (mine,), (other,) = seen(kv, a), seen(kv, b)
    assert blocks_of(mine)[:2] == blocks_of(other)[:2]
    assert blocks_of(mine)[2] != blocks_of(other)[2]
    assert not other.contiguous
    assert other.end == (max(blocks_of(other)) + 1) * BLOCK
    write(kv, kv.extend(b, 1), [1000])
    assert read(kv, seen(kv, a)) == [list(range(70))]
    assert read(kv, seen(kv, b)) == [[*range(70), 1000]]


def test_writing_behind_a_cut_does_not_reach_the_other_holder_of_the_block() -> None:
    kv = cache()
    a = kv.alloc()
    write(kv, kv.extend(a, 64), list(range(64)))
    b = kv.fork(a)
    assert seen(kv, a) == seen(kv, b)
    kv.truncate(b, 40)
    write(kv, kv.extend(b, 3), [7, 8, 9])
    assert read(kv, seen(kv, a)) == [list(range(64))]
    assert read(kv, seen(kv, b)) == [[*range(40), 7, 8, 9]]


def test_a_fork_that_shares_nothing_where_rows_must_be_one_run() -> None:
    kv = cache(contiguous=True)
    a = kv.alloc()
    write(kv, kv.extend(a, 64), list(range(64)))
    b = kv.fork(a)
    assert not set(blocks_of(seen(kv, a)[0])) & set(blocks_of(seen(kv, b)[0]))
    assert read(kv, seen(kv, b)) == [list(range(64))]


def test_what_a_full_cache_says() -> None:
    kv = cache(context=BLOCK, sequences=2)
    kv.extend(kv.alloc(), 2 * BLOCK)
    with pytest.raises(
        BudgetError, match=r"the KV cache of 64 tokens is full; ask for fewer sequences or a sm"
    ):
        kv.extend(kv.alloc(), 1)
    for kv in (
        cache(contiguous=True, context=BLOCK, sequences=2),
        cache(windows=(BLOCK, 0), context=BLOCK, sequences=2),  # longer ones would need the window
    ):
        with pytest.raises(
            BudgetError, match=r"a sequence holds up to 32 tokens here; ask for more with --ctx"
        ):
            kv.extend(kv.alloc(), BLOCK + 1)


@pytest.mark.parametrize("n", [-1, 6])
def test_a_cut_behind_the_end(n: int) -> None:
    kv = cache()
    a = kv.alloc()
    kv.extend(a, 5)
    with pytest.raises(ValueError, match=f"sequence 0 has 5 tokens and cannot be cut to {n}"):
        kv.truncate(a, n)
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
    assert kv.used_bytes == BLOCK * 2 * keys.row_bytes
    assert keys.address == keys.raw.ctypes.data
    assert keys.raw.shape == (64, keys.row_bytes)


def test_rows_of_positions() -> None:
    assert rows_of((5, 2), 30, 34).tolist() == [5 * BLOCK + 30, 5 * BLOCK + 31, 2 * BLOCK, 2 * BLOCK + 1]


def test_memory_goes_when_the_tables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: Any, **options: Any) -> Watched:  # noqa: ANN401
            new = super().__new__(cls, *args, **options)
            made.append(weakref.ref(new))
            return new

    monkeypatch.setattr(mmap, "mmap", Watched)
    kv = cache()
    assert len(made) == 4
    del kv
    gc.collect()
    assert [m() for m in made] == [None] * 4
