"""The ring that C threads fill: what they read and when, what takers get, and what becomes of failures."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hetrun.errors import BackendError
from hetrun.prefetch import ring_buffer as module
from hetrun.prefetch.native import OpenFile
from hetrun.prefetch.ring_buffer import BOUNCE, ENDED, MISTAKE, PAGE, PIECE, RingBuffer, RingShape
from tests.support.supplies import Disk, Taker, eventually

pytestmark = pytest.mark.skipif(module.library() is None, reason="there was no C compiler at installation")

EVERYTHING = 1 << 40
CONTENT = random.Random(1).randbytes(40 * PAGE)


def pieces_of(count: int, first: int = 0) -> NDArray[np.void]:
    """Piece i is page 2i and the one behind it."""
    table = np.zeros(count, PIECE)
    for i, row in enumerate(table):
        row["count"] = 1
        row["extents"][0] = 0, 2 * (first + i) * PAGE, 2 * PAGE, 0, 0
    return table


def content(piece: int) -> bytes:
    return CONTENT[2 * piece * PAGE : 2 * (piece + 1) * PAGE]


@contextmanager
def ring_of(
    disk: Disk, slots: int = 4, threads: int = 1, synchronous: bool = False, direct: bool = True
) -> Iterator[tuple[RingBuffer, Taker]]:
    """A ring on a disk of the test's own."""
    files = [OpenFile(i, direct) for i in range(len(disk.files))]
    made = RingBuffer(
        files, RingShape(slots, 4 * PAGE, 0 if synchronous else threads, synchronous), disk.function
    )
    try:
        yield made, Taker(made.address)
    finally:
        made.close()


def run_pass(ring: RingBuffer, taker: Taker, wanted: bool, pieces: Sequence[int]) -> bool:
    """Take all pieces in their order, and check them; whether they came."""
    ring.begin(wanted)
    for rank, piece in enumerate(pieces):
        found = taker.take(rank, 0, 2 * PAGE)
        if found is None:
            return False
        assert found == content(piece), f"rank {rank} is not piece {piece}"
    return True


def read_pieces(disk: Disk) -> list[int]:
    """Which pieces were read, in the order of the reads."""
    return [offset // PAGE // 2 for _, offset, _ in disk.reads]


def test_laps_follow_each_other_and_only_what_every_pass_takes_is_read_ahead_of_one() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots=4, threads=1) as (ring, taker):
        ring.follow(pieces_of(6), always=3)
        eventually(lambda: ring.counts().reads == 3)
        assert run_pass(ring, taker, True, range(6))
        eventually(lambda: ring.counts().reads == 9)
        assert run_pass(ring, taker, False, range(3))
        assert run_pass(ring, taker, False, range(3))
        eventually(lambda: ring.counts().reads == 15)
        assert read_pieces(disk) == [0, 1, 2, 3, 4, 5, *[0, 1, 2] * 3]
        assert ring.counts().bytes == 15 * 2 * PAGE
        assert ring.counts().lap_bytes == 3 * 2 * PAGE


def test_no_more_is_read_than_the_ring_holds() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots=4, threads=3) as (ring, taker):
        ring.follow(pieces_of(10), always=10)
        ring.begin(True)
        assert taker.bytes_of(3, 0, 2 * PAGE) == content(3)
        eventually(lambda: ring.counts().bytes == 8 * PAGE)
        taker.release(3)  # its slot is not the one that is next
        assert taker.bytes_of(0, 0, 2 * PAGE) == content(0)
        assert sorted(read_pieces(disk)) == [0, 1, 2, 3]
        taker.release(0)
        assert taker.bytes_of(4, 0, 2 * PAGE) == content(4)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("slots", [2, 3, 7])
def test_threads_take_pieces_in_any_order_within_the_ring(slots: int, synchronous: bool) -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots, 2, synchronous) as (ring, taker), ThreadPoolExecutor(2) as pool:
        ring.follow(pieces_of(20), always=16)

        def some(first: int, count: int) -> list[bytes | None]:
            return [taker.take(rank, 0, 2 * PAGE) for rank in range(first, count, 2)]

        for wanted in (True, False, True):
            count = 20 if wanted else 16
            ring.begin(wanted)
            odd, even = pool.submit(some, 1, count), pool.submit(some, 0, count)
            assert even.result() == [content(i) for i in range(0, count, 2)]
            assert odd.result() == [content(i) for i in range(1, count, 2)]
        assert ring.counts().missing == 0


def test_a_synchronous_ring_reads_what_is_waited_for() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots=3, synchronous=True) as (ring, taker):
        ring.follow(pieces_of(6), always=6)
        ring.begin(True)
        assert disk.reads == []
        for rank in (1, 0, 2, 4, 3, 5):
            assert taker.take(rank, 0, 2 * PAGE) == content(rank)
        assert read_pieces(disk) == [1, 0, 2, 4, 3, 5]
        assert ring.counts().waited > 0


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(("answer", "error"), [(-errno.EIO, errno.EIO), (0, ENDED)])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 11])
def test_a_failed_read_ends_the_pass_and_no_other(
    answer: int, error: int, every: int, synchronous: bool
) -> None:
    """Whatever read fails: nothing wrong is ever given out, and the ring goes on behind a restart."""
    disk = Disk(CONTENT, before=lambda n: EVERYTHING if (n + 1) % every else answer)
    with ring_of(disk, 3, 2, synchronous) as (ring, taker):
        ring.follow(pieces_of(6), always=5)
        failed = 0
        for lap in range(12):
            wanted = lap % 3 == 0
            if run_pass(ring, taker, wanted, range(6 if wanted else 5)):
                continue
            failed += 1
            found = ring.fault()
            assert found is not None
            assert found.error == error
            assert found.offset in range(0, 12 * PAGE, 2 * PAGE)
            ring.restart()
        assert failed >= (12 if every == 1 else 1)
        disk.before = None
        ring.restart()
        assert all(run_pass(ring, taker, True, range(6)) for _ in range(3))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [3 * PAGE, 3 * PAGE - 1, 2 * PAGE + 100, 2 * PAGE])
def test_it_is_known_where_a_file_ends_too_early(size: int, direct: bool) -> None:
    with ring_of(Disk(CONTENT[:size]), direct=direct) as (ring, taker):
        ring.follow(pieces_of(2), always=2)
        assert not run_pass(ring, taker, True, range(2))
        found = ring.fault()
        assert found is not None
        assert (found.error, found.file, found.offset) == (ENDED, 0, size)


def test_what_fails_ahead_of_a_pass_is_tried_again_by_it() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots=2, threads=1) as (ring, taker):
        ring.follow(pieces_of(3), always=3)
        ring.begin(True)
        assert taker.take(0, 0, 2 * PAGE) == content(0)
        eventually(lambda: ring.counts().reads == 3)
        disk.before = lambda _: -errno.EIO
        assert taker.take(1, 0, 2 * PAGE) == content(1)
        eventually(lambda: ring.fault() is not None)
        assert taker.take(2, 0, 2 * PAGE) == content(2)  # which is not of the lap to come
        disk.before = None
        assert run_pass(ring, taker, True, range(3))
        assert ring.fault() is None


def test_what_fails_ahead_of_a_pass_that_has_begun_meanwhile_is_tried_again_too() -> None:
    gate = threading.Event()

    def before(number: int) -> int:
        if number != 3:
            return EVERYTHING
        gate.wait(20)
        return -errno.EIO

    disk = Disk(CONTENT, before=before)
    with ring_of(disk, slots=4, threads=1) as (ring, taker):
        ring.follow(pieces_of(3), always=3)
        assert run_pass(ring, taker, True, range(3))
        eventually(lambda: len(disk.reads) == 4)  # the last one ahead of the next pass
        ring.begin(True)
        gate.set()
        assert [taker.take(rank, 0, 2 * PAGE) for rank in range(3)] == [content(i) for i in range(3)]
        assert read_pieces(disk)[:5] == [0, 1, 2, 0, 0]


def test_a_stop_ends_waiting_and_a_restart_begins_with_the_first_piece() -> None:
    gate = threading.Event()

    def before(number: int) -> int:
        if number == 2:
            gate.wait(20)
        return EVERYTHING

    disk = Disk(CONTENT, before=before)
    with ring_of(disk, slots=4, threads=1) as (ring, taker), ThreadPoolExecutor(2) as pool:
        ring.follow(pieces_of(6), always=6)
        ring.begin(True)
        assert taker.take(0, 0, 2 * PAGE) == content(0)
        waiting = pool.submit(taker.wait, 2)
        eventually(lambda: len(disk.reads) == 3)
        ring.stop()
        assert waiting.result(20) is None  # with the read still on its way
        assert taker.wait(1) is None  # though it is there
        assert taker.read(0, 0, 10) is None
        assert ring.fault() is None
        restarting = pool.submit(ring.restart)
        gate.set()
        restarting.result(20)
        assert run_pass(ring, taker, True, range(6))


def test_a_ring_can_be_closed_while_it_is_filled() -> None:
    for _ in range(20):
        with ring_of(Disk(CONTENT), slots=8, threads=4) as (ring, _taker):
            ring.follow(pieces_of(20), always=20)
    ring.stop()  # from a caller that comes late
    ring.close()


def test_a_pass_has_to_take_everything() -> None:
    with ring_of(Disk(CONTENT)) as (ring, taker):
        ring.follow(pieces_of(3), always=2)
        ring.begin(True)
        taker.take(0, 0, 1)
        with pytest.raises(BackendError, match="2 pieces"):
            ring.begin(True)
        with pytest.raises(BackendError, match="2 pieces"):
            ring.follow(pieces_of(2), always=2)
        ring.restart()
        assert run_pass(ring, taker, False, range(2))


@pytest.mark.parametrize("rank", [-1, 2, 3, 1000])
def test_a_piece_that_a_pass_does_not_have_is_a_mistake(rank: int) -> None:
    with ring_of(Disk(CONTENT)) as (ring, taker):
        ring.follow(pieces_of(3), always=2)
        ring.begin(False)
        taker.release(rank)  # which changes nothing
        assert ring.counts().missing == 2
        assert taker.wait(rank) is None
        found = ring.fault()
        assert found is not None
        assert (found.error, found.offset) == (MISTAKE, rank)


def test_a_piece_is_taken_once() -> None:
    with ring_of(Disk(CONTENT)) as (ring, taker):
        ring.follow(pieces_of(3), always=3)
        ring.begin(False)
        assert taker.take(1, 0, 2 * PAGE) == content(1)
        taker.release(1)  # a second time, which changes nothing
        assert ring.counts().missing == 2
        assert taker.wait(1) is None
        found = ring.fault()
        assert found is not None
        assert (found.error, found.offset) == (MISTAKE, 1)


def test_another_schedule_keeps_what_was_read_ahead_as_far_as_it_is_the_same() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk, slots=4) as (ring, taker):
        ring.follow(pieces_of(6), always=6)
        eventually(lambda: ring.counts().bytes == 8 * PAGE)
        ring.follow(np.concatenate([pieces_of(2), pieces_of(3, first=7)]), always=5)
        assert run_pass(ring, taker, False, [0, 1, 7, 8, 9])
        assert sorted(read_pieces(disk)[:7]) == [0, 1, 2, 3, 7, 8, 9]  # 2 and 3 for nothing
        ring.follow(pieces_of(0), always=0)
        assert run_pass(ring, taker, True, [])
        ring.follow(pieces_of(1), always=0)
        assert run_pass(ring, taker, False, [])
        assert run_pass(ring, taker, True, [0])


def test_another_schedule_reads_again_what_failed_ahead_of_it() -> None:
    disk = Disk(CONTENT, before=lambda n: EVERYTHING if n != 1 else -errno.EIO)
    with ring_of(disk) as (ring, taker):
        ring.follow(pieces_of(3), always=3)
        eventually(lambda: ring.fault() is not None)
        ring.follow(pieces_of(4), always=4)
        assert ring.fault() is None
        assert run_pass(ring, taker, True, range(4))


@pytest.mark.parametrize("direct", [False, True])
def test_reads_go_on_where_they_came_to_an_end(direct: bool) -> None:
    """Direct reads from the beginning of a page, as nothing else is allowed."""
    disk = Disk(CONTENT, before=lambda _: PAGE + 100)
    with ring_of(disk, slots=1, direct=direct) as (ring, taker):
        ring.follow(pieces_of(1), always=0)
        assert run_pass(ring, taker, True, [0])
        more = (PAGE, PAGE) if direct else (PAGE + 100, PAGE - 100)
        assert disk.reads == [(0, 0, 2 * PAGE), (0, *more)]


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_a_read_that_was_disturbed_is_done_again(error: int) -> None:
    disk = Disk(CONTENT, before=lambda n: EVERYTHING if n % 3 == 2 else -error)
    with ring_of(disk) as (ring, taker):
        ring.follow(pieces_of(3), always=3)
        assert run_pass(ring, taker, True, range(3))
        assert taker.read(0, 5, 10) == CONTENT[5:15]
        assert ring.counts().reads >= 4


def test_a_stop_ends_a_read_that_would_be_tried_for_ever() -> None:
    disk = Disk(CONTENT, before=lambda _: -errno.EAGAIN)
    with ring_of(disk) as (ring, taker), ThreadPoolExecutor(1) as pool:
        ring.follow(pieces_of(3), always=3)
        ring.begin(True)
        waiting = pool.submit(taker.wait, 0)
        eventually(lambda: len(disk.reads) > 3)
        ring.stop()
        assert waiting.result(20) is None


def test_extents_of_one_run_follow_each_other() -> None:
    """Whatever page they begin on, in files of their own."""
    other = random.Random(2).randbytes(10 * PAGE)
    disk = Disk(CONTENT, other)
    piece = np.zeros(1, PIECE)
    piece["count"] = 3
    at = 2 * PAGE
    piece["extents"][0][:3] = [(0, 100, 4000, 0, 100), (1, 5000, 77, PAGE * 2, 4100), (0, 9000, 50, at, 4177)]
    with ring_of(disk, slots=2) as (ring, taker):
        ring.follow(piece, always=1)
        for _ in range(3):
            ring.begin(True)
            assert taker.take(0, 100, 4127) == CONTENT[100:4100] + other[5000:5077] + CONTENT[9000:9050]


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, 3 * PAGE, 3 * PAGE + 1, 20 * PAGE, BOUNCE, 2 * BOUNCE + 5])
def test_any_bytes_of_a_file_can_be_read_now(nbytes: int) -> None:
    file = random.Random(3).randbytes(3 * BOUNCE)
    with ring_of(Disk(CONTENT, file)) as (ring, taker):
        for offset in (0, 1, PAGE - 1, PAGE, 12345, len(file) - nbytes):
            assert taker.read(1, offset, nbytes) == file[offset : offset + nbytes]
            out = np.zeros(nbytes, np.uint8)
            assert ring.fetch(1, offset, out) is None
            assert out.tobytes() == file[offset : offset + nbytes]


def test_a_row_that_cannot_be_read_ends_the_pass_but_not_if_the_owner_asked() -> None:
    disk = Disk(CONTENT)
    with ring_of(disk) as (ring, taker):
        found = ring.fetch(0, len(CONTENT) - 5, np.zeros(10, np.uint8))
        assert found is not None
        assert (found.error, found.file, found.offset) == (ENDED, 0, len(CONTENT))
        assert ring.fault() is None
        assert taker.read(0, len(CONTENT) - 5, 10) is None
        found = ring.fault()
        assert found is not None
        assert (found.error, found.file, found.offset) == (ENDED, 0, len(CONTENT))
        assert taker.read(0, 0, 10) is None
        assert ring.counts().missing == 2  # although the pass has no pieces
        ring.restart()
        assert ring.counts().missing == 0
        assert taker.read(0, 0, 10) == CONTENT[:10]
        disk.before = lambda _: -errno.EIO
        found = ring.fetch(0, 777, np.zeros(10, np.uint8))
        assert found is not None
        assert (found.error, found.offset) == (errno.EIO, 777)  # not the beginning of its page


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at as Linux shows them")
def test_readers_have_a_name_and_leave_signals_to_others() -> None:
    def readers() -> list[str]:
        tasks = [Path("/proc/self/task", task) for task in os.listdir("/proc/self/task")]
        return [
            (task / "status").read_text()
            for task in tasks
            if (task / "comm").read_text() == "hetrun-reader\n"
        ]

    before = len(readers())
    with ring_of(Disk(CONTENT), threads=3):
        eventually(lambda: len(readers()) == before + 3)
        for status in readers():
            blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk"))[7:], 16)
            assert blocked & 1 << 1  # SIGINT
            assert blocked & 1 << 13  # SIGALRM
    assert len(readers()) == before
