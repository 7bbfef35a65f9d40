"""How a disk is read: every way is tried, what a cache gave is not counted, and what was found is kept."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.errors import ModelFileError
from hetrun.prefetch import disk_probe
from hetrun.prefetch.disk_probe import (
    ALIKE,
    CACHED_ENOUGH,
    HORIZON,
    MIB,
    UNKNOWN_RATE,
    WAYS,
    Disk,
    DiskRate,
    ProbeResult,
    ReadMethod,
    cached_share,
    choose,
    device_of,
    disk_of,
    measure,
    remember,
)

DIRECT = [w for w in WAYS if w.direct]
CACHED = [w for w in WAYS if not w.direct]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that takes no room on the disk; less is read of it than of real models."""
    monkeypatch.setattr(disk_probe, "PART", 4 * MIB)
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(96 * MIB)
    return path


# --- which way is taken ------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(WAYS), st.floats(1e7, 1e10), min_size=1))
def test_the_fastest_way_is_taken_but_the_cache_only_where_it_is_far_faster(
    rates: dict[ReadMethod, float],
) -> None:
    chosen = choose(ProbeResult(rates))
    direct = max((r for w, r in rates.items() if w.direct), default=0.0)
    cached = max((r for w, r in rates.items() if not w.direct), default=0.0)
    assert chosen.rate == rates[chosen.way]
    assert chosen.rate >= (direct if chosen.way.direct else cached) / ALIKE
    # The best of each side may be one that is as good and holds less, so the border is a little wide.
    if cached > ALIKE * CACHED_ENOUGH * direct:
        assert not chosen.way.direct
    if cached * ALIKE < CACHED_ENOUGH * direct:
        assert chosen.way.direct
    assert str(chosen.way) in chosen.why


def test_of_equally_fast_ways_the_one_with_fewest_readers_is_taken() -> None:
    few, many = DIRECT
    assert few.readers < many.readers
    assert choose(ProbeResult({few: 2e9, many: 2e9})).way == few
    assert choose(ProbeResult({few: 2e9, many: 3e9})).way == many


def test_reasons_are_given_in_words() -> None:
    both = {ReadMethod(True, 4, MIB): 2e9, ReadMethod(False, 2, 2 * MIB): 2.2e9}
    assert choose(ProbeResult(both)).why == (
        "direct, 4 threads, 1 MiB at a time: 2.00 GB/s; through the system's cache 2.20 GB/s"
    )
    refused = choose(ProbeResult({ReadMethod(False, 2, 2 * MIB): 2e9}, "Invalid argument"))
    assert refused.why == (
        "cached, 2 threads, 2 MiB at a time: 2.00 GB/s: direct reads are refused (Invalid argument)"
    )
    assert not choose(ProbeResult({}, "Invalid argument")).way.direct
    nothing = choose(ProbeResult({}))
    assert nothing.way.direct
    assert nothing.rate == UNKNOWN_RATE
    assert "too small" in nothing.why


# --- measuring ---------------------------------------------------------------------------------------------


def test_measuring_tries_ways_and_reads_little(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], os.preadv

    def counted(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = real(file, buffers, offset)
        if len(buffers[0]) > mmap.PAGESIZE:  # one page shows whether direct reads work at all
            read.append((offset, got, len(buffers[0])))
        return got

    monkeypatch.setattr(os, "preadv", counted)
    found = measure(model, seconds=30, most=64 * MIB)
    assert sum(got for _, got, _ in read) <= 64 * MIB
    assert {n for _, _, n in read} <= {w.request for w in WAYS}
    assert all(offset % mmap.PAGESIZE == 0 and got == n for offset, got, n in read)
    assert len({offset for offset, _, _ in read}) == len(read)  # nothing twice
    assert set(DIRECT) <= set(found.rates) or found.refused
    assert set(CACHED) <= set(found.rates) or found.unseen
    assert all(rate > 0 for rate in found.rates.values())


def test_parts_that_are_in_the_cache_do_not_count(model: Path) -> None:
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        view.madvise(mmap.MADV_WILLNEED)
        np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE].max()  # mapped pages cannot be dropped
        there = cached_share(file.fileno(), 0, MIB)
        found = measure(model, seconds=30)
    assert there is None or there == 1
    assert not set(CACHED) & set(found.rates)
    assert "cache" in found.unseen


def test_only_what_is_in_the_cache_is_seen_there(model: Path) -> None:
    with model.open("r+b", buffering=0) as file:
        before = cached_share(file.fileno(), 64 * MIB, MIB)
        if before is None:
            pytest.skip("this system does not say what its cache holds")
        os.pwrite(file.fileno(), b"x" * (MIB // 2), 64 * MIB)
        assert before == 0
        assert cached_share(file.fileno(), 64 * MIB, MIB) == 0.5


def test_where_direct_reads_are_refused_the_cache_is_used(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    found = measure(model, seconds=30)
    assert not set(DIRECT) & set(found.rates)
    chosen = choose(found)
    assert not chosen.way.direct
    assert "refused (Invalid argument)" in chosen.why


def test_a_refusal_may_come_with_the_first_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refuse(file: int, buffers: Sequence[mmap.mmap | memoryview], offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    found = measure(model, seconds=30)
    assert found.refused
    assert not set(DIRECT) & set(found.rates)


def test_small_files_and_no_time_are_no_error(model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    small.write_bytes(b"x" * 1000)
    assert measure(small).rates == {}
    assert measure(model, seconds=0).rates == {}
    assert choose(measure(small)).rate == UNKNOWN_RATE


def test_a_disk_that_cannot_be_read_is_an_error_that_names_the_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        disk_of([str(model.with_name("none.gguf"))])

    def broken(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelFileError, match=r"model\.gguf: measuring its disk failed: Input/output error"):
        disk_of([str(model)])


# --- what is known from before -----------------------------------------------------------------------------


def test_a_disk_is_measured_once_and_running_corrects_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def once(path: str) -> ProbeResult:
        measured.append(path)
        return ProbeResult({ReadMethod(True, 4, MIB): 3e9, ReadMethod(True, 2, 2 * MIB): 2e9})

    monkeypatch.setattr(disk_probe, "measure", once)
    monkeypatch.setattr(disk_probe, "go_direct", lambda file: "")
    small = model.with_name("small.gguf")
    small.write_bytes(b"x")
    first = disk_of([str(small), str(model)])
    assert measured == [str(model)]
    assert disk_of([str(model)]) == Disk(first.way, first.rate, first.why)
    assert len(measured) == 1
    for _ in range(20):
        remember(str(model), first.way, 1e9)
    assert disk_of([str(model)]).way == ReadMethod(True, 2, 2 * MIB)
    assert len(measured) == 1
    assert device_of(str(small)) == device_of(str(model))


def test_a_disk_that_refuses_now_is_measured_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        ProbeResult({ReadMethod(True, 4, MIB): 3e9}),
        ProbeResult({ReadMethod(False, 4, MIB): 1e9}, "not here"),
    ]
    monkeypatch.setattr(disk_probe, "measure", lambda path: answers.pop(0))
    monkeypatch.setattr(disk_probe, "go_direct", lambda file: "")
    assert disk_of([str(model)]).way.direct
    monkeypatch.setattr(disk_probe, "go_direct", lambda file: "not here")
    assert "refused (not here)" in disk_of([str(model)]).why


# --- while running -----------------------------------------------------------------------------------------


@given(st.floats(1e8, 1e10), st.lists(st.floats(1e8, 1e10), min_size=1))
def test_a_rate_stays_between_what_was_seen(first: float, seen: list[float]) -> None:
    rate = DiskRate(first)
    for r in seen:
        rate.observe(MIB * 100, MIB * 100 / r, MIB * 100 / r)
    assert min(first, *seen) * 0.999 <= rate.rate <= max(first, *seen) * 1.001


def test_a_rate_follows_the_disk_within_some_gigabytes() -> None:
    rate = DiskRate(4e9)
    rate.observe(HORIZON, HORIZON / 1e9, HORIZON / 1e9)
    assert rate.rate == pytest.approx(1.6e9)  # the mean of the times
    for _ in range(10):
        rate.observe(HORIZON, HORIZON / 1e9, HORIZON / 1e9)
    assert rate.rate == pytest.approx(1e9, rel=0.01)


def test_a_pass_that_never_waited_says_only_what_the_disk_gives_at_least() -> None:
    rate = DiskRate(2e9)
    rate.observe(10**9, 1.0, 0.0)
    assert rate.rate == 2e9
    rate.observe(10**9, 0.25, 0.0)
    assert rate.rate > 2e9
    for nothing in (0, -1):
        rate.observe(nothing, 1.0, 1.0)
        rate.observe(10**9, nothing, 1.0)
    assert rate.rate < 4e9
