"""The books of memory: what they refuse, what they say, and whether the kernel counts the same."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import BudgetError
from hetrun.memory import breakdown, ledger
from hetrun.memory.breakdown import Kind
from hetrun.memory.ledger import (
    KINDS,
    Books,
    Figures,
    MemoryGrant,
    granted,
    helper_bytes,
    kernel_figures,
    strangers,
)
from hetrun.system.memory_info import free_memory
from hetrun.system.units import format_bytes
from tests.unit.test_memory_limit import GIB, lay_out, version_2

MIB = 1 << 20
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("book", "release", "holds", "take", "found", "promise", "change")),
        st.sampled_from((breakdown.WEIGHTS, breakdown.KV, breakdown.WORK)),
        st.sampled_from(KINDS),
        st.integers(0, 60),
    ),
    max_size=30,
)


@given(steps=STEPS, reserve=st.integers(0, 20))
def test_the_books_are_sums_and_never_pass_the_limit_by_a_booking(
    steps: list[tuple[str, str, Kind, int]], reserve: int
) -> None:
    books, held = Books(MemoryGrant(100, "--ram"), reserve), Counter[tuple[str, Kind]]()
    promised = Counter[str]()
    held[breakdown.RESERVE, "anonymous"] = reserve
    limit = 100
    for what, account, kind, n in steps:
        free, before = limit - held.total() - promised.total(), held[account, kind]
        if what == "change":
            limit = 3 * n
            books.granted = MemoryGrant(limit, "--ram")
        elif what == "found":
            books.found(account, kind, n)
            held[account, kind] += n
        elif what == "holds":
            books.holds(account, kind, n)
            held[account, kind] = n
        elif what == "promise":
            books.promise(account, n)
            promised[account] = n
        elif what == "release" and n > before:
            with pytest.raises(ValueError, match="holds"):
                books.release(account, kind, n)
        elif what == "release":
            books.release(account, kind, n)
            held[account, kind] -= n
        elif n > max(0, free):
            with pytest.raises(BudgetError, match="is too little"):
                _grow(books, what, account, kind, n)
        else:
            _grow(books, what, account, kind, n)
            held[account, kind] += n
        assert books.total == held.total() + promised.total()
        assert books.free == limit - books.total
        assert books.booked(account) == sum(size for (a, _), size in held.items() if a == account)
        assert books.booked(kind=kind) == sum(size for (_, k), size in held.items() if k == kind)
    facts = books.bill()
    assert breakdown.total(facts) == books.total
    assert (facts["limit"], facts["left"]) == (limit, limit - books.total)


def _grow(books: Books, what: str, account: str, kind: Kind, n: int) -> None:
    if what == "take":
        assert books.take(account, kind, n, lambda: "memory") == "memory"
    else:
        books.book(account, kind, n)


def test_nothing_is_booked_for_what_could_not_be_allocated() -> None:
    books = Books(MemoryGrant(100, "--ram"), 0)

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        books.take(breakdown.WEIGHTS, "anonymous", 60, fail)
    assert books.free == 100


def test_a_refusal_says_what_how_much_what_is_left_and_what_would_do() -> None:
    books = Books(granted(100 * MIB, 0.15), 10 * MIB)
    books.book(breakdown.WEIGHTS, "anonymous", 70 * MIB)
    with pytest.raises(BudgetError) as refused:
        books.book(breakdown.KV, "shared", 30 * MIB + 1)
    assert str(refused.value) == (
        "--ram 100 MiB is too little: KV needs 30 MiB more, but only 20 MiB are left beside weights 70 MiB, "
        "reserve 10 MiB; at least 111 MiB are needed in all"
    )


def test_without_a_budget_it_is_what_is_free_less_a_margin() -> None:
    free, own = free_memory(), kernel_figures().total
    found = granted(None, 0.25)
    assert 0.6 * free.nbytes < found.nbytes - own < 0.9 * free.nbytes
    assert found.words.endswith(f", with 75% of what is free of {free.of},")
    assert granted(1 << 20, 0.25) == MemoryGrant(1 << 20, "--ram 1 MiB")


@pytest.mark.parametrize("is_more", [False, True])
def test_no_budget_is_larger_than_a_container(tmp_path: Path, is_more: bool) -> None:
    """Who takes more is ended by the system. What this process has is part of what is in use there."""
    own = kernel_figures().total // MIB * MIB
    limit = own + 2 * GIB
    root = lay_out(tmp_path, 2, "/", version_2("", limit, own + GIB))
    found = granted(limit if is_more else GIB, 0.15, root)
    assert abs(found.nbytes - (own + GIB if is_more else GIB)) < 16 * MIB
    left = f"what is left of the container's limit of {format_bytes(limit)}, {format_bytes(found.nbytes)}"
    assert found.words == (f"{left} (--ram allows more)," if is_more else "--ram 1.0 GiB")
    empty = lay_out(tmp_path / "empty", 2, "/", version_2("", limit, 0))
    assert granted(limit + GIB, 0.15, empty).nbytes == limit


# --- the table


def test_a_bill_is_a_table_with_a_sum() -> None:
    facts = {"KV of one full sequence": 2 * MIB, "weights": 5 * MIB, "KV of all, at most": 8 * MIB}
    facts |= {"copies for amx": MIB, "libraries": 3 * MIB, "reserve": MIB}
    complete = breakdown.complete(facts, 30 * MIB)
    assert list(complete) == [
        "libraries",
        "weights",
        "KV of one full sequence",
        "KV of all, at most",
        "copies for amx",
        "reserve",
        "limit",
        "left",
    ]
    assert complete["left"] == 12 * MIB
    assert breakdown.complete(complete, 30 * MIB) == complete
    assert "\n".join(breakdown.table(complete)) == (
        "memory, full context       kind                MiB\n"
        "  libraries                file-backed         3.0\n"
        "  weights                  anonymous           5.0\n"
        "  KV of all, at most       shared              8.0\n"
        "    taken only as texts grow\n"
        "    of which one sequence                      2.0\n"
        "  copies for amx           anonymous           1.0\n"
        "  reserve                  anonymous           1.0\n"
        "  in all                                      18.0\n"
        "  limit                                       30.0\n"
        "  left                                        12.0"
    )
    assert breakdown.table({}) == []
    there = breakdown.complete(
        {breakdown.WEIGHTS: 5 * MIB, "copies": MIB, breakdown.BESIDES: 2 * MIB}, 16 * MIB
    )
    assert "\n".join(breakdown.table(there, "gpu-1")) == (
        "memory of gpu-1            kind                MiB\n"
        "  weights                  its own             5.0\n"
        "  copies                   its own             1.0\n"
        "  driver, scratch and KV   its own             2.0\n"
        "  in all                                       8.0\n"
        "  limit                                       16.0\n"
        "  left                                         8.0"
    )
    more = breakdown.settled(complete | {"copies for other": 2 * MIB})
    assert (more["limit"], more["left"]) == (30 * MIB, 10 * MIB)
    assert (
        breakdown.table(more)[-1].split()
        == breakdown.table(complete | {"copies for other": 2 * MIB})[-1].split()
    )
    assert breakdown.table(more)[-1].split() == ["left", "10.0"]


# --- the kernel's figures


def run(code: str) -> dict[str, Any]:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_memory_of_each_kind_is_seen_where_it_is() -> None:
    size, chunk = 32 * MIB, b"x" * MIB
    before = kernel_figures()
    shared = mmap.mmap(-1, size)
    # Not what malloc gives: it may have it already.
    anonymous = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for memory in (shared, anonymous):
        for at in range(0, len(memory), MIB):
            memory[at : at + MIB] = chunk
    after = kernel_figures()
    assert 0.98 * size < after.shared - before.shared < 1.05 * size
    assert 1.95 * size < after.anonymous - before.anonymous < 2.2 * size
    assert after.peak >= after.total >= 3 * size
    assert after.total == sum(after.of(kind) for kind in KINDS)
    anonymous.close()


RECONCILED = """
import json, mmap
from hetrun.memory.ledger import Books, granted
books = Books(granted(1 << 30, 0.15))
books.opened()
found = {}

def look(when):
    books.reconcile()
    off = books.difference()
    found[when] = [books.booked("graphs and scratch"), books.booked("helper processes"), off["anonymous"]]

books.book("weights", "anonymous", 20 << 20)
ours = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ours[:] = bytes(20 << 20)
books.book("KV", "shared", 50 << 20)
look("at first")
theirs = mmap.mmap(-1, 30 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
theirs[:] = bytes(30 << 20)
look("more")
theirs.close()
look("less")
books.release("weights", "anonymous", 20 << 20)
ours.close()
look("least")
found["KV"] = books.booked("KV")
print(json.dumps(found))
"""


def test_what_is_not_booked_is_found_again_and_again() -> None:
    found = run(RECONCILED)
    assert found.pop("KV") == 50 * MIB
    work = {when: sizes[0] for when, sizes in found.items()}
    assert work["at first"] < 2 * MIB
    assert 29 * MIB < work["more"] < 32 * MIB
    assert work["less"] < 2 * MIB
    assert work["least"] < 2 * MIB
    assert all(abs(off) < MIB // 4 and helpers == 0 for _, helpers, off in found.values())


def test_the_reserve_is_booked_but_not_in_use() -> None:
    """What is seen of the books is what lies in memory."""
    figures = Figures(anonymous=70 * MIB, file_backed=9 * MIB)
    books = Books(MemoryGrant(200 * MIB, "--ram"), figures=lambda: figures, helpers=lambda: 12 * MIB)
    books.book(breakdown.WEIGHTS, "anonymous", 50 * MIB)
    books.reconcile()
    assert breakdown.RESERVE in books.bill()
    assert breakdown.RESERVE not in books.seen
    assert breakdown.total(books.seen) - books.seen[breakdown.HELPERS] == figures.total


def test_helpers_that_take_long_to_count_are_counted_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[float]()
    monkeypatch.setattr(ledger, "perf_counter", lambda: clock[0])

    def count() -> int:
        asked.append(clock[0])
        clock[0] += 0.002
        return 12 * MIB

    books = Books(MemoryGrant(200 * MIB, "--ram"), figures=lambda: Figures(anonymous=70 * MIB), helpers=count)
    for _ in range(20):
        books.reconcile()
        clock[0] += 0.25
    assert len(asked) == 5
    assert books.seen[breakdown.HELPERS] == 12 * MIB


def test_helpers_are_processes_that_this_one_has_started() -> None:
    before = helper_bytes()
    wait = "held = bytearray(b'x') * (16 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", wait], stdin=-1, stdout=-1, text=True) as helper:
        assert helper.stdout is not None
        helper.stdout.readline()
        grown = helper_bytes() - before
        strangers.add(helper.pid)
        try:
            without = helper_bytes()
        finally:
            strangers.discard(helper.pid)
        helper.communicate("\n")
    assert 16 * MIB < grown < 40 * MIB
    assert without < before + 8 * MIB


def test_a_limit_below_what_is_in_use_is_told_with_the_way_out() -> None:
    wanted = MemoryGrant(200 << 20, "--ram 200 MiB")
    assert str(wanted.below_use(416 << 20, f"Restart with {wanted.as_option}")) == (
        "the memory limit cannot be lowered to 200 MiB while the model runs: 416 MiB are in use, including "
        "room for one answer as long as the context. Restart with --ram 200MiB"
    )
