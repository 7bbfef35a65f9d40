"""Layers with a window: little more than the window is kept, and what a token sees is always there."""

from __future__ import annotations

import mmap
from functools import partial
from random import Random

import pytest

from hetrun.graph import KvShape
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache, sequence_bytes
from hetrun.memory.kv.paged_allocator import BLOCK, SLACK
from tests.unit import test_kv
from tests.unit.test_kv import WIDTH, in_memory, read, seen, unit_of, write

MOST = 2 * BLOCK
cache = partial(test_kv.cache, most=MOST)
SIZE = 8 * WIDTH  # of the two rows of a token in one layer


def test_layers_that_see_equally_far_are_one_group() -> None:
    kv = cache(windows=(40, 0, 9, 40), context=1000)
    assert [g.window for g in kv.groups] == [0, 9, 40]
    assert [kv.group(layer) for layer in (0, 3, 6, 9)] == [2, 0, 1, 2]
    # What no sequence outgrows is no window.
    assert [g.window for g in cache(windows=(1000, 0), context=990).groups] == [0]
    assert [g.window for g in cache(windows=(1000,), context=1100).groups] == [1000]


def test_memory_is_bounded_by_the_window_however_long_a_text_grows() -> None:
    kv = cache(windows=(0, 100), context=4096, sequences=2)
    a, b = kv.alloc(), kv.alloc()
    window = kv.groups[1]
    assert window.rows == 2 * 256  # 100 + slack + the most that come at once, in whole blocks
    touched: set[int] = set()
    tokens: list[int] = []
    for length in range(0, 4000, 50):
        for seq in (a, b):
            rows = kv.extend(seq, 50)
            write(kv, rows, list(range(length + 1, length + 51)))
            touched.update(rows[1].tolist())
        tokens += range(length + 1, length + 51)
        for seq in (a, b):
            assert read(kv, seen(kv, seq)) == [tokens, tokens[-99:]]
    assert touched <= set(range(512))
    assert window.used_rows <= 512
    unit = unit_of(kv)
    assert kv.used_bytes == SIZE * (2 * -(-4000 // unit) * unit + window.used_rows)
    kv.free(a)
    assert window.used_rows <= 256
    assert kv.length(b) == 4000


def test_a_token_at_a_time_moves_the_window_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(
        "hetrun.memory.kv.cache.Tables.move", lambda tables, source, target, n: moved.append(n)
    )
    kv = cache(windows=(800,), context=1 << 16, most=1)
    a = kv.alloc()
    for _ in range(5000):
        kv.extend(a, 1)
    assert 0 < sum(moved) / 5000 < 10  # rows for each token
    assert set(moved) == {799 + SLACK}


def test_many_sequences_that_come_and_go_leave_no_holes() -> None:
    """Each is one run of rows all its life, and never more rows are touched than five regions have."""
    random, most = Random(7), 5
    kv = cache(windows=(0, 40), context=300, sequences=8, most=MOST)
    left: dict[int, int] = {}
    touched: list[set[int]] = [set(), set()]
    for _ in range(3000):
        if len(left) < most and random.random() < 0.3:
            left[kv.alloc()] = random.choice((1, 30, 100, 300))
        for seq in random.sample(sorted(left), min(len(left), 2)):
            n = min(random.choice((1, 1, 7, MOST)), left[seq])
            rows = kv.extend(seq, n)
            for those, new in zip(touched, rows, strict=True):
                those.update(new.tolist())
            left[seq] -= n
            if not left[seq]:
                kv.free(seq)
                del left[seq]
    for those, group in zip(touched, kv.groups, strict=True):
        assert len(those) <= most * group.rows // 8
    assert max(touched[0]) < most * kv.groups[0].rows // 8
    for seq in left:
        kv.free(seq)
    assert kv.used_bytes == 0


def test_tokens_can_be_taken_back_within_the_slack() -> None:
    kv = cache(windows=(40, 0), context=4096)
    a = kv.alloc()
    tokens: list[int] = []
    for _ in range(2000 // MOST):
        tokens += range(len(tokens) + 1, len(tokens) + 1 + MOST)
        write(kv, kv.extend(a, MOST), tokens[-MOST:])
        length = len(tokens)
        assert all(kv.keepable(a, n) for n in range(length - SLACK, length + 1) if n >= 0)
    write(kv, kv.extend(a, 1), [length + 1])
    kv.truncate(a, length - SLACK)
    assert read(kv, seen(kv, a)) == [tokens[:-SLACK], tokens[:-SLACK][-39:]]
    write(kv, kv.extend(a, 2), [7, 8])
    assert read(kv, seen(kv, a))[1] == [*tokens[:-SLACK][-37:], 7, 8]
    # Further back the window is gone, but an empty sequence can always begin anew.
    assert not kv.keepable(a, 40)
    with pytest.raises(ValueError, match="cannot be cut to 40; its windows have moved on"):
        kv.truncate(a, 40)
    assert kv.keepable(a, 0)
    kv.truncate(a, 0)
    write(kv, kv.extend(a, 3), [1, 2, 3])
    assert read(kv, seen(kv, a)) == [[1, 2, 3], [1, 2, 3]]


def test_a_pass_sees_what_its_first_token_sees() -> None:
    kv = cache(windows=(10,), context=4096)
    a = kv.alloc()
    write(kv, kv.extend(a, 50), list(range(50)))
    assert read(kv, kv.views(a, 0, 7)) == [list(range(7))]
    assert read(kv, kv.views(a, 30, 35)) == [list(range(21, 35))]
    assert read(kv, kv.views(a, 49, 50)) == [list(range(40, 50))]


def test_forks_of_a_window_go_their_own_ways() -> None:
    kv = cache(windows=(10, 0), context=4096)
    a = kv.alloc()
    for first in (0, 64, 128, 192):
        write(kv, kv.extend(a, 64), list(range(first, first + 64)))
    b = kv.fork(a)
    write(kv, kv.extend(a, 2), [1000, 1001])
    write(kv, kv.extend(b, 2), [2000, 2001])
    assert read(kv, seen(kv, a))[1] == [*range(249, 256), 1000, 1001]
    assert read(kv, seen(kv, b))[1] == [*range(249, 256), 2000, 2001]
    kv.truncate(b, 256 - SLACK)  # a fork has the slack as well
    assert read(kv, seen(kv, b))[1] == list(range(183, 192))


def test_more_at_once_than_a_window_has_room_for() -> None:
    kv = cache(windows=(10, 0), context=4096)
    a = kv.alloc()
    with pytest.raises(ValueError, match="65 tokens are more than the 64 that may come at once"):
        kv.extend(a, MOST + 1)
    assert kv.length(a) == 0
    assert cache().most_at_once > 1 << 40


@pytest.mark.parametrize(("context", "rows"), [(20, 20), (200, 192), (5000, 192)])
def test_bytes_of_a_sequence(context: int, rows: int) -> None:
    shapes = {0: KvShape(2, 32), 1: KvShape(1, 32, 100)}
    need = sequence_bytes(shapes, by_name("F16"), 20, context)
    assert need == 2 * 2 * (64 * context + 32 * rows)
    kv = KvCache(shapes, by_name("F16"), context, 3, 20)
    if context > 100:
        unit = unit_of(kv)
        assert [g.rows for g in kv.groups] == [3 * -(-context // unit) * unit, 3 * rows]


def test_windows_count_against_the_limit_and_are_given_back() -> None:
    kv = cache(windows=(40, 40), context=4096, sequences=4, limit=1)
    group = kv.groups[0]
    assert kv.limit_bytes == SIZE * 2 * group.rows // 4  # one of full length
    a, b = kv.alloc(), kv.alloc()
    write(kv, kv.extend(a, MOST), list(range(1, MOST + 1)))
    assert kv.fits([(b, MOST)])
    write(kv, kv.extend(b, MOST), [1] * MOST)
    assert not kv.fits([(a, MOST), (b, MOST)])
    kv.free(b)
    assert kv.touched_bytes == SIZE * 2 * 2 * MOST <= in_memory(kv)
    for first in (MOST + 1, 2 * MOST + 1, 3 * MOST + 1):
        write(kv, kv.extend(a, MOST), list(range(first, first + MOST)))
        assert kv.touched_bytes <= kv.limit_bytes
    assert read(kv, seen(kv, a)) == [list(range(4 * MOST + 1 - 39, 4 * MOST + 1))]
    assert in_memory(kv) <= kv.limit_bytes + 2 * 4 * mmap.PAGESIZE  # at the edges of each table
