"""The small libraries: top_logits.c, experts.c, sigbus.c, affinity_calls.c and read_loops.c."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from ctypes import CFUNCTYPE, c_int, c_int64, c_uint64, c_void_p

import numpy as np

from hetrun.backends.llamacpp.kernels import expert_sort, sigbus_guard
from hetrun.backends.llamacpp.kernels.expert_sort import Pairs, Sum
from hetrun.sampling import native
from hetrun.sampling.fast_path import FastPath
from hetrun.system import thread_affinity
from hetrun.tools.bench import read_kernels
from tests.sanitizers.inputs import Input, close, folder, node, pooled
from tests.sanitizers.memory import LINE

# --- sampling


def row_of(case: Input, n: int) -> np.ndarray:
    """Logits: all different, many alike, mostly impossible, or with what is no number."""
    rng, kind = case.numbers, case.rng.randrange(5)
    row = rng.normal(0, 4, n).astype(np.float32)
    if kind == 1:
        row = np.round(row)
    elif kind == 2:
        row[rng.random(n) < 0.97] = -np.inf
    elif kind == 3:
        row[:] = rng.choice([-np.inf, 0.0, np.inf], n)
    elif kind == 4:
        row[rng.integers(0, n)] = rng.choice([np.nan, np.inf, 3e38, -3e38])
    return row


def top_logits(case: Input) -> None:
    """The k greatest as numpy sorts them, and the token that Python draws from them."""
    rng, lib = case.rng, native.greatest()
    assert lib is not None
    n = rng.choice((1, 2, 63, 64, 65, 300, 4096 * 64 + 1)) if case.chance(10) else rng.randint(1, 3000)
    k = rng.choice((1, 2, 40, native.MOST, rng.randint(1, native.MOST)))
    row = case.memory.copy(row_of(case, n))
    found = lib.find(row, k)
    if np.isnan(row).any():
        assert found is None, "what is no number went unseen"
        return
    right = np.lexsort((np.arange(n), -row))[:k]
    right = right[row[right] > -np.inf]
    assert found is not None
    assert found[0] == right.tolist(), "not the greatest"
    assert found[1] == row[right].tolist(), "other values"
    usual = FastPath(
        k, rng.choice((1.0, 0.1, 0.95)), rng.choice((0.0, 0.05, 1.0)), rng.choice((1.0, 0.3, 2.0, 1e-3))
    )
    u = rng.choice((0.0, rng.random(), 1 - 2**-53))
    token = lib.draw(row, usual, u)
    if not found[0] or found[1][0] == np.inf:
        assert token is None
    else:
        assert token == found[0][usual.draw(found[1], u)], "another token than Python draws"


# --- experts that are left to others


def pairs(case: Input) -> None:
    """Rows and experts sorted, and the results of pairs added up."""
    rng, lib, memory = case.rng, expert_sort.sorter(), case.memory
    assert lib is not None
    rows, experts = rng.randint(1, 20), rng.randint(1, 9)
    used, gap, width = rng.randint(1, experts), rng.randint(0, 3), rng.randint(1, 70)
    flat = memory.array((rows - 1) * (used + gap) + used, np.int32)
    flat[:] = case.numbers.integers(0, experts, len(flat))
    chosen = np.lib.stride_tricks.as_strided(flat, (rows, used), (4 * (used + gap), 4))
    shares = memory.copy(case.numbers.random((rows, used), np.float32))
    left_out = memory.copy((case.numbers.random(experts) < 0.4).astype(np.uint8))
    expert, row = memory.full(rows * used, -1, np.int32), memory.full(rows * used, -1, np.int32)
    share, sizes = memory.full(rows * used, -1), memory.full(2, -1, np.int64)
    addresses = memory.copy(np.array([sizes.ctypes.data, sizes.ctypes.data + 8], np.int64))
    made = Pairs(
        chosen=flat.ctypes.data, shares=shares.ctypes.data, rows=rows, used=used, stride=used + gap,
        left_out=left_out.ctypes.data, expert=expert.ctypes.data, row=row.ctypes.data,
        share=share.ctypes.data,
        sizes=addresses.ctypes.data, n_sizes=2,
    )  # fmt: skip
    threads = rng.randint(1, 4)
    node(lib.sort, made, threads)
    stays = left_out[chosen] == 0
    n = int(stays.sum())
    assert made.count == n
    assert (sizes == n).all()
    assert np.array_equal(expert[:n], chosen[stays])
    assert np.array_equal(row[:n], np.nonzero(stays)[0])
    results = memory.copy(case.numbers.standard_normal((n, width), dtype=np.float32))
    out = memory.full((rows, width), np.nan)
    node(
        lib.sum,
        Sum(pairs=ctypes.addressof(made), results=results.ctypes.data, out=out.ctypes.data, width=width),
        threads,
    )
    right = np.zeros((rows, width))
    np.add.at(right, row[:n], share[:n, None].astype(np.float64) * results)
    assert close(out, right), "not what numpy adds up"


# --- the system


def read_by(whole: np.ndarray, threads: int) -> list[np.ndarray]:
    """What each of some threads reads."""
    found = list[np.ndarray]()
    pooled(lambda _: found.append(whole.copy()), threads)
    return found


def cut_files(case: Input) -> None:
    """A mapped file that is cut, while threads read it: zeros take the place of what is gone."""
    guard, rng, page = sigbus_guard.guard(), case.rng, mmap.PAGESIZE
    assert guard is not None
    count = rng.randint(1, 6)
    kept = rng.randint(0, count * page)
    with folder() as room, (room / "m").open("w+b") as file:
        content = case.numbers.integers(1, 256, count * page, np.uint8)
        file.write(content.tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), count * page, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        whole = np.frombuffer(mapped, np.uint8)
        guard.arm()
        number = guard.register(whole.ctypes.data, count * page)
        try:
            os.ftruncate(file.fileno(), kept)
            found = read_by(whole, rng.randint(1, 3))
            right = np.where(np.arange(count * page) < kept, content, 0)
            assert all(np.array_equal(each, right) for each in found), "other bytes than the file's and zeros"
            fault = guard.fault(number)
            assert bool(fault) == (kept <= (count - 1) * page), (
                "a fault that was none, or none where there was one"
            )
            if fault:
                assert guard.fault(number) == 0
            os.ftruncate(file.fileno(), count * page)
            file.seek(0)
            file.write(content.tobytes())
            file.flush()
            assert guard.mend(number, file.fileno())
            assert np.array_equal(whole, content), "it was not mended"
        finally:
            guard.unregister(number)
            del whole
            mapped.close()


class Seats(ctypes.Structure):
    """struct seats."""

    _fields_ = (
        ("number", c_void_p),
        ("masks", c_void_p),
        *((name, c_int64) for name in ("words", "count", "refused")),
    )


def seats(case: Input) -> None:
    """Threads are put on CPUs that there are, or that there are not; then as they were."""
    rng, sit = case.rng, thread_affinity._function()
    assert sit is not None
    before = os.sched_getaffinity(0)
    words, count = rng.randint(1, 20), rng.randint(1, 4)
    masks = case.memory.full((count, words), 0, c_uint64)
    here = case.chance(2)
    for mask in masks:
        mask[0 if here else words - 1] = (1 << min(before)) if here else 1 << 63
    threads = itertools.count()
    numbered = CFUNCTYPE(c_int)(lambda: next(threads))
    made = Seats(ctypes.cast(numbered, c_void_p).value, masks.ctypes.data, words, count, 0)
    call = CFUNCTYPE(None, c_void_p)(sit)
    try:
        for _ in range(rng.randint(1, 7)):
            call(ctypes.addressof(made))
        assert here == (made.refused == 0) or words > 1 or (1 << 63) == 1 << min(before)
        if here:
            assert os.sched_getaffinity(0) == {min(before)}, "on another CPU than was asked for"
    finally:
        os.sched_setaffinity(0, before)


def reads(case: Input) -> None:
    """Every way to read a block, also of sizes that are no whole steps."""
    rng, threads, rounds = case.rng, case.rng.randint(1, 3), case.rng.randint(1, 3)
    size = rng.choice((64, 128, 1000, 4096, rng.randint(1, 20000)))
    block = case.memory.full(size, 1, np.uint8, LINE)
    arrived = c_int64(0)
    way = rng.choice([each for each in read_kernels.readers() if isinstance(each, read_kernels.CompiledRead)])
    times = [case.memory.full((2, rounds), 0, np.float64) for _ in range(threads)]

    def read(i: int) -> None:
        begins, ends = times[i]
        way.read(
            way.way, block.ctypes.data, size // LINE * LINE, 2, threads, rounds, ctypes.addressof(arrived),
            begins.ctypes.data, ends.ctypes.data,
        )  # fmt: skip

    pooled(read, threads)
    assert arrived.value == threads * rounds
    assert all((ends >= begins).all() for begins, ends in times)
