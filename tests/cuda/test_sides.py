"""A pass that goes from the GPU to the CPU and back: little Python runs in between, mixing no passes up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest

from hetrun.backend import Backend
from hetrun.backends.cuda import runner
from hetrun.backends.cuda.crossing.recorded import crossing
from hetrun.backends.cuda.crossing.shelf import Plane, SlabShelf
from hetrun.backends.cuda.driver import MemoryCopy
from hetrun.backends.cuda.memory import FEW_BYTES, CudaMemory
from hetrun.backends.cuda.pass_args import PassPointers
from hetrun.backends.reference import descriptor
from hetrun.errors import BackendError, BudgetError
from hetrun.memory.kv.arrivals import Arrivals
from tests.cuda import sides
from tests.cuda.emulated.device import emulated
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.emulated.kernels import needs_compiler
from tests.cuda.idle import idle_backend
from tests.cuda.rows import Table
from tests.cuda.test_backend import MODEL, PLACES, both, close, tokens
from tests.support.rig import rig
from tests.unit.test_kv import cache

# Of a change of sides: calls of Python functions, and from Python of what is written in C. There were 445 to
# 740 and 160 to 235 when each segment sent its own, 80 and 44 where it had no attention.
MOST_CALLS, MOST_C_CALLS = 55, 35
EACH = ["graphLaunch", "eventRecord", "eventQuery", "eventSynchronize"]


def counted(way: str, layers: int, sequences: int) -> tuple[int, list[str], int, int]:
    """Changes of sides in a pass, calls of CUDA, and calls of both kinds."""
    calls = {"call": 0, "c_call": 0}

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in calls:
            calls[event] += 1

    with idle_backend(counted=True) as (cuda, fake):
        r = sides.sides(cuda, sides.WAYS[way], layers)
        steps = sides.tokens(r, sequences)
        for _ in range(sequences + 3):  # from the second pass of a shape on it is recorded
            r.executor.run(next(steps))
        one = next(steps)
        fake.calls.clear()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            r.executor.run(one)
        finally:
            sys.setprofile(before)
        found = sides.changes(r), list(fake.calls), calls["call"], calls["c_call"]
        r.close()
    return found


@pytest.mark.parametrize(("way", "sequences"), [*((way, 1) for way in sides.WAYS), ("layers in turn", 4)])
def test_a_change_of_sides_takes_a_replay_a_wait_and_few_calls_of_python(
    way: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LONG_S", 1e9)  # however slow the machine is
    few, few_calls, *few_python = counted(way, 4, sequences)
    many, many_calls, *many_python = counted(way, 12, sequences)
    changes = many - few
    assert changes >= 8
    for n, calls in ((few, few_calls), (many, many_calls)):
        assert calls == EACH * (len(calls) // len(EACH))
        assert len(calls) // len(EACH) == -(-n // 2), "one for each segment of the GPU, and no copy besides"
    python, c = ((b - a) / changes for a, b in zip(few_python, many_python, strict=True))
    assert 0 < python <= MOST_CALLS
    assert 0 < c <= MOST_C_CALLS


def test_what_a_pass_tells_is_packed_once_for_all_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[PassPointers] = []
    pack = PassPointers._pack

    def noted(given: PassPointers, work: object) -> np.ndarray:
        packed.append(given)
        return pack(given, work)  # type: ignore[arg-type]

    with idle_backend() as (cuda, _):
        r = sides.sides(cuda, sides.WAYS["attention on the GPU"], 8)
        steps = sides.tokens(r)
        for _ in range(3):
            r.executor.run(next(steps))
        monkeypatch.setattr(PassPointers, "_pack", noted)
        r.executor.run(next(steps))
        assert len(packed) == len(set(packed)) == 2, (
            "the last layer looks at wanted rows, seven at all of them"
        )
        r.executor.run(next(steps))
        assert packed[2:] == packed[:2]
        r.close()


def test_the_time_of_a_change_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides, "WAYS", {"feed-forward on the GPU": sides.feed_forward})
    monkeypatch.setattr(sides, "PASSES", 4)
    monkeypatch.setattr(sides, "there", sides.idle)
    table = Table("sides", None)
    sides.measure(table)
    assert [line.what.rpartition(", ")[2] for line in table.lines] == ["1 sequence", "4 sequences"]
    assert all(len(line.samples) == sides.ROUNDS for line in table.lines)
    assert "bar at most 30" in capsys.readouterr().out


def test_parts_that_lie_next_to_each_other_cross_together_as_long_as_they_are_few_bytes() -> None:
    driver, begin, small, large = EmulatedDriver(), 1 << 20, 300, FEW_BYTES - 600
    sizes = [small, small, large, small]
    starts = [begin, begin + 512, begin + 1024, begin + (8 << 20)]
    made = crossing(
        driver, list(zip(starts, sizes, strict=True)), lambda at, host, n: MemoryCopy(at, host, n)
    )
    copies = [each for each in made.work if isinstance(each, MemoryCopy)]
    assert [(copy.target, copy.nbytes) for copy in copies] == [
        (begin, 512 + small),
        (begin + 1024, large),
        (begin + (8 << 20), small),
    ]
    where = [int(part.ctypes.data) for part in made.parts]
    assert [len(part) for part in made.parts] == sizes
    assert [copy.source for copy in copies] == [where[0], where[2], where[3]]
    assert where[1] == where[0] + 512, "as on the device"
    assert not crossing(driver, [], lambda at, host, n: MemoryCopy(at, host, n)).work


# --- rows that have come home


class Kept:
    """Rows of a cache of bytes, and a shelf before them."""

    def __init__(self, enough: int = 4) -> None:
        self.kv = cache(96, 1, (0,), 48, width=8)
        self.seq = self.kv.alloc()
        (self.rows,) = self.kv.extend(self.seq, 40)
        (keys, values), stamps = self.kv.tables[0], self.kv.groups[0].stamps
        planes = [Plane(keys, 0, 0), Plane(values, 0, keys.row_bytes)]
        self.tables, self.stamps = (keys, values), stamps
        self.shelf = SlabShelf(frozenset((0,)), 0, planes, stamps, enough)
        self.size = keys.row_bytes + values.row_bytes

    def add(self, rows: np.ndarray, byte: int) -> None:
        packed = np.full((len(rows), self.size), byte, np.uint8)
        self.shelf.add(rows, self.stamps[rows], packed)
        self.kv.arrivals.keep(self.shelf)

    def bytes_of(self, rows: np.ndarray) -> list[int]:
        found = np.concatenate([table.raw[rows] for table in self.tables], axis=1)
        assert (found == found[:, :1]).all()
        return [int(byte) for byte in found[:, 0]]


def test_rows_wait_until_there_are_enough_or_they_are_read() -> None:
    kept = Kept()
    kept.add(kept.rows[:3], 7)
    assert kept.kv.arrivals.touch(frozenset((0,)))
    assert not kept.kv.advance(wait=False)
    assert kept.bytes_of(kept.rows[:3]) == [0, 0, 0]
    kept.add(kept.rows[5:7], 8)
    assert kept.kv.advance(wait=False)
    assert not kept.kv.advance(wait=False)
    assert kept.bytes_of(kept.rows[:8]) == [7, 7, 7, 0, 0, 8, 8, 0]
    assert not kept.kv.arrivals
    assert not kept.kv.arrivals.touch(frozenset((0,)))
    kept.add(kept.rows[3:4], 9)
    kept.kv.settle()
    assert kept.bytes_of(kept.rows[3:4]) == [9]


def test_a_full_shelf_makes_room_for_itself() -> None:
    kept = Kept(enough=2)
    for i in range(7):
        kept.add(kept.rows[i : i + 1], i + 1)
    assert kept.bytes_of(kept.rows[:8]) == [1, 2, 3, 4, 0, 0, 0, 0]
    kept.kv.settle()
    assert kept.bytes_of(kept.rows[:8]) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_rows_that_changed_or_are_not_wanted_any_more_are_not_put_away() -> None:
    kept = Kept(enough=16)
    kept.add(kept.rows[30:33], 5)
    kept.kv.truncate(kept.seq, 31)
    (again,) = kept.kv.extend(kept.seq, 2)
    assert again.tolist() == kept.rows[31:33].tolist()
    kept.add(again[:1], 6)
    kept.kv.arrivals.forget(0, int(kept.rows[30]), int(kept.rows[30]) + 1)
    kept.kv.settle()
    assert kept.bytes_of(kept.rows[29:34]) == [0, 0, 6, 0, 0]


class Gone:
    """Rows on a device that has failed."""

    layers, group, over = frozenset((0,)), 0, False

    def send(self) -> bool:
        return False

    def advance(self, wait: bool) -> bool:
        raise BackendError("the device is gone")

    def left(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def forget(self, first: int, end: int) -> None:
        pass


def test_rows_that_have_come_outlive_their_device() -> None:
    kept = Kept()
    kept.kv.arrivals.expect(Gone())
    kept.add(kept.rows[:1], 3)
    with pytest.raises(BackendError, match="gone"):
        kept.kv.settle()
    assert kept.bytes_of(kept.rows[:1]) == [3]
    assert not kept.kv.arrivals
    assert not kept.kv.arrivals.touch(frozenset((0,)))
    assert kept.kv.keepable(kept.seq, 40)


def test_nothing_is_on_its_way_where_nothing_was_sent() -> None:
    assert Arrivals().send()
    assert not Arrivals().advance(wait=True)


# --- the same numbers

beside = pytest.mark.slow


@needs_compiler
@beside
@pytest.mark.parametrize("placed", PLACES[1:3], ids=str)
def test_passes_in_the_middle_of_a_pass_do_not_change_it(placed: dict[str, str]) -> None:
    """They have the same shape, so what they tell lies in the same memory."""
    mine, right = both(placed)
    pairs = [(mine.kv.alloc(), right.kv.alloc()) for _ in range(2)]
    texts: Iterator[list[int]] = (tokens(1, i) for i in range(1000))
    expected, found = list[np.ndarray](), list[np.ndarray]()

    def between() -> None:
        text = next(texts)
        found.append(mine.logits(pairs[1][0], text))
        expected.append(right.logits(pairs[1][1], text))

    for i in range(6):
        text = next(texts)
        found.append(mine.step((pairs[0][0], text, [0]), between=between if i % 2 else None))
        expected.append(right.logits(pairs[0][1], text))
    assert len(found) > 10
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    mine.close()
    right.close()


@needs_compiler
@beside
def test_what_is_large_crosses_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With values of one kind in a pass, and of the other in the next one."""
    monkeypatch.setattr(runner, "FEW_BYTES", 4 * MODEL.embd * 4)
    mine, right = both({"": "cuda", "blk.0.ffn": "reference", "blk.2.attn.score": "reference"})
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i, n in enumerate([7, 1, 40, 4, 5, 1]):
        close(mine.logits(a, tokens(n, i)), right.logits(b, tokens(n, i)))
    mine.close()
    right.close()


@needs_compiler
@beside
def test_a_pass_that_fails_when_it_is_half_given_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = EmulatedDriver()
    mine, right = both({"": "cuda", "blk.1.ffn": "reference"}, driver)
    a, b = mine.kv.alloc(), right.kv.alloc()
    for i in range(3):
        close(mine.logits(a, tokens(1, i)), right.logits(b, tokens(1, i)))
    collect = CudaMemory.collect

    def failing(*given: object) -> None:
        raise BudgetError("no more")

    monkeypatch.setattr(CudaMemory, "collect", failing)
    with pytest.raises(BudgetError, match="no more"):
        mine.logits(a, tokens(1, 9))
    assert not any(driver._streams.values()), (
        "what reads the memory of a pass is over when the next one fills it"
    )
    monkeypatch.setattr(CudaMemory, "collect", collect)
    close(mine.logits(a, tokens(1, 3)), right.logits(b, tokens(1, 3)))
    mine.close()
    right.close()


@needs_compiler
@beside
def test_rows_written_here_are_seen_here_and_at_home_whatever_happens_in_between() -> None:
    """Passes that look only at their last row take the others on trust: cuts, windows, other backends."""
    backends: dict[str, Backend] = {"cuda": emulated(name="cuda"), "reference": descriptor.create()}
    there = rig(MODEL, backends, {"": "cuda"}, windows=(40, 0, 40), ubatch=64)
    host = rig(MODEL, {"reference": descriptor.create()}, windows=(40, 0, 40), ubatch=64)
    rng = np.random.default_rng(2)
    a, b = there.kv.alloc(), host.kv.alloc()
    for i in range(40):
        length = there.kv.length(a)
        cut = length - int(rng.integers(0, 30))
        if rng.random() < 0.2 and cut > 0 and there.kv.keepable(a, cut):
            there.kv.truncate(a, cut)
            host.kv.truncate(b, cut)
        if rng.random() < 0.15 and length:
            there.kv.settle()
            rows = [np.frombuffer(raw, np.float32) for raw in there.kv.export(a, there.kv.length(a))]
            for mine, right in zip(rows, host.kv.export(b, host.kv.length(b)), strict=True):
                close(mine, np.frombuffer(right, np.float32))
        if there.kv.length(a) < 240:
            text = tokens(int(rng.choice([1, 1, 1, 2])), i)
            close(there.logits(a, text), host.logits(b, text))
    there.close()
    host.close()
