"""States in a GPU's memory: what a pass reads there is what is known, and others find it in the slots."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from hetrun.backend import Pass, SequencePart
from hetrun.backends.cuda.arena import in_arena
from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.states import mirror
from hetrun.backends.cuda.states.mirror import StateMirror
from hetrun.errors import BackendError, BudgetError
from hetrun.graph import StateShape
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE, StateMark, StateView
from tests.cuda.emulated.driver import EmulatedDriver
from tests.unit.test_states import MOST, cache, of, read, view, write

SHAPES = {0: StateShape({"causal_conv": 6, "delta_net": 400}), 3: StateShape({"delta_net": 17})}
KEPT = ((0, "causal_conv"), (0, "delta_net"), (3, "delta_net"))
SIZE = sum(in_arena(4 * n) for shape in SHAPES.values() for n in shape.floats.values())


class Device:
    """A mirror of a cache's states in memory that holds some of them. A state is a number, as in
    tests/unit/test_states.py: each layer has a multiple of it."""

    def __init__(self, kv: KvCache, places: int) -> None:
        self.kv, self.driver = kv, EmulatedDriver()
        self.memory = CudaMemory(self.driver, 20 << 20)
        self.mirror = StateMirror(self.memory, kv, KEPT)
        self.memory.give_up = self.mirror.drop_oldest
        self.memory.take(self.memory.arena.left - places * SIZE, "others")

    def computes(self, *passes: tuple[int, int, int, int]) -> None:
        """A pass of tokens a to b of sequences, each with the number of its state before it; the state
        after token n is the number 1000 * sequence + n."""
        parts, positions, at = list[SequencePart](), list[int](), 0
        for seq, a, b, _ in passes:
            parts.append(SequencePart(at, at + b - a, 0, 0, (), view(self.kv, seq, a, b)))
            positions += range(a, b)
            at += b - a
        nothing = np.empty(0, np.int64)
        work = Pass(np.zeros(at, np.int64), np.array(positions), (), nothing, tuple(parts))
        for part in parts:
            self._overwrites(part.states)
        places = self.mirror.prepare(work)
        self._wait()
        for part, place, (_, _, _, number) in zip(parts, places.read.tolist(), passes, strict=True):
            assert part.states is not None
            assert (place == 0) is (part.states.read == NONE)
            assert not place or self._number(place) == number
        for place in set(places.write.tolist()) - {0}:
            assert place not in places.read
        for (seq, a, _, _), part in zip(passes, parts, strict=True):
            for i, place in enumerate(places.write[part.a : part.b].tolist()):
                if place:
                    self._put(place, 1000 * seq + a + i + 1)
        places.written.finish()

    def others(self, seq: int, a: int, b: int, numbers: Sequence[int]) -> int:
        """The same on the host, as an executor has it; the number that was read."""
        now, states = view(self.kv, seq, a, b), of(self.kv)
        states.settle(now.read, a)
        found = read(self.kv, now.read)
        self._overwrites(now)
        for slot, number in zip(now.write.tolist(), numbers, strict=True):
            if slot != NONE:
                write(self.kv, slot, number)
        return found

    def _overwrites(self, now: StateView | None) -> None:
        assert now
        for slot in set(now.write.tolist()) - {NONE, now.read}:
            of(self.kv).overwrite(slot)

    def _wait(self) -> None:
        done = self.driver.event()
        self.driver.record(done, self.memory.computing)
        self.driver.synchronize(done)

    def _number(self, place: Address) -> int:
        found = set()
        for i, (layer, kind) in enumerate(KEPT):
            n = SHAPES[layer].floats[kind]
            raw = ctypes.string_at(place + self.mirror.at[layer, kind], 4 * n)
            found |= set(np.frombuffer(raw, np.float32) / np.float32(i + 1))
        assert len(found) == 1
        return int(found.pop())

    def _put(self, place: Address, number: int) -> None:
        for i, (layer, kind) in enumerate(KEPT):
            numbers = np.full(SHAPES[layer].floats[kind], number * (i + 1), np.float32)
            ctypes.memmove(place + self.mirror.at[layer, kind], numbers.ctypes.data, numbers.nbytes)


def made(places: int, sequences: int = 4) -> Device:
    return Device(cache(SHAPES, sequences), places)


def test_what_was_written_here_is_not_brought() -> None:
    device = made(2)
    seq = device.kv.alloc()
    for n in range(20):
        device.kv.extend(seq, 1)
        device.computes((seq, n, n + 1, 1000 * seq + n))
    assert device.mirror.brought == 0


def test_what_others_wrote_is_brought() -> None:
    """A slot that is another state's now, and one that has gone on between two passes of a step."""
    device = made(8)
    kv, seq = device.kv, device.kv.alloc()
    kv.extend(seq, 2)
    device.computes((seq, 0, 2, 0))
    kv.extend(seq, 30)
    device.computes((seq, 2, 10, 1000 * seq + 2))
    assert device.others(seq, 10, 20, [77] * 10) == 1000 * seq + 10
    device.computes((seq, 20, 32, 77))
    kv.truncate(seq, 2)
    kv.extend(seq, 1)  # in the slot of what was forgotten
    assert device.others(seq, 2, 3, [88]) == 1000 * seq + 2
    kv.extend(seq, 1)
    device.computes((seq, 3, 4, 88))


def test_a_pass_that_did_not_end_has_written_nothing() -> None:
    device = made(8)
    kv, seq = device.kv, device.kv.alloc()
    kv.extend(seq, 4)
    device.computes((seq, 0, 4, 0))
    kv.extend(seq, 2)
    now = view(kv, seq, 4, 6)
    begun = SequencePart(0, 2, 0, 0, (), now)
    tokens = np.zeros(2, np.int64)
    device.mirror.prepare(Pass(tokens, np.array([4, 5]), (), tokens, (begun,)))
    assert device.others(seq, 4, 6, [98, 99]) == 1000 * seq + 4  # instead
    kv.extend(seq, 1)
    device.computes((seq, 6, 7, 99))


def test_states_that_are_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PIECE", 1024)
    device = made(8)
    seq = device.kv.alloc()
    for a, b in ((0, 3), (3, 4), (4, 9)):
        device.kv.extend(seq, b - a)
        device.computes((seq, a, b, 1000 * seq + a if a else 0))
        device.mirror._in_use = frozenset()
        while device.mirror.drop_oldest():
            pass
    assert device.mirror.brought == 2


def test_a_pass_of_more_than_there_is_room_for_is_refused() -> None:
    device = made(1)
    seqs = [device.kv.alloc() for _ in range(2)]
    for seq in seqs:
        device.kv.extend(seq, 1)
    with pytest.raises(BudgetError, match="no room in GPU memory for states"):
        device.computes(*[(seq, 0, 1, 0) for seq in seqs])
    device.computes((seqs[0], 0, 1, 0))


@pytest.mark.parametrize("places", [5, 40])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_pass_reads_is_what_the_host_has(places: int, seed: int) -> None:
    device, random = made(places), Random(seed)
    kv, numbers = device.kv, dict[int, dict[int, int]]()  # by sequence and position what is known there
    here = others = 0
    for _ in range(400):
        seq = random.choice(sorted(numbers)) if numbers else None
        match random.choice(("more", "more", "more", "fork", "cut", "free", "drop", "look")):
            case "more" if seq is not None and kv.length(seq) < 150:
                a, n = kv.length(seq), random.choice((1, 1, 2, MOST))
                kv.extend(seq, n)
                kv.mark(seq, [StateMark(a + random.randint(1, n), random.random() < 0.5)])
                cuts = sorted({a, a + random.randint(0, n), a + n})
                for begin, end in pairwise(cuts):
                    now = view(kv, seq, begin, end)
                    wrote = {begin + i + 1: int(s) for i, s in enumerate(now.write) if s != NONE}
                    if random.random() < 0.6:
                        here += 1
                        device.computes((seq, begin, end, numbers[seq].get(begin, 0)))
                        numbers[seq] |= {position: 1000 * seq + position for position in wrote}
                    else:
                        others += 1
                        new = [random.randrange(1 << 15) for _ in range(begin, end)]
                        assert device.others(seq, begin, end, new) == numbers[seq].get(begin, 0)
                        numbers[seq] |= {position: new[position - begin - 1] for position in wrote}
            case "fork" if seq is not None and len(numbers) < 4:
                numbers[kv.fork(seq)] = dict(numbers[seq])
            case "cut" if seq is not None:
                n = kv.rewind(seq, random.randint(0, kv.length(seq)))
                numbers[seq] = {p: number for p, number in numbers[seq].items() if p <= n}
            case "free" if seq is not None and random.random() < 0.3:
                numbers.pop(seq)
                kv.free(seq)
            case "drop":
                device.mirror.drop_oldest()
            case "look" if seq is not None and kv.length(seq):
                n = kv.rewind(seq, kv.length(seq))
                (piece,) = of(kv).export(seq, n)
                assert np.frombuffer(piece, np.float32)[0] == numbers[seq][n]
            case _ if len(numbers) < 4:
                numbers[kv.alloc()] = {0: 0}
    assert min(here, others) > 50
    assert device.mirror.brought > 20


def test_a_device_that_goes_leaves_what_it_has() -> None:
    device = made(8)
    kv, seq = device.kv, device.kv.alloc()
    for n in range(3):
        kv.extend(seq, 1)
        device.computes((seq, n, n + 1, 1000 * seq + n if n else 0))
    kv.extend(seq, 1)
    slot = view(kv, seq, 3, 4).read
    assert of(kv).is_lent(slot, device.mirror.home)
    device.mirror.leave()
    assert read(kv, slot) == 1000 * seq + 3
    device.mirror.close()
    assert device.memory.arena.used
    assert device.others(seq, 3, 4, [5]) == 1000 * seq + 3


def test_what_a_device_has_and_cannot_give_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences go on from what they had before, or from nothing; others know nothing of it."""
    device = made(8)
    kv = device.kv
    seq, other = kv.alloc(), kv.alloc()
    kv.extend(seq, 4)
    assert device.others(seq, 0, 4, [1, 2, 3, 4]) == 0
    kv.extend(other, 1)
    assert device.others(other, 0, 1, [7]) == 0
    kv.extend(seq, 3)
    device.computes((seq, 4, 7, 4))
    fork = kv.fork(seq)

    def fails(*arguments: int) -> None:
        raise BackendError("the device is gone")

    monkeypatch.setattr(device.driver, "copy", fails)
    with pytest.raises(BackendError, match="the device is gone"):
        list(of(kv).export(seq, 7))
    for lost in (seq, fork):
        assert not kv.keepable(lost, 7)
        with pytest.raises(BackendError, match="lost when its device failed"):
            view(kv, lost, 7, 8)
    assert kv.rewind(seq, 7) == 4
    kv.extend(seq, 1)
    assert device.others(seq, 4, 5, [8]) == 4
    kv.free(fork)
    kv.extend(other, 1)
    assert device.others(other, 1, 2, [8]) == 7
