"""How fast memory can be read, and what the shares of limits are of."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.tools.bench import memory_bandwidth, read_kernels
from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.memory_bandwidth import (
    MemoryBandwidth,
    bandwidth,
    last_caches,
    memory,
    rounded,
    usual,
)
from hetrun.tools.bench.read_kernels import (
    LINE,
    CompiledRead,
    ReadBlock,
    Reader,
    ReadRound,
    by_search,
    side_by_side,
)
from hetrun.tools.bench.roofline import Demands, LayerExperts, ReadBytes

GIGA = 1e9


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST", "TRIED", "READ"):
        monkeypatch.setattr(memory_bandwidth, name, 1 << 20)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("way", [*read_kernels.readers(), by_search])
def test_every_way_reads_in_every_round(way: Reader, threads: int) -> None:
    with ReadBlock(ReadRound(threads, 64 * LINE, 3)) as block:
        assert block.work.nbytes == threads * 3 * 64 * LINE
        assert [block.part(i) - block.part(0) for i in range(threads)] == [
            i * 64 * LINE for i in range(threads)
        ]
        assert all(0 < seconds < 60 for seconds in way(block, 5))
        assert len(way(block, 5)) == 5


def test_more_to_read_takes_longer() -> None:
    with ReadBlock(ReadRound(1, 64 * LINE)) as small, ReadBlock(ReadRound(1, 64 * LINE, 2000)) as large:
        for way in (*read_kernels.readers(), by_search):
            assert min(way(large, 3)) > 10 * min(way(small, 3))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nbytes", [1, 5000, 8 << 20])
@pytest.mark.usefixtures("_quick")
def test_memory_can_be_read(threads: int, nbytes: int) -> None:
    assert 1e7 < bandwidth(threads, nbytes, rounds=2, tries=1) < 1e13


@pytest.mark.parametrize("found", ["nothing", "another version"])
@pytest.mark.usefixtures("_quick")
def test_without_the_library_the_c_librarys_search_reads(
    found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read_kernels.readers.cache_clear()
    if found == "nothing":
        monkeypatch.setattr(read_kernels, "__file__", str(tmp_path / "read_kernels.py"))
    else:
        monkeypatch.setattr(read_kernels, "VERSION", -1)
    try:
        assert read_kernels.readers() == (by_search,)
        assert 1e7 < bandwidth(2, 1 << 20, rounds=2) < 1e13
    finally:
        read_kernels.readers.cache_clear()


def test_the_library_knows_ways_for_every_processor() -> None:
    ways = read_kernels.readers()
    if ways == (by_search,):
        pytest.skip("there was no C compiler when hetrun was installed")
    assert len(ways) >= 3
    assert [way.way for way in ways if isinstance(way, CompiledRead)] == list(range(len(ways)))


def test_threads_that_wait_are_freed_where_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, gate = threading.Thread.start, threading.Event()
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        side_by_side(2, lambda i: gate.wait(60), gate.set)
    assert not started[0].is_alive()


def test_the_fastest_way_counts_and_the_best_quarter_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def way(name: str, *seconds: float) -> Reader:
        rounds: Iterator[float] = iter(seconds * 20)

        def read(block: ReadBlock, n: int) -> Sequence[float]:
            asked.append(f"{name}{n}")
            return [next(rounds) for _ in range(n)]

        return read

    monkeypatch.setattr(
        memory_bandwidth, "readers", lambda: (way("slow", 3.0), way("fast", 2.0, 9.0), way("odd", 8.0))
    )
    monkeypatch.setattr(memory_bandwidth, "TRIED", 5 * memory_bandwidth.LEAST)
    monkeypatch.setattr(memory_bandwidth, "READ", 0)
    found = bandwidth(2, memory_bandwidth.LEAST, rounds=8, tries=4)
    assert asked == ["slow5", "fast5", "odd5", "fast8"]
    assert found == pytest.approx(memory_bandwidth.LEAST / 2.0)
    with ReadBlock(ReadRound(1, LINE)) as block:
        assert usual(way("w", 5.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0, 9.0), block, 8) == 1.5


def test_the_most_that_was_measured_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3.0, 1.0, 5.0, 2.0])
    monkeypatch.setattr(memory_bandwidth, "_most", {})
    monkeypatch.setattr(memory_bandwidth, "bandwidth", lambda n, nbytes: next(found))
    assert [memory_bandwidth._bandwidth(1, 8) for _ in range(3)] == [3.0, 3.0, 5.0]
    assert memory_bandwidth._bandwidth(2, 8) == 2.0


@given(st.floats(0, 1e12))
def test_sizes_are_rounded_so_little_that_no_cache_notices(nbytes: float) -> None:
    found = rounded(nbytes)
    assert found >= 1
    assert abs(found - max(nbytes, 1)) <= 0.05 * max(nbytes, 1) + 1
    assert rounded(found) == found


def test_a_block_that_a_cache_holds_has_two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def measure(n: int, nbytes: int, again: bool) -> float:
        measured.append((n, nbytes))
        return n * (20 * GIGA if nbytes > 10**8 else 30 * GIGA if nbytes > 10**6 else 5 * GIGA)

    monkeypatch.setattr(memory_bandwidth, "_bandwidth", measure)
    monkeypatch.setattr(memory_bandwidth, "_large", lambda: 10**9)
    small = memory(2, 98.4e6)
    assert small == MemoryBandwidth(2, 98_000_000, 60 * GIGA, 40 * GIGA)
    assert small.cached
    assert small.text == (
        "memory gives 60.0 GB/s to 2 threads for blocks of 93 MiB (in part from a cache), 40.0 from DRAM"
    )
    measured.clear()
    large = memory(1, 3.2e9)
    assert measured == [(1, 10**9)]  # there is nothing else to know
    assert (large.rate, large.dram, large.cached) == (20 * GIGA, 20 * GIGA, False)
    assert large.text == "memory gives 20.0 GB/s to 1 thread"
    # A block so small that its rounds say little is not held to be further away than DRAM.
    assert memory(1, 1000).rate == 20 * GIGA


def test_a_block_without_a_cache_is_larger_than_two_of_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_bandwidth, "last_caches", lambda: [3 << 30, 1 << 30])
    for free, size in ((1 << 40, 8 << 30), (16 << 30, 4 << 30), (1 << 30, 512 << 20)):
        monkeypatch.setattr(memory_bandwidth, "available_memory", lambda free=free: free)
        assert memory_bandwidth._large() == size


def write_cache(cpus: Path, core: int, *caches: tuple[int, str, str]) -> None:
    for i, (level, shared, size) in enumerate(caches):
        folder = cpus / f"cpu{core}" / "cache" / f"index{i}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("shared_cpu_list", shared), ("size", size)):
            (folder / name).write_text(f"{text}\n")


def test_each_last_cache_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for core, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        write_cache(tmp_path, core, (1, str(core), "48K"), (3, shared, "32768K"))
    (tmp_path / "cpu3" / "cache" / "index0").mkdir(parents=True)  # a system that does not tell
    assert last_caches(tmp_path) == [32 << 20, 32 << 20]
    write_cache(tmp_path / "none", 0, (2, "0", "a lot"))
    assert last_caches(tmp_path / "none") == last_caches(tmp_path / "missing") == []


def test_experts_that_rest_are_part_of_the_block() -> None:
    model = Demands(ReadBytes(100, ((2, 0),), (LayerExperts(800, 8, 2),)), None)
    step = model.of(BenchCase("decode", 9, 100))
    assert step.nbytes == 100 + 200 + 2 * 105
    assert step.block == 100 + 800 + 2 * 105
    dense = Demands(ReadBytes(100, ((2, 0),)), None).of(BenchCase("decode", 9, 100))
    assert dense.block == dense.nbytes


def test_addresses_are_whole_lines_of_pages() -> None:
    with ReadBlock(ReadRound(3, 5 * LINE)) as block:
        assert block.part(0) % 4096 == 0
        assert ctypes.string_at(block.part(2), 5 * LINE) == b"\1" * 5 * LINE


def test_memory_is_measured_again_only_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def bandwidth(n: int, nbytes: int) -> float:
        measured.append((n, nbytes))
        return 1e9 * len(measured)

    monkeypatch.setattr(memory_bandwidth, "bandwidth", bandwidth)
    monkeypatch.setattr(memory_bandwidth, "_most", {})
    monkeypatch.setattr(memory_bandwidth, "_large", lambda: 1 << 30)
    first = memory(2, 1 << 20, again=False)
    assert (first.dram, first.rate) == (1e9, 2e9)
    assert memory(2, 1 << 20, again=False) == first
    assert len(measured) == 2
    assert memory(2, 1 << 20).rate == 4e9
    assert memory(1, 1 << 20, again=False).threads == 1
    assert len(measured) == 6
