"""Rows that leave one KV cache and come into another, also through a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.errors import BudgetError
from hetrun.graph import KvShape
from hetrun.graph.quant import by_name
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.prefix_cache import PrefixEntry
from hetrun.memory.kv.prefix_file import load, save
from hetrun.memory.kv.row_serializer import SavedRows

WHOSE = bytes(32)
CONTEXT, MOST = 300, 60
LAYERS = st.lists(st.sampled_from((0, 0, 40, 90)), min_size=1, max_size=4)  # how far each one sees; 0: all


def cache(windows: list[int], limit: int | None = None) -> KvCache:
    """Of three layers one has keys that are its values as well."""
    shapes = {2 * i: KvShape(1 + i % 2, 8, window, i % 3 == 2) for i, window in enumerate(windows)}
    return KvCache(shapes, by_name("F16"), CONTEXT, 6, MOST, limit_bytes=limit)


def run(kv: KvCache, seq: int, tokens: list[int]) -> None:
    """Write a row for each token of a sequence behind those that it holds; each table has other numbers."""
    for at in range(kv.length(seq), len(tokens), MOST):
        new = tokens[at : at + MOST]
        rows = kv.extend(seq, len(new))
        for layer, pair in kv.tables.items():
            for k, table in enumerate(pair):
                x = np.outer(new, np.full(table.n_heads * table.head_dim, 1 + layer + k / 2, np.float32))
                table.write(rows[kv.group(layer)], x.astype(np.float32))


def seen(kv: KvCache, seq: int) -> list[list[float]]:
    """What the next token sees in each table."""
    n = kv.length(seq)
    views = kv.views(seq, n, n)
    return [
        table.read(views[kv.group(layer)].rows)[:, 0, 0].tolist()
        for layer, pair in kv.tables.items()
        for table in pair
    ]


def several(kv: KvCache, lengths: list[tuple[int, int]]) -> list[PrefixEntry]:
    """Sequences that begin alike, each with its own end."""
    found = []
    for i, (n, own) in enumerate(lengths):
        tokens = [*range(n), *([100 + i] * own)]
        seq = kv.alloc()
        run(kv, seq, tokens)
        found.append(PrefixEntry(seq, np.array(tokens, np.int32)))
    return found


@given(
    windows=LAYERS,
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_what_a_token_sees_is_the_same_in_the_other_cache(
    tmp_path_factory: pytest.TempPathFactory, windows: list[int], lengths: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows"
    ours, others = cache(windows), cache(windows)
    entries = several(ours, lengths)
    rows = SavedRows(ours)
    assert rows.shares == (not any(windows))
    assert save(path, WHOSE, entries, rows) == len(entries)
    found = load(path, WHOSE, SavedRows(others), CONTEXT, 1000)
    for saved, restored in zip(entries, found, strict=True):
        assert restored.tokens.tolist() == saved.tokens.tolist()
        assert others.length(restored.seq) == len(saved.tokens)
        assert seen(others, restored.seq) == seen(ours, saved.seq)
    for restored in found:  # and the next tokens go their own ways
        tokens = restored.tokens.tolist()
        run(others, restored.seq, [*tokens, 7, 8, 9])
        assert seen(others, restored.seq)[0][-3:] == [7, 8, 9]
    for restored in found:
        others.free(restored.seq)
    assert others.used_bytes == 0


@given(windows=LAYERS, begin=st.integers(0, 100), own=st.integers(1, 100))
@settings(max_examples=30, deadline=None)
def test_sizes_are_those_of_what_is_given(windows: list[int], begin: int, own: int) -> None:
    kv = cache(windows)
    (entry,) = several(kv, [(begin, own)])
    rows = SavedRows(kv)
    begin = begin if rows.shares else 0
    blocks = list(rows.export(entry.seq, begin, len(entry.tokens)))
    assert [len(b) for b in blocks] == rows.sizes(begin, len(entry.tokens))


def test_a_shared_beginning_is_shared_again(tmp_path: Path) -> None:
    ours, others = cache([0, 0]), cache([0, 0])
    entries = several(ours, [(256, 1), (256, 1), (256, 1)])
    save(tmp_path / "p", WHOSE, entries, SavedRows(ours))
    load(tmp_path / "p", WHOSE, SavedRows(others), CONTEXT, 1000)
    assert others.used_bytes < ours.used_bytes * 0.7 or not others._memory.can_show


@pytest.mark.parametrize("windows", [[0], [40, 0]])
def test_without_memory_some_are_left_out(tmp_path: Path, windows: list[int]) -> None:
    ours = cache(windows)
    entries = several(ours, [(0, 250), (250, 40), (1, 280)])
    save(tmp_path / "p", WHOSE, entries, SavedRows(ours))
    others = cache(windows, limit=1)  # as much as one sequence takes
    found = load(tmp_path / "p", WHOSE, SavedRows(others), CONTEXT, 1000)
    assert [e.tokens.tolist() for e in found] == [entries[0].tokens.tolist()]


def test_a_failure_leaves_nothing_behind() -> None:
    kv = cache([0])
    (entry,) = several(kv, [(50, 50)])
    used = kv.used_bytes

    def fails(block: memoryview) -> None:
        raise BudgetError("no more")

    for parent, begin in ((None, 0), (entry.seq, 40)):
        with pytest.raises(BudgetError):
            SavedRows(kv).restore(parent, begin, 80, fails)
        assert kv.used_bytes == used
