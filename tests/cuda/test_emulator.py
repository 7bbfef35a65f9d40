"""The emulator itself: meetings are meetings, and what a GPU leaves undefined is an error."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from hetrun.backends.cuda.driver import Argument
from tests.cuda.emulated.kernels import EmulationError, names, needs_compiler, run

pytestmark = needs_compiler
KERNEL = 'extern "C" __global__ void '
SOURCE = r"""
#include "common.cuh"
#include "tensor.cuh"
#define ME threadIdx.x

KERNEL shuffled(int *y) {
    int me = ME % WARP, *mine = y + 5 * ME;
    mine[0] = __shfl_xor_sync(ALL_LANES, me, 5);
    mine[1] = __shfl_sync(ALL_LANES, me, 7);
    mine[2] = __shfl_down_sync(ALL_LANES, me, 3);
    mine[3] = __shfl_up_sync(ALL_LANES, me, 3);
    mine[4] = (int)__ballot_sync(ALL_LANES, me % 3 == 0);
}

KERNEL summed(const float *x, float *y) {
    float sum = block_sum(x[blockIdx.x * blockDim.x + ME], (float *)shared_memory);
    if (ME == 0) y[blockIdx.x] = sum;
}

// Who reads what a neighbour wrote, with a meeting between and without.
KERNEL neighbours(float *y, int met, int step) {
    float *seen = (float *)shared_memory;
    seen[ME] = 1.0f;
    if (met) __syncthreads();
    y[blockIdx.x * blockDim.x + ME] = seen[(ME + step) % blockDim.x];
}

// When blocks run, and when threads of a block do.
KERNEL blocks(int *y) {
    if (ME == 0) y[blockIdx.x] = atomicAdd(y + gridDim.x, 1);
}
KERNEL threads(int *y) { y[ME] = atomicAdd(y + blockDim.x, 1); }

KERNEL ends_before_block(int n) {
    if (ME < n) return;
    __syncthreads();
}

KERNEL ends_before_warp() {
    if (ME == 3) return;
    __syncwarp();
}

KERNEL apart() {
    if (ME < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

KERNEL deadlock() {
    if (ME % 2) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

KERNEL different(int *y) {
    y[ME] = ME % 2 ? __shfl_sync(ALL_LANES, 1, 0) : __shfl_xor_sync(ALL_LANES, 1, 1);
}

KERNEL some_lanes() { if (ME < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000u); }
KERNEL part_of_a_warp(float *y) { y[ME] = warp_sum(1.0f); }

KERNEL writes_shared(int at) { shared_memory[at] = 1; }
KERNEL reads_shared(float *y, int at) { *y = ((float *)shared_memory)[at]; }
KERNEL reads_halves(float *y, int at) {
    y[0] = __half2float(((half *)shared_memory)[at]);
    y[1] = __bfloat162float(((__nv_bfloat16 *)shared_memory)[at]);
}

struct Three { const float *x; long long n; int k; };
KERNEL told(float *y, Three three, int64 n, int k, float f) {
    *y = *three.x + (float)(three.n + three.k + n + k) + f;
}

KERNEL wide(const byte *x, float *y, int at) { *y = ((const float4 *)(x + at))->z; }
KERNEL narrow(const byte *x, float *y, int at) { *y = *(const unsigned short *)(x + at); }

// Twice of 1 and the product of two tiles of 16 by 16, the second of which is read by columns, or by rows.
__device__ void left_tile(uint_t (&m)[4], const void *a, int ld) {
    load_blocks(m, (const half *)a + ME % 16 * ld + ME / 16 * 8);
}
__device__ void put_sums(float *c, const float (&sums)[4], int n, int ld) {
    for (int i = 0; i < 4; i++) c[(ME / 4 + i / 2 * 8) * ld + 8 * n + ME % 4 * 2 + i % 2] = 2.0f * sums[i];
}
KERNEL tiles(const half *a, const half *b, float *c, int ld) {
    uint_t left[4], right[4];
    left_tile(left, a, ld);
    load_blocks(right, b + (ME / 16 * 8 + ME % 8) * ld + ME / 8 % 2 * 8);
    for (int n = 0; n < 2; n++) {
        float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        multiply(sums, left, right[2 * n], right[2 * n + 1]);
        put_sums(c, sums, n, ld);
    }
}
KERNEL tiles_bf16(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *c, int ld) {
    uint_t left[4], right[4];
    left_tile(left, a, ld);
    load_blocks_turned(right, b + ME % 16 * ld + ME / 16 * 8);
    for (int n = 0; n < 2; n++) {
        float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        multiply_bf16(sums, left, right[2 * n], right[2 * n + 1]);
        put_sums(c, sums, n, ld);
    }
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulator") / "kernels.cu"
    path.write_text(SOURCE.replace("KERNEL ", KERNEL))
    return path


def aligned(array: np.ndarray, aside: int = 0) -> np.ndarray:
    """A copy `aside` bytes after a multiple of 64."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + aside
    room[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)


def test_kernels_are_found_by_their_names() -> None:
    text = (
        f"{KERNEL}one(int n) {{}}\n// kernels: two three\n{KERNEL[:-1]} __launch_bounds__(256)\n four() {{}}"
    )
    assert names(text) == ["one", "four", "two", "three"]


def test_lanes_show_each_other_numbers(source: Path) -> None:
    y = np.zeros((64, 5), np.int32)
    run(source, "shuffled", (1,), 64, y)
    lane = np.arange(64) % 32
    assert (y[:, 0] == lane ^ 5).all()
    assert (y[:, 1] == 7).all()
    assert (y[:, 2] == np.where(lane < 29, lane + 3, lane)).all()
    assert (y[:, 3] == np.where(lane >= 3, lane - 3, lane)).all()
    assert (y.view(np.uint32)[:, 4] == sum(1 << i for i in range(0, 32, 3))).all()


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_a_block_sums_up(source: Path, threads: int) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (7, threads)).astype(np.float32)
    y = np.zeros(7, np.float32)
    run(source, "summed", (7,), threads, x, y, shared=threads // 8)
    assert (y == x.sum(axis=1)).all()


@pytest.mark.parametrize("step", [1, 31, 63])
def test_who_does_not_meet_reads_no_number(source: Path, step: int) -> None:
    y = np.zeros((8, 64), np.float32)
    run(source, "neighbours", (8,), 64, y, 1, step, shared=256)
    assert (y == 1).all()
    run(source, "neighbours", (8,), 64, y, 0, step, shared=256)
    assert np.isnan(y).any()


@pytest.mark.parametrize("what", ["blocks", "threads"])
def test_blocks_and_threads_run_in_any_order(source: Path, what: str) -> None:
    n, firsts, steps = 32, set(), set()
    for seed in range(1, 17):
        y = np.zeros(n + 1, np.int32)
        run(source, what, (n if what == "blocks" else 1,), n, y, seed=seed)
        assert sorted(y[:n]) == list(range(n))
        order = np.argsort(y[:n])
        firsts.add(int(order[0]))
        steps.add(int((order[1] - order[0]) % n))
    assert len(firsts) > 4
    assert steps >= {1, n - 1} if what == "threads" else len(steps) > 4


@pytest.mark.parametrize(
    ("name", "arguments", "threads", "what"),
    [
        ("ends_before_block", (1,), 64, r"1 of 64 threads ended before a __syncthreads\(\)"),
        ("ends_before_block", (32,), 64, r"32 of 64 threads ended before a __syncthreads\(\)"),
        ("ends_before_warp", (), 32, "1 of 32 lanes of a warp ended before a meeting"),
        ("apart", (), 64, r"met at the __syncthreads\(\) of line \d+ and of line \d+"),
        ("deadlock", (), 64, "wait for each other for ever"),
        ("different", (np.zeros(32, np.int32),), 32, "lanes of a warp met for different things"),
        ("some_lanes", (), 32, "a meeting of 16 lanes"),
        ("part_of_a_warp", (np.zeros(40, np.float32),), 40, "a warp of 8 threads met"),
        ("ends_before_block", (0,), 1056, "a block cannot have 1056 threads"),
    ],
)
def test_what_no_kernel_may(
    source: Path, name: str, arguments: tuple[int, ...], threads: int, what: str
) -> None:
    with pytest.raises(EmulationError, match=f"^{name}: .*{what}"):
        run(source, name, (2,), threads, *arguments)
    y = np.zeros(1, np.float32)  # and then all is well again
    run(source, "summed", (1,), 32, np.ones(32, np.float32), y, shared=4)
    assert y[0] == 32


def test_shared_memory_is_as_large_as_was_asked_for(source: Path) -> None:
    for at in (0, 99):
        run(source, "writes_shared", (1,), 32, at, shared=100)
    with pytest.raises(EmulationError, match=r"writes_shared: written .* behind the 100 bytes"):
        run(source, "writes_shared", (1,), 32, 100, shared=100)
    with pytest.raises(EmulationError, match=r"writes_shared: written .* before the shared memory"):
        run(source, "writes_shared", (1,), 32, -1, shared=100)
    with pytest.raises(EmulationError, match="more than there are"):
        run(source, "writes_shared", (1,), 32, 0, shared=(227 << 10) + 1)


@pytest.mark.parametrize("at", [-1, 0, 24, 25, 40])
def test_shared_memory_that_was_not_written_holds_no_numbers(source: Path, at: int) -> None:
    y = np.zeros(2, np.float32)
    run(source, "reads_shared", (1,), 32, y, at, shared=100)
    assert np.isnan(y[0])
    run(source, "reads_halves", (1,), 32, y, at, shared=50)
    assert np.isnan(y).all()


class Three(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_longlong), ("k", ctypes.c_int))


def test_arguments_are_of_the_kernels_kinds(source: Path) -> None:
    x, y = np.array([0.5], np.float32), np.zeros(1, np.float32)
    three, long = Three(x.ctypes.data, 1 << 20, 3), ctypes.c_longlong(1 << 21)
    run(source, "told", (1,), 32, y, three, long, 4, 0.25)
    assert y[0] == 0.75 + (1 << 20) + (1 << 21) + 7
    wrong: list[tuple[Argument | np.ndarray | int | float, ...]] = [
        (y, three, 5, 4, 0.25),  # as a GPU sees it, four bytes of it are anything
        (y, three, long, 4, 1),
        (y, three, long, 4),
        (y, three, long, 4, 0.25, 0),
        (y, y, long, 4, 0.25),
    ]
    for arguments in wrong:
        with pytest.raises(EmulationError, match="told: takes arguments of p8 s24 i8 i4 f4 and was given"):
            run(source, "told", (1,), 32, *arguments)


def test_addresses_are_aligned(source: Path) -> None:
    x, y = aligned(np.arange(32, dtype=np.float32)), np.zeros(1, np.float32)
    for name, fine, wrong in (("wide", (0, 16), (4, 8)), ("narrow", (0, 2), (1, 3))):
        for at in fine:
            run(source, name, (1,), 32, x, y, at)
        for at in wrong:
            with pytest.raises(
                EmulationError, match=rf"{name}: kernels.cu:\d+: an address that is not aligned"
            ):
                run(source, name, (1,), 32, x, y, at)
    run(source, "wide", (1,), 32, x, y, 16)
    assert y[0] == 6


def halves(x: np.ndarray, name: str) -> np.ndarray:
    if name == "tiles":
        return aligned(x.astype(np.float16))
    return aligned((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.parametrize("name", ["tiles", "tiles_bf16"])
def test_tiles_are_multiplied(source: Path, name: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 8, (16, 24)).astype(np.float32) for _ in range(2))
    c = aligned(np.full((16, 24), 5, np.float32))
    run(source, name, (1,), 32, halves(a, name), halves(b, name), c, 24)
    right = b[:, :16].T if name == "tiles" else b[:, :16]  # the first is read by columns
    assert (c[:, :16] == 2 * (1 + a[:, :16] @ right)).all()
    assert (c[:, 16:] == 5).all()


@pytest.mark.parametrize(("aside", "ld"), [(8, 24), (0, 20)])
def test_tiles_are_aligned(source: Path, aside: int, ld: int) -> None:
    a, c = aligned(np.zeros((16, 24), np.float16), aside), aligned(np.zeros((16, 24), np.float32))
    with pytest.raises(EmulationError, match="tiles: a row of a block that is not aligned"):
        run(source, "tiles", (1,), 32, a, a, c, ld)


def test_what_is_no_cpp_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cu"
    path.write_text(f'#include "common.cuh"\n{KERNEL}wrong(int n) {{ nothing(n); }}')
    with pytest.raises(EmulationError, match=r"wrong.cu  is not C\+\+:(.|\n)*nothing"):
        run(path, "wrong", (1,), 32, 1)
