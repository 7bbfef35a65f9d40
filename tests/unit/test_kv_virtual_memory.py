"""A KV cache that shares memory with others: its limit changes, and it asks before it grows."""

from __future__ import annotations

import mmap
from typing import ClassVar

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from hetrun.errors import BudgetError
from hetrun.memory.kv.paged_allocator import BLOCK
from tests.support.examples import examples
from tests.unit.test_kv import (
    LENGTHS,
    SEQUENCES,
    WIDTH,
    Sequences,
    cache,
    in_memory,
    read,
    seen,
    write,
)

UNIT = BLOCK * 8 * WIDTH * 2  # bytes of a unit of rows in the tables of two layers
STEP = 3 * UNIT


class Refused(BudgetError):
    """Nothing gives memory up."""


class ElasticSequences(Sequences):
    """Everything that a cache can do, while its limit changes, and its memory is others' until it asks."""

    units: ClassVar[int | None] = 5 * UNIT

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.patch.setattr("hetrun.memory.kv.cache.STEP", STEP)
        self.refusing = False
        self.asked_for: list[int] = []
        self.kv.before_growth = self.asked

    def asked(self, nbytes: int) -> None:
        assert self.kv.promised_bytes < nbytes
        assert in_memory(self.kv) <= self.kv.promised_bytes  # nothing was written before
        assert nbytes % STEP == 0 or nbytes >= (self.kv.limit_bytes or 0)
        self.asked_for.append(nbytes)
        if self.refusing:
            raise Refused("no")

    @rule(data=st.data(), n=LENGTHS, forks=st.booleans())
    @precondition(lambda self: self.tokens)
    def is_refused(self, data: st.DataObject, n: int, forks: bool) -> None:
        """Who gets no memory is as before; windows may have moved within their rows."""
        before = self.state()
        self.refusing = True
        try:
            if forks:
                self.fork(data)
            else:
                self.extend(data, n)
        except Refused:
            if any(self.windows):
                self.safe = {seq: len(tokens) for seq, tokens in self.tokens.items()}
            else:
                assert self.state() == before
        finally:
            self.refusing = False

    @rule(limit=st.integers(0, 40 * UNIT))
    @precondition(lambda self: self.units)
    def change(self, limit: int) -> None:
        used, before = self.kv.used_bytes, self.state()
        least = self.kv.least_bytes
        self.kv.limit_bytes = limit
        assert self.kv.limit_bytes == max(limit, least) >= used
        assert self.kv.fits([(seq, 0) for seq in self.tokens])
        assert self.state() == before

    @invariant()
    def no_more_is_held_than_was_promised(self) -> None:
        assert in_memory(self.kv) == self.kv.held_bytes <= self.kv.promised_bytes
        assert self.kv.promised_bytes <= max(self.asked_for, default=0)
        if self.units:
            assert self.kv.promised_bytes <= (self.kv.limit_bytes or 0)


class ElasticWindows(ElasticSequences):
    units: ClassVar[int | None] = None
    windows: ClassVar[tuple[int, ...]] = (9, 0, 40, 9)


TestElasticSequences = ElasticSequences.TestCase
TestElasticWindows = ElasticWindows.TestCase
for case in (TestElasticSequences, TestElasticWindows):
    case.settings = settings(max_examples=examples(25), stateful_step_count=30)
del case


def test_growth_is_asked_for_in_steps_and_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetrun.memory.kv.cache.STEP", STEP)
    kv, asked = cache(context=40 * BLOCK, sequences=SEQUENCES), list[int]()
    kv.before_growth = asked.append
    a = kv.alloc()
    for token in range(8 * BLOCK):
        write(kv, kv.extend(a, 1), [token])
    assert asked == [STEP, 2 * STEP, 3 * STEP]
    assert kv.held_bytes == kv.used_bytes == 8 * UNIT
    kv.truncate(a, BLOCK)
    assert (kv.held_bytes, kv.promised_bytes) == (8 * UNIT, 3 * STEP)
    kv.trim()
    assert (kv.held_bytes, kv.promised_bytes) == (UNIT, STEP)
    assert read(kv, seen(kv, a)) == [list(range(BLOCK))]
    write(kv, kv.extend(a, 3 * BLOCK), list(range(3 * BLOCK)))
    assert asked[3:] == [2 * STEP]


def test_what_is_left_over_goes_before_others_give_memory_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetrun.memory.kv.cache.STEP", STEP)
    kv, asked = cache(context=40 * BLOCK), list[int]()
    kv.before_growth = asked.append
    a, b = kv.alloc(), kv.alloc()
    write(kv, kv.extend(a, 2 * BLOCK), [1] * 2 * BLOCK)
    write(kv, kv.extend(b, BLOCK), [2] * BLOCK)
    kv.free(a)
    write(kv, kv.extend(b, 2 * BLOCK), [3] * 2 * BLOCK)
    assert asked == [STEP]
    assert kv.held_bytes == 3 * UNIT


def test_a_limit_is_lowered_as_far_as_what_is_in_use() -> None:
    kv = cache(context=4 * BLOCK, limit=16 * UNIT)
    a, b = kv.alloc(), kv.alloc()
    for seq in (a, b):
        write(kv, kv.extend(seq, 4 * BLOCK), [1] * 4 * BLOCK)
    kv.limit_bytes = 2 * UNIT
    assert kv.limit_bytes == kv.least_bytes == 8 * UNIT
    assert not kv.fits([(a, 1), (b, 1)]) or kv.length(a) % BLOCK
    kv.free(b)
    assert kv.held_bytes == 8 * UNIT
    kv.limit_bytes = 2 * UNIT
    assert kv.limit_bytes == 4 * UNIT  # one of full length fits in any case
    assert kv.held_bytes == 4 * UNIT  # what b had went to the system
    c = kv.alloc()
    with pytest.raises(BudgetError, match="is full"):
        kv.extend(c, 1)
    kv.limit_bytes = 5 * UNIT
    assert kv.fits([(c, 1)])
    write(kv, kv.extend(c, 1), [7])
    kv.limit_bytes = None
    assert kv.fits([(c, 1 << 20)])


def test_a_cache_that_is_closed_holds_no_memory_though_it_is_known() -> None:
    kv = cache(context=4 * BLOCK)
    write(kv, kv.extend(kv.alloc(), 4 * BLOCK), [1] * 4 * BLOCK)
    assert kv.held_bytes == 4 * UNIT
    kv.close()
    assert kv.held_bytes == 0


def test_memory_that_was_only_looked_at_is_held_too() -> None:
    """The figure is the system's: reading a row that was never written takes a page."""
    kv = cache()
    seq = kv.alloc()
    kv.extend(seq, BLOCK)
    assert kv.held_bytes == 0
    assert kv.tables[0][0].raw[:1].sum() == 0
    assert kv.held_bytes == mmap.PAGESIZE
