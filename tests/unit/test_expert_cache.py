"""The cache of experts by itself, driven as C code drives it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_int32, c_int64, c_void_p
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hetrun.backend.weight_streaming import Mixture
from hetrun.graph import Extent, Weight
from hetrun.graph.quant import by_name
from hetrun.prefetch import expert_cache
from hetrun.prefetch.expert_cache import ExpertCache, ExpertReading
from hetrun.prefetch.expert_records import Records, records_of
from hetrun.prefetch.expert_trace import lru

pytestmark = pytest.mark.skipif(not expert_cache.library(), reason="there was no C compiler")
EXPERTS, ROWS, COLS, SKIP = 32, 4, 96, 1000  # matrices of 1,536 bytes, at positions of no pages


class Expert(Structure):
    """struct expert."""

    _fields_ = (("number", c_int64), ("slot", c_void_p), ("stored", c_void_p * 3))


class Supply(Structure):
    """struct expert_supply."""

    _fields_ = (
        ("cache", c_void_p),
        ("want", CFUNCTYPE(None, c_void_p, c_int64, POINTER(c_int32), POINTER(c_int32), c_int64)),
        ("hint", CFUNCTYPE(None, c_void_p, c_int64, POINTER(c_int32), c_int64)),
        ("next", CFUNCTYPE(c_int64, c_void_p, POINTER(Expert), c_int64)),
        ("packed", CFUNCTYPE(None, c_void_p)),
    )


def value(mixture: int, matrix: int, expert: int) -> float:
    """What the first number of a matrix says."""
    return float(10000 * mixture + 1000 * matrix + expert + 1)


def mixtures_in(path: Path, count: int) -> list[Mixture]:
    """Matrices of all experts on top of each other, as models have them; each says which it is."""
    f32, found, at = by_name("F32"), [], SKIP
    data = [bytes(SKIP)]
    for m in range(count):
        weights = []
        for k in range(3):
            numbers = np.zeros((EXPERTS, ROWS * COLS), np.float32)
            numbers[:, 0] = [value(m, k, e) for e in range(EXPERTS)]
            data.append(numbers.tobytes())
            row = f32.row_bytes(COLS)
            part = Extent(str(path), at, EXPERTS * ROWS, row, row)
            weights.append(Weight(f"blk.{m}.{k}", (EXPERTS * ROWS, COLS), f32, (part,)))
            at += numbers.nbytes
        size = 3 * ROWS * COLS * 4
        found.append(Mixture(f"blk.{m}", tuple(weights), EXPERTS, 4, (0, size // 3, 2 * size // 3), size))
    path.write_bytes(b"".join(data))
    return found


class Driver:
    """Asks for experts as a mixture's node does, packs them by copying, and checks what it was given."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self._supply = Supply.from_address(cache.address)

    def choose(self, mixture: int, experts: Sequence[int], rows: int = 1) -> list[int]:
        """One mixture of a pass; the experts that came, in their order."""
        n, got = len(experts), list[int]()
        numbers, each = (c_int32 * n)(*experts), (c_int32 * n)(*[rows] * n)
        s, wave = self._supply, (Expert * 4)()
        s.want(s.cache, mixture, numbers, each, n)
        while (given := s.next(s.cache, wave, 4)) > 0:
            for e in wave[:given]:
                got.append(e.number)
                self._pack(mixture, e)
            s.packed(s.cache)
        assert given == 0
        return got

    def hint(self, mixture: int, experts: Sequence[int]) -> None:
        self._supply.hint(self._supply.cache, mixture, (c_int32 * len(experts))(*experts), len(experts))

    def _pack(self, mixture: int, e: Expert) -> None:
        size = ROWS * COLS * 4
        for k in range(3):
            if e.stored[k]:
                ctypes.memmove(e.slot + k * size, e.stored[k], size)
            said = ctypes.cast(e.slot + k * size, POINTER(ctypes.c_float))[0]
            assert said == value(mixture, k, e.number)


@contextmanager
def opened(
    path: Path, mixtures: int, slots: int, buffers: int = 6, most: int = 6
) -> Iterator[tuple[Driver, Records]]:
    found = records_of(mixtures_in(path, mixtures))
    assert found is not None
    cache = ExpertCache(found, ExpertReading(buffers, 2, most=most))
    try:
        cache.resize([slots])
        yield Driver(cache), found
    finally:
        cache.close()


def zipf(rng: Random, passes: int) -> list[list[int]]:
    """Some experts are chosen far more often than others."""
    weights = [1 / (i + 1) for i in range(EXPERTS)]
    return [sorted({*rng.choices(range(EXPERTS), weights, k=4)}) for _ in range(passes)]


def drifting(rng: Random, passes: int) -> list[list[int]]:
    """What is chosen changes slowly: the past says little."""
    return [sorted({(i // 12 + rng.randrange(6)) % EXPERTS for _ in range(4)}) for i in range(passes)]


def scanned(rng: Random, passes: int) -> list[list[int]]:
    """Everything now and then, as prompts do, between choices of few."""
    return [list(range(EXPERTS)) if i % 20 == 19 else found for i, found in enumerate(zipf(rng, passes))]


@pytest.mark.parametrize("texts", [zipf, drifting, scanned])
@pytest.mark.parametrize("slots", [16, 40])
def test_as_many_are_found_as_by_the_last_choices(tmp_path: Path, texts: object, slots: int) -> None:
    """At least as LRU would find, but for what is lost while rules are compared."""
    assert callable(texts)
    rng, passes = Random(3), 1500
    chosen = [texts(rng, passes) for _ in range(2)]
    with opened(tmp_path / "m", 2, slots) as (driver, _):
        for i in range(passes):
            driver.cache.begin(1)
            for m in range(2):
                assert sorted(driver.choose(m, chosen[m][i])) == chosen[m][i]
        trace = driver.cache.trace
        found = trace[len(trace) // 2 :, 2].mean()
        hits = list(lru(trace[:, 1].tolist(), slots))
        assert found >= np.mean(hits[len(hits) // 2 :]) - 0.01
        counts = driver.cache.counts
        assert counts.wanted == len(trace)
        assert counts.missed == (trace[:, 2] == 0).sum()
        assert counts.missed_bytes == counts.missed * 3 * ROWS * COLS * 4


def test_what_hints_brought_is_not_read_again(tmp_path: Path) -> None:
    with opened(tmp_path / "m", 2, 16) as (driver, _):
        driver.cache.begin(1)
        driver.hint(1, [3, 4, 5])
        driver.choose(0, [1, 2])
        driver.choose(1, [4, 5, 6])
        counts = driver.cache.counts
        assert counts.hinted == 3
        assert counts.hits_of_hints == 2
        assert counts.missed == 5
        assert driver.choose(1, [4, 5, 6]) == [6, 5, 4]
        driver.cache.listen(False)
        driver.hint(1, [7])
        assert driver.cache.counts.hinted == 3


def test_room_goes_and_comes(tmp_path: Path) -> None:
    """What was chosen most stays where slots become fewer, wherever it lay."""
    with opened(tmp_path / "m", 1, EXPERTS) as (driver, _):
        for i in range(64):
            driver.cache.begin(1)
            driver.choose(0, [i % EXPERTS, *range(28, 32)] if i % EXPERTS < 28 else [28, 29])
        driver.cache.resize([8])
        assert driver.cache.held_bytes <= driver.cache.promised_bytes
        before = driver.cache.counts.missed
        driver.choose(0, [28, 29, 30, 31])
        assert driver.cache.counts.missed == before
        driver.cache.resize([EXPERTS])
        driver.choose(0, list(range(EXPERTS)))
        assert driver.cache.counts.missed == before + EXPERTS - 8


def test_buffers_come_and_go_with_what_is_read_to_them(tmp_path: Path) -> None:
    with opened(tmp_path / "m", 2, 8, buffers=2, most=EXPERTS) as (driver, records):
        driver.hint(1, range(8))
        assert driver.cache.counts.hinted == 2
        driver.cache.widen(EXPERTS)
        driver.hint(1, range(8))
        assert driver.cache.counts.hinted == 8
        driver.cache.widen(1)
        assert driver.cache.counts.wasted_bytes <= 7 * records.expert_bytes[1]
        for mixture in (0, 1):
            assert sorted(driver.choose(mixture, range(EXPERTS))) == list(range(EXPERTS))
        driver.cache.widen(6)
        assert sorted(driver.choose(1, range(EXPERTS))) == list(range(EXPERTS))


def test_experts_that_lie_beside_each_other_are_one_read(tmp_path: Path) -> None:
    """As `hetrun repack` puts them."""
    path, f32 = tmp_path / "m", by_name("F32")
    row, size = f32.row_bytes(COLS), ROWS * COLS * 4
    numbers = np.zeros((EXPERTS, 3, ROWS * COLS), np.float32)
    numbers[:, :, 0] = [[value(0, k, e) for k in range(3)] for e in range(EXPERTS)]
    path.write_bytes(numbers.tobytes())
    weights = tuple(
        Weight(
            f"blk.0.{k}",
            (EXPERTS * ROWS, COLS),
            f32,
            tuple(Extent(str(path), (3 * e + k) * size, ROWS, row, row) for e in range(EXPERTS)),
        )
        for k in range(3)
    )
    found = records_of([Mixture("blk.0", weights, EXPERTS, 4, (0, size, 2 * size), 3 * size)])
    assert found is not None
    cache = ExpertCache(found, ExpertReading(4, 1))
    try:
        cache.resize([8])
        cache.begin(1)
        assert sorted(Driver(cache).choose(0, [1, 2, 30])) == [1, 2, 30]
        assert cache.counts.reads == 3
    finally:
        cache.close()


def test_weights_that_are_not_in_one_place_have_no_slots(tmp_path: Path) -> None:
    (mixture,) = mixtures_in(tmp_path / "m", 1)
    gate, up, down = mixture.weights
    (part,) = down.parts
    assert isinstance(part, Extent)
    half = Extent(part.path, part.offset, 6, part.row_bytes, part.row_bytes)
    apart = Weight(down.name, down.shape, down.quant, (half,))
    assert records_of([Mixture("blk.0", (gate, up, apart), EXPERTS, 4, (0, 0, 0), 4096)]) is None
