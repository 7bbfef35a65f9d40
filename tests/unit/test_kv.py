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

from hetrun.errors import BudgetError
from hetrun.graph import KvShape
from hetrun.kv import BLOCK, KvCache, KvView, rows_of
from hetrun.quant import by_name

F32 = by_name("F32")
CONTEXT, SEQUENCES = 3 * BLOCK - 7, 3
LENGTHS = st.one_of(st.integers(0, 2 * BLOCK), st.sampled_from((1, BLOCK - 1, BLOCK, BLOCK + 1)))


def cache(contiguous: bool = False, context: int = CONTEXT, sequences: int = SEQUENCES) -> KvCache:
    """Two layers whose rows are one number."""
    return KvCache({0: KvShape(1, 1), 3: KvShape(1, 1)}, F32, context, sequences, contiguous)


def write(kv: KvCache, rows: np.ndarray, tokens: list[int]) -> None:
    """Another number in each table for each token."""
    for i, table in enumerate(table for pair in kv.tables.values() for table in pair):
        table.write(rows, np.array(tokens, np.float32).reshape(-1, 1) * (i + 1))


def read(kv: KvCache, rows: np.ndarray) -> list[int]:
    """The tokens that were written to some rows; all tables must agree."""
    tables = [table for pair in kv.tables.values() for table in pair]
    found = [table.read(rows).reshape(-1) / (i + 1) for i, table in enumerate(tables)]
    assert all((f == found[0]).all() for f in found)
    return [int(x) for x in found[0]]


class Sequences(RuleBasedStateMachine):
    """Whatever is done, every sequence reads the tokens that were written to it."""

    contiguous: ClassVar[bool] = False

    @initialize()
    def begin(self) -> None:
        self.kv = cache(self.contiguous)
        self.tokens: dict[int, list[int]] = {}
        self.next = 1

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def blocks(self) -> Counter[int]:
        return Counter(b for seq in self.tokens for b in self.kv.view(seq).blocks)

    def has_room(self, length: int, n: int, shared_tail: bool) -> bool:
        """Shared, any free block will do; contiguous, a sequence stays in a region of its own."""
        held, needed = -(-length // BLOCK), -(-(length + n) // BLOCK)
        if not self.contiguous:
            return needed - held + shared_tail <= self.kv.n_blocks - len(self.blocks())
        regions = {b // self.kv.region for b in self.blocks()}
        return needed <= self.kv.region and (held > 0 or needed == 0 or len(regions) < SEQUENCES)

    def state(self) -> tuple[dict[int, KvView], list[int]]:
        views = {seq: self.kv.view(seq) for seq in self.tokens}
        return views, self.kv._references.tolist()

    @rule()
    @precondition(lambda self: len(self.tokens) < 6)
    def alloc(self) -> None:
        new = self.kv.alloc()
        assert new not in self.tokens
        self.tokens[new] = []

    @rule(data=st.data(), n=LENGTHS)
    @precondition(lambda self: self.tokens)
    def extend(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data)
        length, view = len(self.tokens[seq]), self.kv.view(seq)
        shared = bool(n and length % BLOCK and self.blocks()[view.blocks[-1]] > 1)
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

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.tokens) < 6)
    def fork(self, data: st.DataObject) -> None:
        seq = self.some(data)
        length = len(self.tokens[seq])
        copied = length if self.contiguous else length % BLOCK
        before = self.state()
        if not self.has_room(0, copied, shared_tail=False):
            with pytest.raises(BudgetError):
                self.kv.fork(seq)
            assert self.state() == before
            return
        self.tokens[self.kv.fork(seq)] = list(self.tokens[seq])
        assert self.kv.view(seq) == before[0][seq]

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def truncate(self, data: st.DataObject) -> None:
        seq = self.some(data)
        n = data.draw(st.integers(0, len(self.tokens[seq])))
        self.kv.truncate(seq, n)
        del self.tokens[seq][n:]

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def free(self, data: st.DataObject) -> None:
        seq = self.some(data)
        self.kv.free(seq)
        del self.tokens[seq]

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        for seq, tokens in self.tokens.items():
            assert self.kv.length(seq) == len(tokens)
            assert read(self.kv, self.kv.view(seq).rows) == tokens

    @invariant()
    def every_holder_is_counted(self) -> None:
        held = self.blocks()
        assert self.kv._references.tolist() == [held[b] for b in range(self.kv.n_blocks)]
        assert self.kv.used_bytes == len(held) * BLOCK * self.kv.bytes_per_token
        if self.contiguous:
            assert all(n == 1 for n in held.values())

    @invariant()
    def views_say_where_the_rows_lie(self) -> None:
        for seq in self.tokens:
            view = self.kv.view(seq)
            assert len(view.blocks) == -(-view.length // BLOCK)
            if view.length:
                run = list(range(view.first, view.first + view.length))
                assert view.first == min(view.blocks) * BLOCK
                assert view.contiguous is (view.rows.tolist() == run)
                assert view.rows.max() < view.end <= self.kv.rows
                assert not view.contiguous or view.end == view.first + view.length
            else:
                assert (view.contiguous, view.first, view.end) == (True, 0, 0)
            assert view.contiguous or not self.contiguous

    def teardown(self) -> None:
        for seq in getattr(self, "tokens", {}):
            self.kv.free(seq)
        if hasattr(self, "kv"):
            assert self.kv.used_bytes == 0
            assert not self.kv._references.any()


class ContiguousSequences(Sequences):
    contiguous: ClassVar[bool] = True


LIMITS: Any = settings(max_examples=40, stateful_step_count=30)
TestSequences = Sequences.TestCase
TestSequences.settings = LIMITS
TestContiguousSequences = ContiguousSequences.TestCase
TestContiguousSequences.settings = LIMITS


def test_a_sequence_that_grows_alone_or_beside_others_is_one_run_of_rows() -> None:
    kv = cache()
    a, b = kv.alloc(), kv.alloc()
    for _ in range(CONTEXT):  # in turn, a token each, as two answers grow
        kv.extend(a, 1)
        kv.extend(b, 1)
    assert kv.view(a).contiguous
    assert kv.view(b).contiguous
    assert kv.view(a).rows.tolist() == list(range(CONTEXT))
    assert kv.view(b).first == kv.region * BLOCK


def test_a_view_of_the_beginning_of_a_sequence() -> None:
    kv = cache()
    a = kv.alloc()
    kv.extend(a, 70)
    assert kv.view(a, 33) == KvView((0, 1), 33, True)
    assert (kv.view(a, 33).first, kv.view(a, 33).end) == (0, 33)


def test_full_blocks_are_shared_and_a_partial_one_is_copied() -> None:
    kv = cache()
    a = kv.alloc()
    write(kv, kv.extend(a, 70), list(range(70)))
    b = kv.fork(a)
    mine, other = kv.view(a), kv.view(b)
    assert mine.blocks[:2] == other.blocks[:2]
    assert mine.blocks[2] != other.blocks[2]
    assert not other.contiguous
    assert other.end == (max(other.blocks) + 1) * BLOCK
    write(kv, kv.extend(b, 1), [1000])
    assert read(kv, kv.view(a).rows) == list(range(70))
    assert read(kv, kv.view(b).rows) == [*range(70), 1000]


def test_writing_behind_a_cut_does_not_reach_the_other_holder_of_the_block() -> None:
    kv = cache()
    a = kv.alloc()
    write(kv, kv.extend(a, 64), list(range(64)))
    b = kv.fork(a)
    assert kv.view(a).blocks == kv.view(b).blocks
    kv.truncate(b, 40)
    write(kv, kv.extend(b, 3), [7, 8, 9])
    assert read(kv, kv.view(a).rows) == list(range(64))
    assert read(kv, kv.view(b).rows) == [*range(40), 7, 8, 9]


def test_a_fork_that_shares_nothing_where_rows_must_be_one_run() -> None:
    kv = cache(contiguous=True)
    a = kv.alloc()
    write(kv, kv.extend(a, 64), list(range(64)))
    b = kv.fork(a)
    assert not set(kv.view(a).blocks) & set(kv.view(b).blocks)
    assert read(kv, kv.view(b).rows) == list(range(64))


def test_what_a_full_cache_says() -> None:
    kv = cache(context=BLOCK, sequences=2)
    kv.extend(kv.alloc(), 2 * BLOCK)
    with pytest.raises(
        BudgetError, match=r"the KV cache of 64 tokens is full; ask for fewer sequences or a sm"
    ):
        kv.extend(kv.alloc(), 1)
    kv = cache(contiguous=True, context=BLOCK, sequences=2)
    with pytest.raises(BudgetError, match=r"a sequence holds up to 32 tokens here; ask for more with --ctx"):
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
    kv = KvCache({0: KvShape(2, 32)}, quant, 64, 1)
    keys, _ = kv.tables[0]
    x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    rows = kv.extend(kv.alloc(), 3)
    keys.write(rows, x)
    expected = quant.dequantise(quant.quantise(x), 64).reshape(3, 2, 32)
    assert (keys.read(rows) == expected).all()
    assert keys.row_bytes == quant.row_bytes(64)
    assert kv.bytes_per_token == 2 * keys.row_bytes
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
