"""Weights as they lie in their file: the same bits, within a limit, and a file that is cut ends nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from hetrun.backend import ReadInto, Segment, WeightUse
from hetrun.backend.conformance.cases import EXACT, Company, OpCase, single
from hetrun.backend.conformance.random_weights import packed
from hetrun.backend.conformance.runner import prepared
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.backends.llamacpp.file_runs import MatrixRun, find_run
from hetrun.backends.llamacpp.kernels.paging import PagingUnit, pager
from hetrun.backends.llamacpp.kernels.sigbus_guard import guard
from hetrun.backends.llamacpp.mapped_weights import MappedPages
from hetrun.backends.llamacpp.weight_memory import GgmlBuffer
from hetrun.errors import BackendError, Cancelled, ModelFileError
from hetrun.graph import Constant, Extent, Op, Value, Weight, stack
from hetrun.graph.ops import NONE, Moe
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader
from hetrun.system.file_identity import Stamp
from tests.support.tiers import exhaustive, first, in_pairs

pytestmark = pytest.mark.skipif(not pager() or not guard(), reason="there was no C compiler")

WIDTH = 256
MOE = Moe(n_experts=8, n_used=2, n_ff=256, normalise=True)
X = Value("x", WIDTH, "tokens")
PAGE = mmap.PAGESIZE
LAYERS = 3


class MappingBackend(LlamacppBackend):
    """With what is multiplied by in the file."""

    def __init__(self, managed: bool = True, uses: Sequence[str] = ("experts",)) -> None:
        super().__init__()
        self.mapped = MappedPages(self.lib, pager() if managed else None, guard())
        self._uses = uses

    def upload(self, wanted: WeightUse, read: ReadInto) -> GgmlBuffer:
        if wanted.use in self._uses:
            return self.mapped.hold(wanted)
        return super().upload(wanted, read)

    def compute(self, graph: int) -> None:
        self.mapped.arm()
        try:
            super().compute(graph)
        finally:
            self.mapped.check()

    def close(self) -> None:
        super().close()
        self.mapped.close()


class PlainBackend(LlamacppBackend):
    """Everything in memory as it lies in the file."""

    def __init__(self) -> None:
        super().__init__()
        self._memory._repacking = []
        self._memory._products = None


@cache
def drawn(seed: int, weight: int, rows: int, cols: int, quant: str) -> npt.NDArray[np.uint8]:
    """The rows of a weight, packed once for all files of such weights."""
    values = np.random.default_rng((seed, weight)).standard_normal((rows, cols), dtype=np.float32)
    return packed(values * np.float32(cols**-0.5), by_name(quant))


class ModelFile:
    """A file that weights are written to, one behind the other."""

    def __init__(self, path: Path, seed: int = 3) -> None:
        self.path, self._seed, self._weights = path, seed, 0
        self._file = path.open("wb")
        self._file.write(b"header" * 16)

    def weight(self, rows: int, cols: int, quant: str = "Q4_0") -> Weight:
        self._file.write(bytes(-self._file.tell() % 32))
        raw = drawn(self._seed, self._weights, rows, cols, quant)
        self._weights += 1
        extent = Extent(str(self.path), self._file.tell(), rows, raw.shape[1], raw.shape[1])
        self._file.write(raw.tobytes())
        return Weight(f"w{extent.offset}", (rows, cols), by_name(quant), (extent,))

    def close(self) -> Stamp:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Stamp.of(os.stat(self.path))


def stamped(weight: Weight, stamp: Stamp | None) -> Weight:
    parts = tuple(
        Extent(p.path, p.offset, p.rows, p.row_bytes, p.stride, stamp)
        for p in weight.parts
        if isinstance(p, Extent)
    )
    return Weight(weight.name, weight.shape, weight.quant, parts)


def mixtures(path: Path, quant: str = "Q4_0", apart: bool = False, stamp: bool = True) -> Segment:
    """Some layers of experts, each one's matrices on top of each other, or (apart) expert by expert."""
    file, weights = ModelFile(path), []
    for _ in range(LAYERS):
        router = file.weight(MOE.n_experts, WIDTH, "F32")
        shapes = [(MOE.n_ff, WIDTH), (MOE.n_ff, WIDTH), (WIDTH, MOE.n_ff)]
        if apart:
            each = [[file.weight(*s, quant) for s in shapes] for _ in range(MOE.n_experts)]
            parts = [stack([expert[i] for expert in each]) for i in range(3)]
        else:
            parts = [file.weight(MOE.n_experts * r, c, quant) for r, c in shapes]
        weights.append([router, *parts])
    closed = file.close()
    found = closed if stamp else None
    ops, x = [], X
    for i, layer in enumerate(weights):
        out = Value(f"y{i}", WIDTH, "tokens")
        ops.append(Op("moe", (x,), out, tuple(stamped(w, found) for w in layer), MOE, f"blk.{i}"))
        x = out
    return Segment("test", "", tuple(ops), (X,), (x,), "the test says so")


def products(path: Path, quant: str = "BF16") -> Segment:
    """Products one behind the other."""
    file = ModelFile(path)
    weights = [file.weight(WIDTH, WIDTH, quant) for _ in range(6)]
    found = file.close()
    ops, x = [], X
    for i, weight in enumerate(weights):
        out = Value(f"y{i}", WIDTH, "tokens")
        ops.append(Op("linear", (x,), out, (stamped(weight, found),), NONE, f"blk.{i}"))
        x = out
    return Segment("test", "", tuple(ops), (X,), (x,), "the test says so")


class Ready:
    """A compiled segment, and what it is given."""

    def __init__(
        self, backend: LlamacppBackend, segment: Segment, company: Company, threads: int = 2
    ) -> None:
        work, kv = prepared(OpCase("select", (WIDTH,), WIDTH, company, EXACT), np.random.default_rng(11))
        self.work, self._segment = work, segment
        numbers = np.random.default_rng(5).standard_normal((len(work.tokens), WIDTH), dtype=np.float32)
        work.values[X.name] = numbers
        backend.set_threads(threads)
        reader = FileReader()
        buffers = {use: backend.upload(use, reader.read) for use in backend.wants(segment.ops)}
        reader.close()
        self._runner = backend.compile(segment, work.shape, buffers, kv)

    def run(self) -> np.ndarray:
        self._runner.submit(self.work).wait()
        return self.work.values[self._segment.writes[0].name].copy()


@pytest.fixture
def backend() -> Iterator[MappingBackend]:
    made = MappingBackend()
    yield made
    made.close()


def resident(segment: Segment) -> Mapping[int, np.ndarray]:
    """What comes of weights in memory, for passes of 1 and of 40 tokens."""
    plain = PlainBackend()
    found = {n: Ready(plain, segment, single(n)).run() for n in (1, 40)}
    plain.close()
    return found


def read_together(segment: Segment, backend: LlamacppBackend) -> list[list[WeightUse]]:
    """What each op reads of mapped weights."""
    return [[u for u in backend.wants([op]) if u.use != "vector"] for op in segment.ops]


def check_pool(mapped: MappedPages) -> None:
    """What is in memory is what the order says, and no more than may be."""
    units = (PagingUnit * len(mapped._units)).from_address(mapped.pool.units)
    order, at = [], mapped.pool.first
    while at >= 0:
        order.append(at)
        assert units[at].behind < 0 or units[units[at].behind].before == at
        at = units[at].behind
    assert sorted(order) == [i for i, unit in enumerate(units) if unit.state]
    assert mapped.pool.resident == sum(units[i].bytes for i in order)
    assert mapped.resident_bytes <= mapped.room


def in_memory(path: Path) -> int:
    """Bytes of a file that this process has mapped in memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def forgets(path: Path) -> bool:
    """Whether the file system gives cached pages back when it is asked to: one in memory cannot."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        pages = (ctypes.c_ubyte * -(-len(memory) // PAGE))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), pages)
        return not failed and not any(page & 1 for page in pages)


# --- how weights lie


@st.composite
def layouts(draw: st.DrawFn) -> tuple[WeightUse, bytes]:
    """A weight of several matrices in parts anywhere in a file, and the file."""
    matrices, rows, row_bytes = draw(st.integers(1, 4)), draw(st.integers(1, 3)), 8
    total, parts, offset = matrices * rows, [], draw(st.integers(0, 3)) * 4
    gap = draw(st.integers(0, 2)) * 4
    while total:
        n = draw(st.sampled_from([n for n in (rows, total, 1) if n <= total]))
        parts.append(Extent("file", offset, n, row_bytes, row_bytes))
        offset += n * row_bytes + draw(st.sampled_from([0, gap]))
        total -= n
    if draw(st.booleans()):
        parts = parts[::-1]
    weight = Weight("w", (matrices * rows, 2), by_name("F32"), tuple(parts))
    return WeightUse(weight, "experts", matrices), draw(st.binary(min_size=offset, max_size=offset))


@given(layouts())
def test_a_run_shows_what_a_reader_reads(layout: tuple[WeightUse, bytes]) -> None:
    use, content = layout
    found = find_run(use)
    if isinstance(found, str):
        return
    read = b"".join(content[p.offset : p.end] for p in use.weight.parts if isinstance(p, Extent))
    starts = [found.offset + m * found.distance for m in range(found.matrices)]
    assert b"".join(content[a : a + found.matrix_bytes] for a in starts) == read
    assert found.offset + found.span <= len(content)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_matrices_at_equal_distances_are_a_run(matrices: int, rows: int, gap: int) -> None:
    distance = (rows * 2 + gap) * 4
    parts = tuple(Extent("file", 16 + m * distance, rows, 8, 8) for m in range(matrices))
    use = WeightUse(Weight("w", (matrices * rows, 2), by_name("F32"), parts), "experts", matrices)
    found = find_run(use)
    assert isinstance(found, MatrixRun)
    assert (found.offset, found.matrices, found.matrix_bytes) == (16, matrices, rows * 8)
    assert found.distance == (distance if matrices > 1 else rows * 8)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((Constant(bytes(16), 2),), "file"),
        ((Extent("a", 0, 2, 8, 24),), "follow each other"),
        ((Extent("a", 0, 1, 8, 8), Extent("b", 8, 1, 8, 8)), "several files"),
        ((Extent("a", 3, 2, 8, 8),), "multiple of 4"),
        ((Extent("a", 64, 1, 8, 8), Extent("a", 0, 1, 8, 8)), "equal distances"),
    ],
)
def test_what_cannot_be_mapped_says_why(parts: tuple[Extent, ...], reason: str) -> None:
    use = WeightUse(Weight("w", (2, 2), by_name("F32"), parts), "experts", 2)
    assert reason in (MappedPages.refusal(use) or "")
    mapped = MappedPages(ggml_api.library(), pager(), guard())
    with pytest.raises(BackendError, match=reason):
        mapped.hold(use)


def test_tables_are_not_mapped() -> None:
    weight = Weight("w", (2, 2), by_name("F32"), (Extent("a", 0, 2, 8, 8),))
    assert MappedPages.refusal(WeightUse(weight, "lookup"))


# --- what comes of them


@pytest.mark.parametrize(
    "case",
    in_pairs(product(("Q4_0", "Q8_0", "Q4_K", "BF16"), (False, True), (1, 2)), lambda case: case),
    ids=str,
)
def test_the_same_bits_in_the_least_room(case: tuple[str, bool, int], tmp_path: Path) -> None:
    quant, apart, threads = case
    segment = mixtures(tmp_path / "model", quant, apart)
    expected, backend = resident(segment), MappingBackend()
    ready = {n: Ready(backend, segment, single(n), threads) for n in expected}
    mapped = backend.mapped
    mapped.room = MappedPages.least(read_together(segment, backend))
    for n in (1, 40, 1, 1, 40):
        np.testing.assert_array_equal(ready[n].run(), expected[n])
        check_pool(mapped)
    backend.close()


def test_pages_in_memory_keep_within_the_room(backend: MappingBackend, tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model", "F16")
    if not forgets(tmp_path / "model"):
        pytest.skip("this file system keeps its pages in memory")
    ready = [Ready(backend, segment, single(n)) for n in (40, 1)]
    mapped = backend.mapped
    whole = (tmp_path / "model").stat().st_size
    for share in (0.5, 0.8, 2.0, 0.6):
        mapped.room = int(share * whole)
        for each in ready:
            each.run()
            assert 0 < in_memory(tmp_path / "model") <= mapped.room
    mapped.room = 0
    # A fault also maps up to 16 neighbours that are cached, such as routers between experts.
    assert in_memory(tmp_path / "model") <= PAGE * (len(mapped._ranges) + 32 * LAYERS)


def test_what_is_in_memory_is_not_read_again(backend: MappingBackend, tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model")
    ready = Ready(backend, segment, single(1))
    backend.mapped.room = 1 << 30
    ready.run()
    first = backend.mapped.bytes_read
    assert first == backend.mapped.bytes_used
    assert first >= LAYERS * MOE.n_used * 3 * by_name("Q4_0").row_bytes(WIDTH) * WIDTH
    ready.run()
    assert (backend.mapped.bytes_read, backend.mapped.bytes_used) == (first, 2 * first)


def test_what_the_system_took_comes_again(backend: MappingBackend, tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model")
    expected = resident(segment)[40]
    ready = Ready(backend, segment, single(40))
    backend.mapped.room = 1 << 30
    ready.run()
    for file in backend.mapped._files.values():
        file.drop(0, file.size)
    np.testing.assert_array_equal(ready.run(), expected)
    check_pool(backend.mapped)


def test_of_weights_that_every_pass_reads_as_many_stay_as_fit(tmp_path: Path) -> None:
    """The order of their going: had the oldest gone first, none would be there when its turn came."""
    segment = products(tmp_path / "model")
    expected, backend = resident(segment), MappingBackend(uses=("product",))
    ready = Ready(backend, segment, single(1))
    mapped = backend.mapped
    size = WIDTH * WIDTH * 2
    mapped.room = 4 * (size + PAGE) + PAGE * len(mapped._ranges)
    for _ in range(3):
        np.testing.assert_array_equal(ready.run(), expected[1])
        check_pool(mapped)
    before = mapped.bytes_read
    ready.run()
    assert 2 * size <= mapped.bytes_read - before <= 4 * (size + PAGE)
    backend.close()


@pytest.mark.parametrize("apart", first([6, 2]))
def test_a_run_that_is_stopped_anywhere_leaves_nothing_wrong(
    backend: MappingBackend, apart: int, tmp_path: Path
) -> None:
    segment = mixtures(tmp_path / "model")
    expected = resident(segment)
    ready = {n: Ready(backend, segment, single(n)) for n in (1, 40)}
    mapped = backend.mapped
    mapped.room = MappedPages.least(read_together(segment, backend))
    for stop in range(1, 60, apart):
        left = stop

        def asked(_: int | None) -> bool:
            nonlocal left
            left -= 1
            return left <= 0

        callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(asked)
        backend._ask(ctypes.cast(callback, ctypes.c_void_p).value or 0)
        try:
            ready[40 if stop % 4 == 1 else 1].run()
        except Cancelled:
            pass
        backend._ask(ggml_api.libc_address("strlen"))
        np.testing.assert_array_equal(ready[1].run(), expected[1])
        check_pool(mapped)


def test_without_the_library_the_system_brings_pages(tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model")
    expected, backend = resident(segment), MappingBackend(managed=False)
    ready = Ready(backend, segment, single(40))
    np.testing.assert_array_equal(ready.run(), expected[40])
    backend.mapped.room = 0
    np.testing.assert_array_equal(ready.run(), expected[40])
    backend.mapped.trim()
    if forgets(tmp_path / "model"):
        assert in_memory(tmp_path / "model") <= PAGE * 2 * 3 * LAYERS
    backend.close()


def test_what_our_own_products_would_fuse_is_not_fused_where_it_is_mapped(tmp_path: Path) -> None:
    file = ModelFile(tmp_path / "model")
    weights = [file.weight(WIDTH, WIDTH) for _ in range(3)]
    file.close()
    gate, up, gated, y = (Value(name, WIDTH, "tokens") for name in ("gate", "up", "gated", "y"))
    ops = (
        *(Op("linear", (X,), v, (w,), NONE, "ffn") for v, w in zip((gate, up), weights, strict=False)),
        Op("swiglu", (gate, up), gated, (), NONE, "ffn"),
        Op("linear", (gated,), y, (weights[2],), NONE, "ffn"),
    )
    segment = Segment("test", "", ops, (X,), (y,), "the test says so")
    expected, backend = resident(segment), LlamacppBackend()
    chosen = [use.weight for use in backend.wants(ops)]
    backend._mapped.map(chosen, 1 << 30)
    np.testing.assert_array_equal(Ready(backend, segment, single(1)).run(), expected[1])
    backend.close()


# --- a file that changes


def test_another_file_is_refused(backend: MappingBackend, tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model")
    mixtures(tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "model")
    with pytest.raises(ModelFileError, match="another file"):
        Ready(backend, segment, single(1))


def test_a_file_that_was_written_to_is_an_error_of_the_run(backend: MappingBackend, tmp_path: Path) -> None:
    segment = mixtures(tmp_path / "model")
    ready = Ready(backend, segment, single(1))
    backend.mapped.room = 1 << 30
    ready.run()
    with (tmp_path / "model").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"more")
    with pytest.raises(ModelFileError, match="open it again"):
        ready.run()


def test_a_cut_file_is_an_error_and_once_it_is_whole_it_works_again(
    backend: MappingBackend, tmp_path: Path
) -> None:
    """No stamp, so that only the guard notices."""
    path = tmp_path / "model"
    segment = mixtures(path, stamp=False)
    content, ready = path.read_bytes(), Ready(backend, segment, single(40))
    backend.mapped.room = 1 << 30
    expected = ready.run()
    for size in (len(content) // 2, PAGE, 0):
        os.truncate(path, size)
        for _ in range(2):
            with pytest.raises(ModelFileError, match="at byte"):
                ready.run()
        with path.open("r+b") as file:
            file.write(content)
        np.testing.assert_array_equal(ready.run(), expected)
        check_pool(backend.mapped)


CUT = """
import faulthandler, os, sys, threading
from pathlib import Path
from hetrun.errors import ModelFileError
from hetrun.backend.conformance.cases import single
from tests.backends.test_mapped import MappingBackend, Ready, mixtures
path = Path(sys.argv[1])
if "before" in sys.argv: faulthandler.enable()
backend = MappingBackend()
ready = Ready(backend, mixtures(path, stamp="stamp" in sys.argv), single(40))
backend.mapped.room = 1 << 30
ready.run()
if "after" in sys.argv: faulthandler.enable()
half = path.stat().st_size // 2
threading.Timer(0.05, os.truncate, (path, half)).start()
try:
    for _ in range(100000): ready.run()
except ModelFileError as error:
    print("error:", error)
"""
ELSEWHERE = """
import ctypes, faulthandler, mmap, os, sys
import numpy as np
from hetrun.backends.llamacpp.kernels.sigbus_guard import guard
path, order, how = sys.argv[1:]
if order == "before": faulthandler.enable()
guard().arm()
if order == "after": faulthandler.enable()
guard().arm()
if how == "sent": os.kill(os.getpid(), 7)
with open(path, "r+b") as file:
    file.truncate(8192)
    memory = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    memory[5000]
"""


def child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)


@pytest.mark.parametrize(
    ("stamp", "traced"),
    [
        ("stamp", "never"),
        ("none", "before"),
        pytest.param("none", "never", marks=exhaustive),
        pytest.param("none", "after", marks=exhaustive),
    ],
)
def test_a_file_that_is_cut_while_it_runs_does_not_end_the_process(
    stamp: str, traced: str, tmp_path: Path
) -> None:
    done = child(CUT, str(tmp_path / "model"), stamp, traced)
    assert done.returncode == 0, done.stderr
    assert "error:" in done.stdout
    assert ("it was changed while in use" if stamp == "stamp" else "at byte") in done.stdout


@pytest.mark.parametrize("how", ["fault", "sent"])
@pytest.mark.parametrize("traced", ["never", "before", "after"])
def test_other_faults_are_the_business_of_others(traced: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    done = child(ELSEWHERE, str(tmp_path / "other"), traced, how)
    assert done.returncode == -7
    assert ("Fatal Python error: Bus error" in done.stderr) == (traced != "never")
    assert done.stderr.count("Fatal Python error") <= 1
