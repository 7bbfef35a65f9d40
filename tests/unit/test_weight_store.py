"""Reading weights out of files, and the store of what each backend holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetrun.backend import Backend, Buffers, PassShape, ReadInto, Runner, Segment, WeightUse
from hetrun.errors import ModelFileError
from hetrun.executor import weight_store
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Extent, Op, Weight
from hetrun.graph.quant import by_name
from hetrun.loader.weight_reader import FileReader
from hetrun.memory.kv.cache import KvCache
from hetrun.system.file_identity import Stamp
from hetrun.system.memory_info import available_memory

F32 = by_name("F32")


class Kept:
    """The bytes as they were read."""

    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)


class Cupboard(Backend):
    """Keeps weights and remembers in which order they came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.order: list[str] = []

    def supports(self, op: Op) -> bool:
        return False

    def upload(self, wanted: WeightUse, read: ReadInto) -> Kept:
        raw = np.zeros(wanted.weight.nbytes, np.uint8)
        read(wanted.weight, raw)
        self.order.append(wanted.weight.name)
        return Kept(raw)

    def compile(self, segment: Segment, shape: PassShape, buffers: Buffers, kv: KvCache) -> Runner:
        raise NotImplementedError


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """64 float32 numbers: 0, 1, 2, ..."""
    path = tmp_path / "numbers.bin"
    np.arange(64, dtype=np.float32).tofile(path)
    return path


def row(path: Path, first: int, n: int = 8) -> Weight:
    return Weight(f"from {first}", (1, n), F32, (Extent(str(path), 4 * first, 1, 4 * n, 4 * n),))


def read(w: Weight) -> np.ndarray:
    out, reader = np.zeros(w.nbytes, np.uint8), FileReader()
    try:
        reader.read(w, out)
    finally:
        reader.close()
    return out.view(np.float32)


def test_a_reader_takes_up_where_the_system_stopped(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[int, list[memoryview], int], int] = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: real(file, [into[0][:5]], at))
    assert (read(row(numbers, 3)) == np.arange(3, 11)).all()


def test_a_file_that_was_cut_while_in_use(numbers: Path) -> None:
    os.truncate(numbers, 40)
    with pytest.raises(
        ModelFileError, match=r"numbers\.bin: the file ends inside the tensor from 8, at byte 40"
    ):
        read(row(numbers, 8))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.bin: was changed while in use: No such file"):
        read(row(tmp_path / "nowhere.bin", 0))


def test_a_disk_that_fails(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, into: list[memoryview], at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=r"reading from 2 at byte 8 failed: Input/output error"):
        read(row(numbers, 2))


def test_memory_of_another_size(numbers: Path) -> None:
    with pytest.raises(ValueError, match="from 0 has 32 bytes and cannot be read into"):
        FileReader().read(row(numbers, 0), np.zeros(31, np.uint8))


def test_the_store_loads_in_the_order_of_the_file_and_each_weight_once(numbers: Path) -> None:
    a, b = Cupboard("a"), Cupboard("b")
    store = WeightStore({"a": a, "b": b})
    late, early = WeightUse(row(numbers, 40), "product"), WeightUse(row(numbers, 8), "vector")
    told: list[float] = []
    store.load({"a": [late, early, late], "b": [late]}, told.append)
    assert (a.order, b.order) == (["from 8", "from 40"], ["from 40"])
    assert told == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert store.resident_bytes == 3 * 32
    held = store.buffers("a")[late]
    assert isinstance(held, Kept)
    assert (held.raw.view(np.float32) == np.arange(40, 48)).all()

    store.settle()
    assert store.copied_bytes == {"a": 0, "b": 0}
    store.load({"a": [late], "b": [early]})
    assert store.copied_bytes == {"a": 0, "b": 32}  # all that came later
    assert (a.order, b.order) == (["from 8", "from 40"], ["from 40", "from 8"])
    assert store.resident_bytes == 4 * 32


@pytest.mark.parametrize(("free", "dropped"), [(127, True), (129, False)])
def test_a_large_model_is_not_left_in_the_page_cache_as_well(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, free: int, dropped: bool
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(weight_store, "available_memory", lambda: free)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, length, advice: advised.append(advice))
    WeightStore({"a": Cupboard("a")}).load({"a": [WeightUse(row(numbers, 0), "vector")]})
    assert advised == ([os.POSIX_FADV_DONTNEED] if dropped else [])


def test_files_are_closed_when_a_weight_cannot_be_read(numbers: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    uses = [WeightUse(row(numbers, 0), "vector"), WeightUse(row(tmp_path / "missing", 0), "vector")]
    with pytest.raises(ModelFileError):
        WeightStore({"a": Cupboard("a")}).load({"a": uses})
    assert len(os.listdir("/proc/self/fd")) == before


def test_free_memory_is_less_than_all_of_it() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- files that change while they are in use


def stamped(path: Path) -> Weight:
    """A weight of a file whose header was read just now."""
    part = Extent(str(path), 0, 1, 32, 32, Stamp.of(path.stat()))
    return Weight("w", (1, 8), F32, (part,))


def write_same_size(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, ns=(0, 1))


def put_another(path: Path) -> None:
    os.replace(shutil.copy2(path, path.with_name("other")), path)


CHANGES = pytest.mark.parametrize(
    ("change", "says"),
    [
        (write_same_size, "was written to: it was changed while in use; open it again"),
        (lambda path: os.truncate(path, 100), "is 100 bytes long and was 256: it was changed while in use"),
        (put_another, "is another file now: it was changed while in use"),
    ],
)


@CHANGES
def test_a_file_that_changed_before_it_is_read(
    numbers: Path, change: Callable[[Path], object], says: str
) -> None:
    w = stamped(numbers)
    assert (read(w) == np.arange(8)).all()
    change(numbers)
    with pytest.raises(ModelFileError, match=rf"numbers\.bin: {says}"):
        read(w)


@pytest.mark.parametrize("change", [write_same_size, lambda path: os.truncate(path, 100)])
def test_a_file_that_changes_while_it_is_read(numbers: Path, change: Callable[[Path], object]) -> None:
    w, reader = stamped(numbers), FileReader()
    reader.read(w, np.zeros(32, np.uint8))
    open_before = len(os.listdir("/proc/self/fd"))
    change(numbers)
    with pytest.raises(ModelFileError, match="changed while in use"):
        reader.close()
    assert len(os.listdir("/proc/self/fd")) == open_before - 1, "the file is closed all the same"


def test_a_pipe_in_the_place_of_a_file_does_not_hang(numbers: Path) -> None:
    w = stamped(numbers)
    numbers.unlink()
    os.mkfifo(numbers)
    with pytest.raises(ModelFileError, match="changed while in use"):  # a number of a file may be used again
        read(w)


def test_parts_of_a_weight_keep_its_stamp(numbers: Path) -> None:
    w = stamped(numbers)
    for part in (*w.rows(0, 1).parts, *w.cols(2, 4).parts):
        assert isinstance(part, Extent)
        assert part.stamp == Stamp.of(numbers.stat())
