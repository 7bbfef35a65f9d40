"""Pieces of weights from real files, pass for pass: every byte, every count, and every way to fail."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backend.weight_streaming import Cut, Piece
from hetrun.errors import BackendError, ModelFileError
from hetrun.graph import Constant, Extent, Weight
from hetrun.graph.quant import by_name
from hetrun.prefetch.ring_buffer import PAGE, READING, library
from hetrun.prefetch.streamer import Streamer, can_stream
from hetrun.system.file_identity import Stamp
from tests.support.supplies import Disk, Taker

pytestmark = pytest.mark.skipif(library() is None, reason="there was no C compiler at installation")

Q4_0 = by_name("Q4_0")
WINDOW = 64 << 10


@dataclass(frozen=True)
class Model:
    """Files and the pieces of what is in them."""

    cut: Cut
    contents: dict[str, bytes]

    def stored(self, piece: Piece) -> list[bytes]:
        """The rows of each run."""
        rows: list[bytes] = []
        for part in piece.weight.parts:
            for i in range(part.rows):
                if isinstance(part, Constant):
                    rows.append(part.data[i * part.row_bytes : (i + 1) * part.row_bytes])
                else:
                    assert isinstance(part, Extent)
                    at = part.offset + i * part.stride
                    rows.append(self.contents[part.path][at : at + part.row_bytes])
        return [b"".join(rows[a:b]) for a, b in piece.runs]


def one_file(folder: Path, *, rows: int = 96, step: int = 16, cols: int = 1024, name: str = "model") -> Model:
    """A weight and behind it a table; only passes that want rows take the last third of the weight."""
    path, row = str(folder / f"{name}.gguf"), Q4_0.row_bytes(cols)
    contents = random.Random(name).randbytes(777 + 2 * rows * row)
    Path(path).write_bytes(contents)
    stamp = Stamp.of(os.stat(path))
    weight = Weight("blk.0.q", (rows, cols), Q4_0, (Extent(path, 777, rows, row, row, stamp),))
    table = Weight("tokens", (rows, cols), Q4_0, (Extent(path, 777 + rows * row, rows, row, row, stamp),))
    pieces = tuple(Piece("blk.0.q", weight, ((a, a + step),), 1) for a in range(0, rows, step))
    return Model(Cut(pieces, len(pieces) * 2 // 3, (table,)), {path: contents})


@contextmanager
def streaming(model: Model, **how: object) -> Iterator[tuple[Streamer, Taker]]:
    """A streamer of all of a model's pieces."""
    made = Streamer(model.cut, **{"window_bytes": WINDOW, "threads": 2} | how)  # type: ignore[arg-type]
    try:
        made.follow(model.cut.pieces)
        yield made, Taker(made.address)
    finally:
        made.close()


def take_pass(model: Model, streamer: Streamer, taker: Taker, streamed: Sequence[Piece], most: int) -> int:
    """Take the first pieces of a pass and check them; how many there were."""
    for rank, piece in enumerate(streamed[:most]):
        address = taker.wait(rank)
        assert address is not None, streamer.error()
        for start, stored in zip(streamer.places[piece].starts, model.stored(piece), strict=True):
            assert taker.bytes_of(rank, start, len(stored)) == stored
        taker.release(rank)
    return min(len(streamed), most)


def whole_pass(model: Model, streamer: Streamer, taker: Taker, wanted: bool = True) -> None:
    streamer.begin(wanted)
    take_pass(model, streamer, taker, model.cut.pieces[: None if wanted else model.cut.always], 1 << 30)
    streamer.end()


# --- every byte


Way = tuple[int, int, int]  # halves, rows of a piece, rows of a half
Drawn = tuple[list[bytes], list[tuple[str, Weight]], list[Way]]


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    """Contents of files, weights in parts of them, and how each is cut."""
    sizes = [0, 0]
    weights: list[tuple[str, Weight]] = []
    cuts: list[Way] = []
    for n in range(draw(st.integers(1, 4))):
        cols = 32 * draw(st.sampled_from([1, 7, 64, 130]))
        row = Q4_0.row_bytes(cols)
        halves = draw(st.sampled_from([1, 1, 2]))
        parts: list[Extent | Constant] = []
        for _ in range(draw(st.integers(1, 3)) * halves):
            file = draw(st.integers(0, 1))
            offset = sizes[file] + draw(st.sampled_from([0, 0, 1, 32, 4095, 5000]))
            rows = 2 * draw(st.integers(1, 40))
            parts.append(Extent(str(file), offset, rows, row, row))
            sizes[file] = offset + rows * row
        rows = sum(part.rows for part in parts)
        weights.append((f"w{n}", Weight(f"w{n}", (rows, cols), Q4_0, tuple(parts))))
        cuts.append((halves, draw(st.integers(1, rows // halves)), rows // halves))
    seed = draw(st.integers(0, 99))
    return [random.Random(seed + i).randbytes(size) for i, size in enumerate(sizes)], weights, cuts


def build(folder: str, drawn: Drawn) -> Model:
    """The files, and the pieces that can be streamed."""
    contents, weights, cuts = drawn
    paths = [str(Path(folder, str(i))) for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(content)
    pieces: list[Piece] = []
    for (scope, weight), (halves, step, rows) in zip(weights, cuts, strict=True):
        parts = tuple(
            replace(p, path=paths[int(p.path)], stamp=Stamp.of(os.stat(paths[int(p.path)])))
            for p in weight.parts
            if isinstance(p, Extent)
        )
        placed = replace(weight, parts=parts)
        for a in range(0, rows, step):
            runs = tuple((a + i * rows, min(a + step, rows) + i * rows) for i in range(halves))
            pieces.append(Piece(scope, placed, runs, 1))
    good = tuple(piece for piece in pieces if can_stream(piece))
    return Model(Cut(good, len(good) * 3 // 4, ()), dict(zip(paths, contents, strict=True)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.booleans()),
        st.tuples(st.just("broken"), st.integers(0, 20)),
        st.tuples(st.just("follow"), st.integers(0, 2**32 - 1)),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=40)
@given(
    models(), STEPS, st.integers(1, 3), st.sampled_from([1, 1 << 16, 1 << 20]), st.booleans(), st.booleans()
)
def test_every_byte_of_every_pass_is_right(
    drawn: Drawn,
    steps: list[tuple[str, int]],
    threads: int,
    window: int,
    direct: bool,
    synchronous: bool,
) -> None:
    """Whatever pieces come from disk, however many slots there are, and wherever passes end."""
    with TemporaryDirectory() as folder:
        model = build(folder, drawn)
        how = {"window_bytes": window, "threads": threads, "direct": direct, "synchronous": synchronous}
        with streaming(model, **how) as (streamer, taker):
            assert streamer.shape.slots == 1 or streamer.nbytes <= window + (1 << 20)
            streamed, always = model.cut.pieces, model.cut.always
            for what, number in steps:
                if what == "follow":
                    chosen = [i for i in range(len(model.cut.pieces)) if number >> i % 32 & 1]
                    streamed = tuple(model.cut.pieces[i] for i in chosen)
                    always = sum(i < model.cut.always for i in chosen)
                    streamer.follow(streamed)
                    continue
                wanted = what == "pass" and bool(number)
                taken = streamed if wanted else streamed[:always]
                streamer.begin(wanted)
                take_pass(model, streamer, taker, taken, len(taken) if what == "pass" else number)
                if what == "broken":
                    streamer.restart()
                    continue
                streamer.end()
                needed = sum(piece.nbytes for piece in taken)
                reads = sum(len(piece.weight.parts) for piece in taken)
                assert needed <= streamer.stats.pass_bytes <= needed + 2 * PAGE * reads


@settings(max_examples=20)
@given(models())
def test_pieces_that_stay_are_read_run_behind_run(
    drawn: Drawn,
) -> None:
    with TemporaryDirectory() as folder:
        model = build(folder, drawn)
        with streaming(model) as (streamer, _):
            for piece in model.cut.pieces:
                out = np.zeros(piece.nbytes, np.uint8)
                streamer.read(piece, out)
                assert out.tobytes() == b"".join(model.stored(piece))
            for piece, raw in streamer.each(model.cut.pieces):
                assert raw.tobytes() == b"".join(model.stored(piece))


def test_pieces_that_stay_come_one_behind_the_other(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    pieces = model.cut.pieces[1:]
    with streaming(model) as (streamer, taker):
        found = [(piece, raw.tobytes()) for piece, raw in streamer.each(pieces)]
        assert found == [(piece, b"".join(model.stored(piece))) for piece in pieces]
        some = streamer.each(pieces)
        next(some)
        some.close()  # the others are not wanted
        assert [piece for piece, _ in streamer.each(())] == []
        streamer.follow(model.cut.pieces)
        whole_pass(model, streamer, taker)
        write_to(*model.contents)
        with pytest.raises(ModelFileError, match="was written to"):
            list(streamer.each(pieces))
    model = one_file(tmp_path)
    nothing = READING(lambda fd, to, nbytes, offset: 0)
    with streaming(model, read=nothing) as (streamer, _), pytest.raises(ModelFileError, match="file ends"):
        list(streamer.each(model.cut.pieces))


def test_what_cannot_be_streamed_can_be_read(tmp_path: Path) -> None:
    """Rows with gaps between them, and rows that lie in no file."""
    base = one_file(tmp_path)
    path, row = next(iter(base.contents)), Q4_0.row_bytes(64)
    made = Constant(random.Random(5).randbytes(8 * row), 8)
    apart = Weight("apart", (20, 64), Q4_0, (Extent(path, 100, 12, row, 1000), made))
    pieces = tuple(Piece("x", apart, runs, 1) for runs in [((0, 1),), ((3, 9),), ((10, 15), (16, 20))])
    model = Model(Cut((*base.cut.pieces, *pieces), 4, ()), base.contents)
    assert [can_stream(piece) for piece in pieces] == [True, False, False]
    streamer = Streamer(model.cut, WINDOW, 1)
    for piece, raw in streamer.each(pieces):
        assert raw.tobytes() == b"".join(model.stored(piece))
    with pytest.raises(ValueError, match="cannot come from disk"):
        streamer.follow(pieces)
    assert pieces[1] not in streamer.places
    streamer.close()


def test_a_piece_in_too_many_places_cannot_be_streamed(tmp_path: Path) -> None:
    path, row = next(iter(one_file(tmp_path).contents)), Q4_0.row_bytes(32)
    parts = tuple(Extent(path, i * 100, 2, row, row) for i in range(6))
    weight = Weight("many", (12, 32), Q4_0, parts)
    found = [can_stream(Piece("x", weight, runs, 1)) for runs in [((0, 8),), ((0, 9),), ((0, 4), (6, 10))]]
    assert found == [True, False, True]


def test_pieces_are_in_the_order_of_the_cut(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    with streaming(model) as (streamer, _), pytest.raises(ValueError, match="in the order"):
        streamer.follow(model.cut.pieces[::-1])


def test_rows_of_a_table(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    (path,), (part,) = model.contents, model.cut.lookups[0].parts
    assert isinstance(part, Extent)
    with streaming(model) as (streamer, taker):
        streamer.begin(False)
        for row in (5, 95, 0):
            at = part.offset + row * part.stride
            found = taker.read(streamer.files[path], at, part.row_bytes)
            assert found == model.contents[path][at : at + part.row_bytes]


# --- what is counted


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not tell what it read")
@pytest.mark.parametrize("synchronous", [False, True])
def test_bytes_are_counted_as_the_kernel_does(tmp_path: Path, synchronous: bool) -> None:
    def kernel() -> int:
        found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)
        assert found
        return int(found[1])

    model = one_file(tmp_path, rows=960, step=160)
    for path in model.contents:
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)
    with streaming(model, synchronous=synchronous) as (streamer, taker):
        if not streamer.direct:
            pytest.skip("the file system has no direct reads")
        streamer.follow([])
        before, ours = kernel(), streamer.stats.bytes_read
        streamer.follow(model.cut.pieces)
        for _ in range(3):
            whole_pass(model, streamer, taker)
        streamer.restart()
        streamer.follow([])  # and no thread reads any more
        found, ours = kernel() - before, streamer.stats.bytes_read - ours
        if not found:
            pytest.skip("the file system does not count")
        assert abs(found - ours) <= PAGE * streamer.stats.reads
        needed = sum(piece.nbytes for piece in model.cut.pieces)
        assert needed <= streamer.stats.pass_bytes <= needed + 2 * PAGE * len(model.cut.pieces)
        assert streamer.stats.pass_waited <= streamer.stats.waited
        assert streamer.stats.waited <= streamer.stats.thread_waited + 1e-6


# --- files that change


def cut_short(path: str) -> None:
    os.truncate(path, 5000)


def write_to(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"x")
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def replace_by_another(path: str) -> None:
    content = Path(path).read_bytes()
    Path(path + ".new").write_bytes(content)
    os.replace(path + ".new", path)


def delete(path: str) -> None:
    os.unlink(path)


CHANGES = {
    cut_short: "is 5000 bytes long and was",
    write_to: "was written to",
    replace_by_another: "is another file now",
    delete: "No such file or directory",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_between_passes_is_refused(tmp_path: Path, change: object) -> None:
    model = one_file(tmp_path)
    (path,) = model.contents
    with streaming(model) as (streamer, taker):
        whole_pass(model, streamer, taker)
        change(path)  # type: ignore[operator]
        for _ in range(2):
            with pytest.raises(ModelFileError, match=CHANGES[change]) as caught:  # type: ignore[index]
                streamer.begin(True)
            assert "while in use" in str(caught.value)
            streamer.restart()


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_in_a_pass_is_refused_at_its_end(tmp_path: Path, change: object) -> None:
    model = one_file(tmp_path)
    (path,) = model.contents
    with streaming(model) as (streamer, taker):
        streamer.begin(True)
        change(path)  # type: ignore[operator]
        for rank in range(len(model.cut.pieces)):
            if taker.wait(rank) is not None:
                taker.release(rank)
        with pytest.raises(ModelFileError, match=CHANGES[change]):  # type: ignore[index]
            streamer.end()


def test_a_file_must_be_the_one_whose_header_was_read(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    (path,) = model.contents
    replace_by_another(path)
    with pytest.raises(ModelFileError, match="is another file now"):
        Streamer(model.cut, WINDOW, 1)
    os.unlink(path)
    with pytest.raises(ModelFileError, match="No such file"):
        Streamer(model.cut, WINDOW, 1)


# --- what is said


FAILED = r"reading blk\.0\.q at byte (\d+) failed: Input/output error"
ENDED = (
    r"the file ends inside the tensor blk\.0\.q, at byte (\d+): it was truncated while in use; get it again"
)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(("answer", "words"), [(-errno.EIO, FAILED), (0, ENDED)])
def test_a_failure_names_file_tensor_and_byte(
    tmp_path: Path, answer: int, words: str, synchronous: bool
) -> None:
    model = one_file(tmp_path)
    (path,) = model.contents
    disk = Disk(b"", before=lambda _: answer)
    read = READING(lambda fd, to, nbytes, offset: disk.function(0, to, nbytes, offset))
    with streaming(model, synchronous=synchronous, read=read) as (streamer, taker):
        streamer.begin(True)
        assert taker.wait(0) is None
        error = streamer.error()
        assert isinstance(error, ModelFileError)
        assert error.path == path
        assert int(re.fullmatch(words, error.reason)[1]) >= 777  # type: ignore[index]
        with pytest.raises(ModelFileError, match=words):
            streamer.end()
        streamer.restart()
        with pytest.raises(ModelFileError, match=words):
            streamer.read(model.cut.pieces[0], np.zeros(model.cut.pieces[0].nbytes, np.uint8))


def test_a_pass_that_does_not_take_all_is_our_fault(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    with streaming(model) as (streamer, taker):
        streamer.begin(True)
        taker.take(0, 0, 1)
        with pytest.raises(BackendError, match="without 5 of its pieces"):
            streamer.end()
        with pytest.raises(BackendError, match="5 pieces"):
            streamer.begin(True)
        streamer.restart()
        streamer.begin(True)
        assert taker.wait(77) is None
        assert isinstance(streamer.error(), BackendError)
        streamer.restart()
        whole_pass(model, streamer, taker)
        assert streamer.error() is None


def test_a_cut_without_pieces_has_lookups(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    (path,) = model.contents
    with streaming(Model(Cut((), 0, model.cut.lookups), model.contents)) as (streamer, taker):
        whole_pass(Model(Cut((), 0, ()), {}), streamer, taker)
        assert taker.read(streamer.files[path], 780, 5) == model.contents[path][780:785]
