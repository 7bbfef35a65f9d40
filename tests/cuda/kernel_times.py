"""How long each kernel takes, by itself: recorded many times over with other weights each time, so that none
comes from a cache, and run as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hetrun.backends.cuda import attention_launch, matmul_launch
from hetrun.backends.cuda.attention_launch import ROW, TILE, AttentionResults, KvTableStruct as SlabTable
from hetrun.backends.cuda.driver import Argument, DeviceProduct
from hetrun.backends.cuda.int8 import launch as int8
from hetrun.backends.cuda.kernel_cache import KernelLibrary, at, long, number, real
from hetrun.backends.cuda.kv_mirror import ROWS as SLAB
from hetrun.backends.cuda.lowering import MOST_BLOCKS, THREADS
from hetrun.backends.cuda.matmul_launch import MatmulOutput
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.programs import Programs, Source
from hetrun.backends.cuda.stages import Work
from hetrun.graph.quant import by_name
from tests.cuda.measured import gpu_memory
from tests.cuda.rows import Line, Table
from tests.cuda.smoke import replayed

ROOM, OF_WEIGHTS, BIG = 6 << 30, 1 << 30, 1 << 30  # bytes: more than any cache has
WIDTH, INNER = 4096, 14336  # of an 8B model
QUANTS = "Q4_K", "Q6_K", "Q4_0", "Q8_0", "BF16"
FEW, MANY = (1, 2, 4, 8, 16, 32), (33, 64, 128, 512, 2048, 4096)
ROWS = 2048
N_HEADS, N_KV, HEAD = 32, 8, 128
DEPTHS = 512, 4096, 32768
TILED = 512, 4096, 16384

Facts = tuple[Argument, ...]


@dataclass
class Bench:
    """A device with random bytes in its memory."""

    memory: CudaMemory
    table: Table
    library: KernelLibrary = field(init=False)
    weights: int = field(init=False)  # where they lie
    x: int = field(init=False)
    y: int = field(init=False)

    def __post_init__(self) -> None:
        driver = self.memory.driver
        self.library = KernelLibrary(driver, Programs(driver.device.capability))
        self.weights = self.memory.take(OF_WEIGHTS, "weights")
        self.x, self.y = (self.memory.take(BIG, what) for what in ("x", "y"))
        host = driver.pinned(64 << 20)
        # Halves of about one, as bytes of any type: no infinities.
        host.view(np.uint16)[:] = np.random.default_rng(0).integers(0x3800, 0x3C00, host.size // 2)
        for base, size in ((self.weights, OF_WEIGHTS), (self.x, BIG)):
            for offset in range(0, size, host.size):
                driver.copy(base + offset, int(host.ctypes.data), host.size, self.memory.computing)

    def copies(self, nbytes: int, most: int = 64) -> Sequence[int]:
        """Addresses of weights beside each other, `nbytes` each: as many as there is room for."""
        step = -(-nbytes // 256) * 256
        return [self.weights + i * step for i in range(max(1, min(most, OF_WEIGHTS // step)))]

    def tell(self, target: int, array: np.ndarray) -> None:
        """Numbers, for the work that comes next."""
        self.memory.send(target, array.view(np.uint8).reshape(-1))

    def seconds(self, work: Sequence[Work], each: int = 1) -> float:
        """Of one of them, where `each` make up one."""
        driver, stream = self.memory.driver, self.memory.computing
        return replayed(driver, stream, work) / (len(work) / each)

    def bytes_line(self, what: str, seconds: float, nbytes: float) -> None:
        note = f"{1e6 * seconds:.1f} µs"
        self.table.add(Line(what, "GB/s", (nbytes / seconds / 1e9,), note=note))

    def flops_line(self, what: str, seconds: float, flops: float) -> None:
        note = f"{1e6 * seconds:.1f} µs"
        self.table.add(Line(what, "TFLOP/s", (flops / seconds / 1e12,), note=note))


def kernel_times(table: Table, only: str = "") -> None:
    """All of them, or those whose names have a text in them."""
    groups: Mapping[str, Callable[[Bench], None]] = {
        **{f"few {quant}": partial(_few, quant=quant) for quant in QUANTS},
        **{"gated": _gated, "unpack": _unpack, "many": _many},
        **{f"bytes {quant}": partial(_in_bytes, quant=quant) for quant in QUANTS[:4]},
        **{"attention": _attention, "small": _small},
    }
    with gpu_memory(ROOM) as memory:
        bench = Bench(memory, table)
        for name, group in groups.items():
            if only in name and table.has_time(name):
                group(bench)


def source(quant: str) -> Source:
    """The products of a type."""
    return Source("products", (("QUANT", quant),))


def _few(bench: Bench, quant: str) -> None:
    nbytes = by_name(quant).row_bytes(WIDTH) * INNER
    for tokens in FEW:
        name = f"few_{matmul_launch.group_of(tokens)}"
        grid = (matmul_launch.blocks(tokens, INNER),)
        work = [
            bench.library.launch(
                *(source(quant), name, grid, matmul_launch.THREADS),
                *(MatmulOutput(w, 0, 0, bench.y, INNER, INNER), MatmulOutput(), MatmulOutput()),
                *(at(bench.x), number(WIDTH), number(WIDTH), number(tokens)),
            )
            for w in bench.copies(nbytes)
        ]
        bench.bytes_line(f"{name} {quant} {tokens} tokens", bench.seconds(work), nbytes)


def _gated(bench: Bench) -> None:
    nbytes = by_name("Q4_K").row_bytes(WIDTH) * INNER
    copies = bench.copies(nbytes)
    work = [
        bench.library.launch(
            *(source("Q4_K"), "gated_1", (matmul_launch.blocks(1, INNER),), matmul_launch.THREADS),
            *(at(gate), at(up), at(0), at(0), at(bench.y), number(INNER)),
            *(at(bench.x), number(WIDTH), number(WIDTH), number(1), number(0)),
        )
        for gate, up in zip(copies[::2], copies[1::2], strict=True)
    ]
    bench.bytes_line("gated_1 Q4_K", bench.seconds(work), 2 * nbytes)


def _unpack(bench: Bench) -> None:
    for quant in QUANTS[:4]:
        nbytes, pieces = by_name(quant).row_bytes(WIDTH) * INNER, WIDTH * INNER // 8
        grid = (min(MOST_BLOCKS, -(-pieces // THREADS)),)
        work = [
            bench.library.launch(
                source(quant), "unpack_bf16", grid, THREADS, at(w), at(bench.y), long(pieces)
            )
            for w in bench.copies(nbytes, 16)
        ]
        bench.bytes_line(f"unpack_bf16 {quant}, read and written", bench.seconds(work), nbytes + 16 * pieces)


def _many(bench: Bench) -> None:
    for tokens in MANY:
        work = [
            DeviceProduct(bench.x, w, bench.y, tokens, INNER, WIDTH, INNER)
            for w in bench.copies(2 * INNER * WIDTH, 8)
        ]
        bench.flops_line(f"cuBLAS {tokens} tokens", bench.seconds(work), 2.0 * tokens * INNER * WIDTH)
        n = tokens * WIDTH
        grid = (min(MOST_BLOCKS, -(-n // THREADS)),)
        rounding = bench.library.launch(
            Source("small"), "round_bf16", grid, THREADS, at(bench.x), at(bench.y), long(n)
        )
        bench.bytes_line(f"round_bf16 {tokens} tokens", bench.seconds([rounding] * 8), 6 * n)


def _in_bytes(bench: Bench, quant: str) -> None:
    """What takes the place of cuBLAS and of unpacking, in passes that may be fast."""
    nbytes, processors = by_name(quant).row_bytes(WIDTH) * INNER, bench.memory.driver.device.processors
    for tokens in MANY:
        rounded = int8.Input(bench.x, tokens, WIDTH)
        size = int8.tile(tokens, processors, INNER)
        work = [
            bench.library.launch(
                *(int8.source(quant), f"products_{size}"),
                *((int8.blocks(size, tokens, INNER),), int8.threads(size)),
                *(MatmulOutput(w, 0, 0, bench.y, INNER, INNER), MatmulOutput(), MatmulOutput(), rounded),
                shared=int8.shared(size),
            )
            for w in bench.copies(nbytes, 8)
        ]
        flops = 2.0 * tokens * INNER * WIDTH
        bench.flops_line(f"products_{size} {quant} {tokens} tokens", bench.seconds(work), flops)


def _attention(bench: Bench) -> None:
    head_bytes = 2 * HEAD
    row_bytes = N_KV * head_bytes
    code = Source("attention", (("KV", "F16"), ("HEAD", str(HEAD))))
    slab_bytes = 2 * SLAB * row_bytes
    most = max(DEPTHS) // SLAB + 1
    slabs = bench.memory.take(8 * most, "slabs")
    tables = bench.memory.take(1 << 20, "rows")
    bench.tell(slabs, bench.weights + slab_bytes * np.arange(most, dtype=np.int64))
    kv = SlabTable(slabs, 0, SLAB * row_bytes, row_bytes)
    facts: Facts = real(HEAD**-0.5), real(0.0), number(N_HEADS), number(N_KV)
    splits = attention_launch.splits(bench.memory.driver.device.processors, N_HEADS, N_KV, HEAD)
    ended = bench.memory.take(4 * 8 * N_KV, "how many blocks have ended")
    bench.tell(ended, np.zeros(8 * N_KV, np.int32))
    for depth in DEPTHS:
        for rows in (1, 8):
            told = np.array([(i, 0, depth, 0) for i in range(rows)], ROW)
            bench.tell(tables, told)
            parts = bench.y
            shared = attention_launch.few_shared(N_HEADS // N_KV, HEAD, splits)
            looks = bench.library.launch(
                *(code, "attend_few", (rows * splits, N_KV, 1), attention_launch.THREADS),
                *(at(bench.x), at(tables), kv, at(parts), *facts, number(splits)),
                AttentionResults(bench.y + BIG // 2, 0, 0, ended),
                shared=shared,
            )
            seconds = bench.seconds([looks] * 8, 2)
            bench.bytes_line(f"attend_few {rows} rows of {depth}", seconds, 2.0 * depth * row_bytes)
    for depth in TILED:
        _tiles(bench, code, kv, tables, facts, depth)


def _tiles(bench: Bench, code: Source, kv: SlabTable, tables: int, facts: Facts, depth: int) -> None:
    rows = min(depth, ROWS)
    most = attention_launch.LINES * N_KV // N_HEADS
    begin = depth - rows
    told = np.array([(a, min(most, rows - a), 0, begin + a + 1, 0) for a in range(0, rows, most)], TILE)
    bench.tell(tables, told)
    work = bench.library.launch(
        *(
            Source("attention_tiles", code.defines),
            "attend_many",
            (len(told), N_KV),
            attention_launch.THREADS,
        ),
        *(at(bench.x), at(tables), kv, at(bench.y), at(0), *facts),
        shared=attention_launch.many_shared(HEAD),
    )
    seen = sum(begin + i + 1 for i in range(rows))
    bench.flops_line(
        f"attend_many {rows} rows of {depth}", bench.seconds([work] * 4), 4.0 * seen * N_HEADS * HEAD
    )


def _small(bench: Bench) -> None:
    small = Source("small")
    x, y = at(bench.x), at(bench.y)
    narrow, wide = (-(-WIDTH // THREADS),), (-(-INNER // THREADS),)
    norm = x, x, y, at(0), number(WIDTH), number(1), real(1e-5)
    work = {
        "rms_norm 1 row": bench.library.launch(small, "rms_norm", (1,), 512, *norm, shared=64),
        "add 1 row": bench.library.launch(small, "add", narrow, THREADS, x, x, y, long(WIDTH)),
        "swiglu 1 row": bench.library.launch(small, "swiglu", wide, THREADS, x, x, y, long(INNER)),
    }
    for name, each in work.items():
        bench.table.add(Line(name, "µs", (1e6 * bench.seconds([each] * 200),)))
