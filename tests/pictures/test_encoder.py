"""libmtmd as the encoder: the same rows as the library's own calls make, and nothing ends the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from hetrun.backend import registry
from hetrun.backend.picture_encoder import PictureEncoder, PictureSetup, PromptRows, Words
from hetrun.errors import Cancelled, ModelFileError, PictureError
from hetrun.loader.vision import Vision, read_vision
from hetrun.pictures.picture import Picture
from hetrun.system import subprocesses
from tests.support import peer, towers
from tests.support.towers import Seeing

WIDE, TALL, SMALL = (60, 40), (24, 88), (5, 3)
WORDS = {
    "qwen3vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3vl-flat": ("<|vision_start|>", "<|vision_end|>"),
    "qwen35": ("<|vision_start|>", "<|vision_end|>"),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image>", "<image|>"),
    "gemma4-unified": ("<|image>", "<image|>"),
    "mistral3": ("", "[IMG_END]"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Seeing]:
    folder = tmp_path_factory.mktemp("seeing")
    return {family: towers.write_pair(family, folder / family) for family in WORDS}


def picture(size: tuple[int, int]) -> Picture:
    return Picture.of(*size, towers.gradient(*size))


def setup_of(vision: Vision, most_tokens: int = 0, threads: int = 1) -> PictureSetup:
    """Tokens are the bytes of a mark."""
    return PictureSetup(vision, threads, lambda text: list(text.encode()), most_tokens)


def opened(path: Path, most_tokens: int = 0) -> PictureEncoder:
    """Without a trial in another process: the towers here are our own."""
    from hetrun.backends.libllama.pictures import MtmdEncoder

    return MtmdEncoder(setup_of(read_vision(path), most_tokens))


@pytest.fixture(params=WORDS)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def encoder(pairs: Mapping[str, Seeing], family: str) -> Iterator[PictureEncoder]:
    found = opened(pairs[family].mmproj)
    yield found
    found.close()


def rows_of(encoder: PictureEncoder, seen: Picture) -> PromptRows:
    (rows,) = (piece for piece in encoder.lay_out(seen) if isinstance(piece, PromptRows))
    return rows


class Theirs:
    """The library through its own bindings, with the real text model, as llama-server calls it."""

    def __init__(self, pair: Seeing) -> None:
        llama_cpp, mtmd_cpp = peer.llama_cpp(), peer.mtmd_cpp()
        self.mtmd, self.llama = mtmd_cpp, llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(
            str(pair.text).encode(), llama_cpp.llama_model_default_params()
        )
        p = mtmd_cpp.mtmd_context_params_default()
        p.use_gpu, p.n_threads = False, 1
        self.context = mtmd_cpp.mtmd_init_from_file(str(pair.mmproj).encode(), self.model, p)
        assert self.context

    def chunks(self, seen: Picture) -> list[int]:
        """The pieces of a prompt that is one picture."""
        m = self.mtmd
        pixels = (ctypes.c_uint8 * len(seen.rgb)).from_buffer_copy(seen.rgb)
        bitmap = m.mtmd_bitmap_init(seen.width, seen.height, pixels)
        self.kept = m.mtmd_input_chunks_init()
        text = m.mtmd_input_text(b"<__media__>", 11, False, True)
        assert (
            m.mtmd_tokenize(self.context, self.kept, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1)
            == 0
        )
        m.mtmd_bitmap_free(bitmap)
        return [m.mtmd_input_chunks_get(self.kept, i) for i in range(m.mtmd_input_chunks_size(self.kept))]

    def rows(self, chunk: int, width: int) -> np.ndarray:
        n = self.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        assert self.mtmd.mtmd_encode_chunk(self.context, chunk) == 0
        return np.ctypeslib.as_array(self.mtmd.mtmd_get_output_embd(self.context), (n, width)).copy()

    def close(self) -> None:
        self.mtmd.mtmd_free(self.context)
        self.llama.llama_model_free(self.model)


def test_rows_and_words_are_the_librarys_own(
    pairs: Mapping[str, Seeing], family: str, encoder: PictureEncoder
) -> None:
    """Bit for bit, though the real text model is not loaded here."""
    theirs = Theirs(pairs[family])
    for size in (WIDE, TALL, SMALL):
        seen = picture(size)
        chunks = theirs.chunks(seen)
        pieces = encoder.lay_out(seen)
        assert len(pieces) == len(chunks)
        for piece, chunk in zip(pieces, chunks, strict=True):
            n = theirs.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            if isinstance(piece, Words):
                assert n == 1  # which the real vocabulary has a token for
                assert bytes(piece.tokens).decode() in WORDS[family]
                continue
            assert (piece.count, piece.advance) == (n, theirs.mtmd.mtmd_input_chunk_get_n_pos(chunk))
            made, expected = encoder.encode(piece), theirs.rows(chunk, encoder.width)
            assert np.isfinite(made).all()
            known = np.isfinite(expected)  # see test_rows_that_end_lines
            np.testing.assert_array_equal(made[known], expected[known])
            assert known.all() or family == "mistral3"
        theirs.mtmd.mtmd_input_chunks_free(theirs.kept)
    theirs.close()


def test_places(family: str, encoder: PictureEncoder) -> None:
    rows = rows_of(encoder, picture(WIDE))
    if not encoder.spatial:
        assert (rows.places == np.arange(rows.count)[:, None]).all()
        assert rows.advance == rows.count
        return
    high, wide = (a.reshape(-1) for a in np.mgrid[:5, :8])
    np.testing.assert_array_equal(rows.places, np.stack([np.zeros(40, int), high, wide], 1))
    assert rows.advance == 8


def test_rows_that_end_lines(pairs: Mapping[str, Seeing]) -> None:
    """The library makes them of memory that nothing has written: numbers only if that held numbers."""
    from hetrun.backends.libllama.pictures import mend_line_ends

    encoder = opened(pairs["mistral3"].mmproj)
    rows = rows_of(encoder, picture(WIDE))
    made = encoder.encode(rows)
    encoder.close()
    columns, lines = 8, 5
    assert rows.count == columns * lines + lines - 1
    ends = np.arange(columns, rows.count, columns + 1)
    assert (made[ends] == made[columns]).all()
    for broken in (np.nan, np.inf):
        damaged = made.copy()
        damaged[ends[1:3]] = broken
        damaged[ends[0], 5:9] = broken
        mend_line_ends(damaged, made[columns])
        np.testing.assert_array_equal(damaged, made)
    other = made.copy()
    other[3] = np.nan  # which is no end of a line: it is left, and found where results are looked at
    mend_line_ends(other, made[columns])
    assert np.isnan(other[3]).all()


def test_equal_pictures_give_equal_rows_whatever_came_between(encoder: PictureEncoder) -> None:
    first, other = rows_of(encoder, picture(WIDE)), rows_of(encoder, picture(TALL))
    before = encoder.encode(first)
    between = encoder.encode(other)
    np.testing.assert_array_equal(encoder.encode(rows_of(encoder, picture(WIDE))), before)
    assert between.shape == (other.count, encoder.width)
    assert np.isfinite(before).all()


def test_a_limit_on_rows_scales_pictures_down(pairs: Mapping[str, Seeing]) -> None:
    for family, least in (("qwen3vl", 8), ("mistral3", 8), ("gemma4", 70)):
        whole, few = opened(pairs[family].mmproj), opened(pairs[family].mmproj, most_tokens=100)
        large = picture((400, 300))
        assert rows_of(whole, large).count > 500
        rows = rows_of(few, large)
        assert least <= rows.count <= 100 + 12
        assert few.encode(rows).shape == (rows.count, few.width)
        assert few.bytes_for(400, 300) < whole.bytes_for(400, 300)
        whole.close()
        few.close()


@pytest.mark.parametrize("size", [(1, 300), (20_000, 90), (0, 5), (5, 0)])
def test_strips_and_nothing_are_refused_before_anything_is_taken(
    encoder: PictureEncoder, size: tuple[int, int], family: str
) -> None:
    seen = Picture(*size, bytes(3 * size[0] * size[1]), b"")
    if family == "gemma3" and all(size):  # all pictures get one size
        assert rows_of(encoder, seen).count == 16
        return
    with pytest.raises(PictureError, match=r"times as long as the other|has nothing to see"):
        encoder.lay_out(seen)


def test_the_longest_strips_that_are_taken(encoder: PictureEncoder) -> None:
    for size in ((2, 400), (600, 3), (1, 1)):
        rows = rows_of(encoder, picture(size))
        assert encoder.encode(rows).shape == (rows.count, encoder.width)


def test_a_cancel_from_another_thread_ends_it(pairs: Mapping[str, Seeing]) -> None:
    """While it runs: without one it takes the time of several thousand rows."""
    encoder = opened(pairs["qwen3vl-flat"].mmproj)
    rows = rows_of(encoder, picture((500, 500)))
    heard, begun = list[float](), threading.Event()

    def cancel() -> None:
        begun.wait()
        heard.append(perf_counter())
        encoder.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    begun.set()
    with pytest.raises(Cancelled):
        encoder.encode(rows)
    took = perf_counter() - heard[0]
    thread.join()
    encoder.rearm()
    few = rows_of(encoder, picture(WIDE))
    whole = opened(pairs["qwen3vl-flat"].mmproj)
    np.testing.assert_array_equal(encoder.encode(few), whole.encode(rows_of(whole, picture(WIDE))))
    assert took < 30
    for each in (encoder, whole):
        each.close()


def test_a_cancel_before_it_begins_is_heard_too(encoder: PictureEncoder) -> None:
    rows = rows_of(encoder, picture(WIDE))
    encoder.cancel()
    with pytest.raises(Cancelled):
        encoder.encode(rows)
    encoder.rearm()
    assert encoder.encode(rows).any()


# --- strangers' files


def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weight: towers.Weight | None) -> Path:
    """A tower of which one tensor is another, or missing."""

    def tensors() -> towers.Tensors:
        for n, w in towers.qwen_tower(0):
            if n != name:
                yield n, w
            elif weight is not None:
                yield n, weight

    kind, _, more = towers.TOWERS["qwen35"]
    monkeypatch.setitem(towers.TOWERS, "qwen35", (kind, tensors, more))
    return towers.write_tower("qwen35", tmp_path / "mmproj.gguf")


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("v.blk.1.attn_qkv.weight", towers.Weight((100, towers.SEEN_WIDTH), 1.0, half=True)),
        ("v.blk.1.ffn_up.weight", None),
        ("mm.2.weight", towers.Weight((towers.WIDTH, 100), 1.0, half=True)),
        ("v.position_embd.weight", towers.Weight((7, 3), 1.0)),
        ("mm.0.weight", None),
    ],
    ids=str,
)
def test_what_ends_llama_cpp_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weight: towers.Weight | None
) -> None:
    path = broken(tmp_path, monkeypatch, name, weight)
    with pytest.raises(ModelFileError, match="get or convert it again") as caught:
        registry.picture_encoder().open(setup_of(read_vision(path)))
    assert str(caught.value).startswith(f"{path}: ")
    if weight is None:
        assert f"unable to find tensor {name}" in str(caught.value)


def test_a_header_that_lies_about_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as wide as a bias says; the matrix before it makes others."""
    path = broken(tmp_path, monkeypatch, "mm.2.bias", towers.Weight((128,), 1.0))
    vision = read_vision(path)
    assert vision.width == 128
    with pytest.raises(ModelFileError, match="get or convert it again"):
        registry.picture_encoder().open(setup_of(vision))


def test_a_file_that_was_tried_is_not_tried_again(
    pairs: Mapping[str, Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[str](), subprocesses.ask

    def counting(code: str, path: str, seconds: float, who: str) -> str:
        asked.append(path)
        return ask(code, path, seconds, who)

    monkeypatch.setattr(subprocesses, "ask", counting)
    vision = read_vision(pairs["gemma3"].mmproj)
    for _ in range(2):
        found = registry.picture_encoder().open(setup_of(vision))
        assert found.encode(rows_of(found, picture(WIDE))).any()
        found.close()
    assert asked == [vision.path]


def test_a_file_that_was_changed_since_its_header_was_read(tmp_path: Path) -> None:
    path = towers.write_tower("gemma3", tmp_path / "t.gguf")
    vision = read_vision(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelFileError, match="changed while in use"):
        registry.picture_encoder().open(setup_of(vision))


# --- memory

CHILD = """
import sys
from pathlib import Path
from hetrun.backend.picture_encoder import PictureSetup, PromptRows
from hetrun.backends.libllama.pictures import MtmdEncoder
from hetrun.loader.vision import read_vision
from hetrun.pictures.picture import Picture

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))

path, most, *sizes = sys.argv[1], *map(int, sys.argv[2:])
encoder = MtmdEncoder(PictureSetup(read_vision(path), 1, lambda text: [0], most))
seen = [Picture(w, h, bytes(3 * w * h), b"") for w, h in zip(sizes[::2], sizes[1::2])]
loaded, before = encoder.nbytes, memory("VmRSS")
rows = [piece for each in seen for piece in encoder.lay_out(each) if isinstance(piece, PromptRows)]
print(memory("VmHWM") - before)
for each, piece in zip(seen, rows, strict=True):
    predicted = encoder.nbytes - loaded + encoder.bytes_for(each.width, each.height)
    encoder.encode(piece)
    kept = encoder.nbytes - loaded
    print(predicted, kept, memory("VmHWM") - before, memory("VmRSS") - before)
"""
MIB = 1 << 20


def measured(path: Path, most: int, *sizes: tuple[int, int]) -> tuple[int, list[list[int]]]:
    """What laying out took, and of each picture: predicted, said to be kept, peak, and what was kept."""
    numbers = [str(number) for number in (most, *(n for size in sizes for n in size))]
    command = subprocesses.python(CHILD, str(path), *numbers)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, *lines = said.splitlines()
    return int(first), [list(map(int, line.split())) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("family", "size", "most"),
    [
        ("qwen3vl", (4000, 4000), 300),
        ("mistral3", (4000, 4000), 0),
        ("gemma3", (4000, 4000), 0),
        ("gemma4", (4096, 2048), 200),
        ("gemma4-unified", (4000, 4000), 0),
        ("qwen35", (60, 40), 0),
        ("mistral3", (300, 200), 0),
    ],
)
def test_memory_is_as_was_said(
    pairs: Mapping[str, Seeing], family: str, size: tuple[int, int], most: int
) -> None:
    laid_out, ((predicted, kept, peak, after),) = measured(pairs[family].mmproj, most, size)
    assert laid_out < 4 * MIB
    assert peak <= predicted <= 2.5 * peak + 16 * MIB
    assert after <= kept + 2 * MIB


def test_memory_of_pictures_of_all_sizes_one_after_the_other(pairs: Mapping[str, Seeing]) -> None:
    """What an allocator keeps of one must not lie beside what the next one takes."""
    sizes = ((800, 600), (2500, 1500), (1000, 1000), (3500, 3500), (500, 500), (2900, 2900), (1200, 1100))
    _, found = measured(pairs["mistral3"].mmproj, 300, *sizes)
    most = 0
    for predicted, kept, peak, after in found:
        most = max(most, predicted)
        assert peak <= most
        assert after <= kept + 2 * MIB


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3vl", "mistral3", "gemma4"])
def test_memory_of_wide_towers_is_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where work memory is the larger part, as in real ones."""
    for name, value in (("SEEN_WIDTH", 512), ("SEEN_FFN", 2048), ("SEEN_HEADS", 8), ("PATCH", 16)):
        monkeypatch.setattr(towers, name, value)
    path = towers.write_tower(family, tmp_path / "t.gguf")
    sizes = ((800, 600), (2000, 2000), (500, 500), (3000, 2500))
    _, found = measured(path, 400, *sizes)
    most = 0
    for predicted, kept, peak, after in found:
        most = max(most, predicted)
        assert peak <= most <= 2.5 * peak + 16 * MIB
        assert after <= kept + 2 * MIB


def test_nothing_is_loaded_that_no_picture_needs() -> None:
    """The registry knows what encodes, and the library comes with the first tower."""
    code = (
        "import sys; from hetrun.backend import registry; registry.picture_encoder(); "
        "print([name for name in sys.modules if 'mtmd' in name or name == 'llama_cpp'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
