"""ring_reader.c, expert_slots.c and pages.c: weights that come from disk, with tables, ranks and files as
bad as may be, and disks that fail, give little, or are stopped in the middle."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from ctypes import addressof
from random import Random

import numpy as np

from hetrun.backends.llamacpp.kernels import paging
from hetrun.backends.llamacpp.kernels.paging import BringNode, PagingUnit, Pool, Range, Visit
from hetrun.errors import HetrunError
from hetrun.prefetch.expert_cache import ExpertCache, ExpertReading
from hetrun.prefetch.expert_records import records_of
from hetrun.prefetch.native import OpenFile, ReadFunction
from hetrun.prefetch.ring_buffer import BOUNCE, PAGE, PIECE, RingBuffer, RingShape
from tests.sanitizers.inputs import Input, folder, node, pooled
from tests.sanitizers.memory import Array
from tests.support.supplies import Disk, Taker
from tests.unit import test_expert_cache as cache_tests

CONTENT = Random(1).randbytes(64 * PAGE + 1234)
SLOT = 6 * PAGE
ERRORS = (errno.EIO, errno.EINTR, errno.EAGAIN)
FULL = 1 << 40


def disk_of(case: Input, content: bytes) -> Disk:
    """Gives all at once, some of it, or now and then an error."""
    rng, kind = Random(case.rng.getrandbits(32)), case.rng.randrange(4)

    def before(number: int) -> int:
        if kind == 1:
            return rng.randint(1, 3 * PAGE)
        if kind == 2 and rng.random() < 0.2:
            return -rng.choice(ERRORS)
        return 0 if kind == 3 and rng.random() < 0.05 else FULL

    return Disk(content, before=before)


# --- the ring


def schedule_of(case: Input, count: int) -> Array:
    """Pieces of several extents that begin anywhere, one after the other in a slot."""
    table = np.zeros(count, PIECE)
    for row in table:
        at = to = 0
        for i in range(case.rng.randint(1, 3)):
            offset = case.rng.randrange(len(CONTENT) - 2 * PAGE)
            size = case.rng.randint(1, PAGE + 500)
            skip = offset % PAGE
            if i == 0:
                to = skip
            row["extents"][i] = 0, offset, size, at, to
            row["count"] = i + 1
            to += size
            at = -(-to // PAGE) * PAGE
            if at + 3 * PAGE > SLOT:
                break
    return table


def content_of(row: np.void) -> bytes:
    extents = row["extents"][: row["count"]]
    return b"".join(CONTENT[e["offset"] : e["offset"] + e["bytes"]] for e in extents)


def take_all(ring: RingBuffer, taker: Taker, schedule: Array, count: int, threads: int) -> bool:
    """A lap; whether all pieces came. Those that came hold what the file does."""
    ring.begin(count == len(schedule))
    complete = [True] * threads

    def take(thread: int) -> None:
        for rank in range(thread, count, threads):
            row = schedule[rank]
            right = content_of(row)
            found = taker.take(rank, int(row["extents"][0]["to"]), len(right))
            if found is None:
                complete[thread] = False
                return
            assert found == right, "a piece has other bytes than its file"

    pooled(take, threads)
    return all(complete)


def ring(case: Input) -> None:
    """Laps by several threads, mistakes, stops from elsewhere, and reads of any bytes."""
    rng, threads = case.rng, case.rng.randint(1, 3)
    synchronous, count = case.chance(4), case.rng.randint(0, 12)
    schedule, disk = schedule_of(case, count), disk_of(case, CONTENT)
    shape = RingShape(rng.randint(threads, 8), SLOT, 0 if synchronous else rng.randint(1, 3), synchronous)
    made = RingBuffer([OpenFile(0, case.chance(2))], shape, disk.function)
    taker = Taker(made.address)
    try:
        always = rng.randint(0, count)
        made.follow(schedule, always)
        for _ in range(rng.randint(1, 4)):
            lap(case, made, taker, schedule, rng.choice((count, always)), threads)
    finally:
        made.close()


def lap(case: Input, made: RingBuffer, taker: Taker, schedule: Array, count: int, threads: int) -> None:
    """One lap, and what may go wrong in it."""
    rng, kind = case.rng, case.rng.randrange(5)
    if kind == 0:  # as who has read a damaged table would ask
        made.begin(count == len(schedule))
        rank = rng.choice((-1, -2, -1000, count, count + 1, 1 << 40, -(1 << 40)))
        taker.release(rank)
        assert taker.wait(rank) is None, "a piece came that there is not"
        made.restart()
        return
    stopper = threading.Timer(rng.random() / 1000, made.stop) if kind == 1 else None
    if stopper:
        stopper.start()
    came = take_all(made, taker, schedule, count, threads)
    if stopper:
        stopper.join()
    size, offset = rng.choice((0, 1, 100, PAGE, 5 * PAGE, BOUNCE)), rng.randrange(len(CONTENT))
    found = taker.read(0, offset, size)
    assert found is None or found == CONTENT[offset : offset + size], "other bytes than the file has"
    out = case.memory.array(size)
    if made.fetch(0, offset, out) is None:
        assert out.tobytes() == CONTENT[offset : offset + size], "other bytes than the file has"
    if stopper or not came or made.fault():
        made.restart()


# --- experts


def experts(case: Input) -> None:
    """Choices, hints, memory that comes and goes, and reads that fail."""
    rng = case.rng
    with folder() as room:
        path = room / "m"
        records = records_of(cache_tests.mixtures_in(path, 2))
        assert records is not None
        disk = disk_of(case, path.read_bytes())
        reading = ExpertReading(rng.randint(1, 6), rng.randint(1, 3), case.chance(2), most=8)
        read = disk.function if case.chance(2) else None
        made = ExpertCache(records, reading, _only(disk) if read else None)
        try:
            made.resize([rng.randint(1, 40)])
            driver = cache_tests.Driver(made)
            for _ in range(rng.randint(1, 12)):
                visit(case, made, driver)
        finally:
            made.close()


def _only(disk: Disk) -> ReadFunction:
    """A disk whose only file has every number."""
    # It has every number, which no tuple has.
    disk.files = _Everywhere(disk.files[0])  # type: ignore[assignment]
    found: ReadFunction = disk.function
    return found


class _Everywhere:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __getitem__(self, number: int) -> bytes:
        return self._content

    def __len__(self) -> int:
        return 1


def visit(case: Input, made: ExpertCache, driver: cache_tests.Driver) -> None:
    """A pass through one mixture, or something that happens between passes."""
    rng, kind = case.rng, case.rng.randrange(10)
    if kind == 0:
        made.resize([rng.randint(1, 64)])
    elif kind == 1:
        made.widen(rng.randint(1, 8))
    elif kind == 2:
        made.listen(case.chance(2))
    made.begin(rng.randint(1, 3))
    mixture = rng.randrange(2)
    driver.hint(1 - mixture, rng.sample(range(cache_tests.EXPERTS), rng.randint(0, 9)))
    chosen = sorted(rng.sample(range(cache_tests.EXPERTS), rng.choice((1, 4, 8, 32))))
    stopper = threading.Timer(rng.random() / 1000, made.stop) if kind == 3 else None
    if stopper:
        stopper.start()
    try:
        assert sorted(driver.choose(mixture, chosen)) == chosen, "other experts came than were chosen"
        made.end()
    except (HetrunError, AssertionError):
        if stopper is None and made._error() is None:
            raise
        if stopper:
            stopper.join()
        made.restart()
    if stopper:
        stopper.join()
        made.restart()
    assert made.held_bytes <= made.promised_bytes + 1


# --- mapped weights


def pages(case: Input) -> None:
    """Units of a mapped file come and go; ids that no expert has are let be."""
    rng, page = case.rng, mmap.PAGESIZE
    count, units = rng.randint(1, 9), list[tuple[int, int]]()
    ranges = list[tuple[int, int]]()  # offset, bytes
    at = rng.randint(0, 50)
    for _ in range(count):
        first = len(ranges)
        for _ in range(rng.randint(1, 3)):
            size = rng.choice((1, 100, page, 3 * page + 7, rng.randint(1, 5 * page)))
            ranges.append((at, size))
            at += size + rng.choice((0, 1, page))
        units.append((first, len(ranges) - first))
    with folder() as room, (room / "m").open("w+b") as file:
        file.write(Random(3).randbytes(at))
        file.flush()
        with mmap.mmap(file.fileno(), at, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
            whole = np.frombuffer(mapped, np.uint8)
            _visit_pages(case, whole, file.fileno(), ranges, units)
            del whole


def _visit_pages(
    case: Input, whole: Array, fd: int, ranges: list[tuple[int, int]], units: list[tuple[int, int]]
) -> None:
    rng, lib, memory = case.rng, paging.pager(), case.memory
    assert lib is not None
    n = len(units)
    range_table = memory.array(len(ranges) * ctypes.sizeof(Range), np.uint8, 8)
    unit_table = memory.array(n * ctypes.sizeof(PagingUnit), np.uint8, 8)
    made_ranges = (Range * len(ranges))(*(Range(whole.ctypes.data + o, s, fd, o) for o, s in ranges))
    sizes = [sum(ranges[i][1] for i in range(first, first + count)) for first, count in units]
    made_units = (PagingUnit * n)(
        *(
            PagingUnit(first, count, size, case.chance(3), -1, -1, 0, 0)
            for (first, count), size in zip(units, sizes, strict=True)
        )
    )
    range_table[:] = np.frombuffer(bytes(made_ranges), np.uint8)
    unit_table[:] = np.frombuffer(bytes(made_units), np.uint8)
    coming, going = memory.full(n, 0, np.int64), memory.full(n, 0, np.int64)
    room = rng.randint(1, sum(sizes) + 1)
    pool = Pool(
        units=unit_table.ctypes.data, ranges=range_table.ctypes.data, page=mmap.PAGESIZE, room=room,
        resident=0, first=-1, last=-1, coming=coming.ctypes.data, going=going.ctypes.data,
    )  # fmt: skip
    for _ in range(rng.randint(1, 20)):
        wanted = visited(case, lib, pool, n)
        if case.chance(6):
            pool.room = rng.randint(1, sum(sizes) + 1)
            lib.trim(pool)
        assert pool.resident <= max(pool.room, wanted_bytes(sizes, wanted)), "more is in memory than may be"
        assert chain(pool, unit_table, n) <= n, "the order of the units is broken"


def visited(case: Input, lib: paging.Pager, pool: Pool, n: int) -> list[int]:
    """One visit by several threads; the units that it wanted."""
    rng, threads = case.rng, case.rng.randint(1, 3)
    visit = Visit(pool=addressof(pool), unit=0, units=n, next=-1)
    if case.chance(2):
        rows, used, gap = rng.randint(1, 5), rng.randint(1, 4), rng.randint(0, 2)
        hostile = (-1, n, n + 1, 2**31 - 1, -(2**31))
        flat = case.memory.full((rows - 1) * (used + gap) + used, 0, np.int32)
        flat[:] = [rng.choice(hostile) if case.chance(5) else rng.randrange(n) for _ in flat]
        visit.ids, visit.rows, visit.used, visit.stride = flat.ctypes.data, rows, used, used + gap
        wanted = [i for i in flat.tolist() if 0 <= i < n]
    else:
        visit.unit, visit.next = rng.randrange(n), rng.choice((-1, rng.randrange(n)))
        wanted = [visit.unit, *([visit.next] if visit.next >= 0 else [])]
    node(lib.visit, visit, threads)
    if case.chance(8):  # a cancellation leaves it half way
        return wanted
    whole = BringNode(visit=addressof(visit), first=0, end=99)
    parts = [(0, 1), (1, 99)] if case.chance(2) else [(0, 99)]
    for whole.first, whole.end in parts:
        node(lib.bring, whole, threads)
    return wanted


def wanted_bytes(sizes: list[int], wanted: list[int]) -> int:
    return sum(sizes[i] for i in set(wanted))


def chain(pool: Pool, table: Array, n: int) -> int:
    """How many units the order has, from the first to the last; both ways it is the same."""
    units = (PagingUnit * n).from_address(table.ctypes.data)
    forth, at = list[int](), int(pool.first)
    while at >= 0 and len(forth) <= n:
        forth.append(at)
        at = int(units[at].behind)
    back, at = list[int](), int(pool.last)
    while at >= 0 and len(back) <= n:
        back.append(at)
        at = int(units[at].before)
    assert forth == back[::-1], "the order of the units is another one backwards"
    return len(forth)
