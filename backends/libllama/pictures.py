"""Pictures become rows of embeddings in libmtmd, llama.cpp's library for what sees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np

from hetrun.backend.picture_encoder import Floats, Ints, PictureSetup, Piece, PromptRows, Vision, Words
from hetrun.backends.libllama import mtmd_api
from hetrun.backends.libllama.mtmd_api import IMAGE, DecoderPosition, InputPart
from hetrun.backends.libllama.picture_memory import EncodingMemory, encoding_bytes
from hetrun.backends.llamacpp.vocabulary import text_stand_in
from hetrun.errors import BackendError, Cancelled, ModelFileError, PictureError
from hetrun.pictures.picture import Picture
from hetrun.system.allocator import give_back
from hetrun.system.file_identity import unchanged

MOST_UNEQUAL = 200  # times as long as the other side: beyond, pictures would take more rows than they may
NODES_BETWEEN = 8  # of a graph that are computed before a cancel is looked for
BEYOND = 2  # times the most rows: sides are rounded, and some towers put an end to each line


@dataclass(frozen=True, slots=True)
class PicturePart:
    """Which part of which picture a piece of the prompt stands for."""

    picture: Picture
    index: int


class MtmdEncoder:
    """A vision tower inside libmtmd."""

    def __init__(self, setup: PictureSetup) -> None:
        """Load it; its file was tried before, in a process of its own."""
        vision = setup.vision
        self.width, self.deepstack, self.spatial = vision.width, vision.deepstack, vision.spatial
        self._setup, self._lib = setup, mtmd_api.library()
        self._stop = False
        self._nodes = count(1)
        self._kept = 0  # work memory, which grows with the largest picture and is not given back
        # Called on this thread between parts of the graph; kept, for the library has only its address.
        self._heard = mtmd_api.Heard(self._is_heard)
        with ExitStack() as undo:
            text = undo.enter_context(text_stand_in(self.width, self.spatial))
            with unchanged({vision.path: vision.stamp}):
                self._context = self._open(text)
                self._line_end = _read_row(vision) if vision.line_end else None
            undo.callback(self._lib.mtmd_free, self._context)
            self._check()
            self._undo = undo.pop_all()

    def _open(self, text: int) -> int:
        p = self._lib.mtmd_context_params_default()
        p.use_gpu = p.print_timings = p.warmup = False
        p.n_threads = self._setup.threads
        p.flash_attn_type = mtmd_api.FLASH
        least, most = row_limits(self._setup)
        if most < self._setup.vision.tower.most_rows:
            p.image_min_tokens, p.image_max_tokens = least, most
        p.cb_eval = ctypes.cast(self._heard, ctypes.c_void_p)
        path = self._setup.vision.path
        context = self._lib.mtmd_init_from_file(os.fsencode(path), text, p)
        if not context:
            raise ModelFileError(path, "llama.cpp cannot load it as a vision tower; get or convert it again")
        return int(context)

    def _check(self) -> None:
        vision = self._setup.vision
        spatial = self._lib.mtmd_decode_use_mrope(self._context)
        whole = self._lib.mtmd_decode_use_non_causal(self._context, None)
        if not self._lib.mtmd_support_vision(self._context) or (spatial, whole) != (
            vision.spatial,
            vision.whole,
        ):
            raise ModelFileError(
                vision.path, "llama.cpp reads its header in another way: this hetrun does not fit to it"
            )

    @property
    def nbytes(self) -> int:
        return self._setup.vision.nbytes + self._kept

    def _is_heard(self, node: int | None, asked: bool, _: int | None) -> bool:
        if asked:  # whether the graph is to pause after this node
            return next(self._nodes) % NODES_BETWEEN == 0
        return not self._stop

    def lay_out(self, picture: Picture) -> tuple[Piece, ...]:
        check_size(self._setup.vision, picture.width, picture.height)
        with self._cut(picture, empty=True) as pieces:
            return tuple(self._piece(p, PicturePart(picture, i)) for i, p in enumerate(pieces))

    def _piece(self, piece: int, part: PicturePart) -> Piece:
        if self._lib.mtmd_input_chunk_get_type(piece) != IMAGE:
            return Words(self._words(piece))
        rows = int(self._lib.mtmd_input_chunk_get_n_tokens(piece))
        _, most = row_limits(self._setup)
        if not 0 < rows <= most * BEYOND:
            w, h = part.picture.width, part.picture.height
            raise PictureError(
                f"a picture of {w} x {h} pixels would take {rows} tokens, and {most} are allowed"
            )
        advance = int(self._lib.mtmd_input_chunk_get_n_pos(piece))
        return PromptRows(rows, self._places(piece, rows), advance, self._setup.vision.whole, part)

    def _words(self, piece: int) -> tuple[int, ...]:
        """The text model's tokens of a mark; the stand-in's are its bytes."""
        n = ctypes.c_size_t()
        tokens = self._lib.mtmd_input_chunk_get_tokens_text(piece, ctypes.byref(n))
        found = tokens[: n.value]
        if any(not 0 <= token < 256 for token in found):
            raise ModelFileError(
                self._setup.vision.path, "it wants marks around pictures that hetrun does not know"
            )
        return tuple(self._setup.tokenize(bytes(found).decode()))

    def _places(self, piece: int, rows: int) -> Ints:
        found = (DecoderPosition * rows)()
        tokens = self._lib.mtmd_input_chunk_get_tokens_image(piece)
        self._lib.mtmd_helper_image_get_decoder_pos(tokens, 0, found)
        numbers: Ints = np.frombuffer(bytes(found), np.uint32).reshape(rows, 4).astype(np.int64)
        return numbers[:, [0, 2, 1]]  # time, height, width

    def encode(self, rows: PromptRows) -> Floats:
        part = rows.key
        assert isinstance(part, PicturePart)
        picture = part.picture
        with self._cut(picture, empty=False) as pieces:
            piece = pieces[part.index]
            if self._lib.mtmd_input_chunk_get_n_tokens(piece) != rows.count:
                raise BackendError("llama.cpp cut a picture into other pieces than before")
            self._kept = max(self._kept, needed(self._setup, picture.width, picture.height).kept)
            give_back()  # what scaling took: an allocator keeps it, and the graph would come on top
            failed = self._lib.mtmd_encode_chunk(self._context, piece)
        if self._stop:
            raise Cancelled("the encoding of a picture was stopped")
        if failed:
            raise BackendError(f"llama.cpp could not encode a picture of {picture.width} x {picture.height}")
        found = self._lib.mtmd_get_output_embd(self._context)
        made = np.ctypeslib.as_array(found, (rows.count, self.width)).copy()
        if self._line_end is not None:
            mend_line_ends(made, self._line_end)
        return made

    @contextmanager
    def _cut(self, picture: Picture, empty: bool) -> Iterator[list[int]]:
        """The pieces that a picture becomes; `empty`: only their sizes, which takes no time and no memory."""
        bitmap = self._lib.mtmd_bitmap_init(picture.width, picture.height, None if empty else picture.rgb)
        pieces = self._lib.mtmd_input_chunks_init()
        try:
            part = InputPart(None, bitmap)
            parts = (ctypes.POINTER(InputPart) * 1)(ctypes.pointer(part))
            failed = self._lib.mtmd_tokenize_from_parts(self._context, pieces, parts, 1, False)
            self._lib.mtmd_bitmap_free(bitmap)
            bitmap = None
            if failed:
                raise PictureError(f"the model takes no picture of {picture.width} x {picture.height} pixels")
            n = self._lib.mtmd_input_chunks_size(pieces)
            yield [self._lib.mtmd_input_chunks_get(pieces, i) for i in range(n)]
        finally:
            if bitmap:
                self._lib.mtmd_bitmap_free(bitmap)
            self._lib.mtmd_input_chunks_free(pieces)
            if not empty:
                give_back()

    def bytes_for(self, width: int, height: int) -> int:
        return needed(self._setup, width, height).more_than(self._kept)

    def cancel(self) -> None:
        self._stop = True

    def rearm(self) -> None:
        self._stop = False

    def close(self) -> None:
        self._undo.close()


def _read_row(vision: Vision) -> Floats:
    with open(vision.path, "rb") as file:
        return np.fromfile(file, np.float32, vision.width, offset=vision.line_end)


def mend_line_ends(made: Floats, end: Floats) -> None:
    """Put the row that ends lines where the library put it.

    It adds that row to memory that nothing has written, times 0: wherever this held infinity or no number,
    what comes of it is no number. All else is the row to the bit, which tells where lines end.
    """
    ends = np.flatnonzero(((made == end) | ~np.isfinite(made)).all(axis=1))
    if len(ends) and np.array_equal(ends, np.arange(ends[0], len(made), ends[0] + 1)):
        made[ends] = end


def row_limits(setup: PictureSetup) -> tuple[int, int]:
    """The fewest and the most rows of a picture."""
    tower = setup.vision.tower
    if tower.side or not setup.most_tokens:
        return tower.least_rows, tower.most_rows
    most = min(setup.most_tokens, tower.most_rows)
    return min(tower.least_rows, most), most


def check_size(vision: Vision, width: int, height: int) -> None:
    """Refuse what would become a strip of any length."""
    if width < 1 or height < 1:
        raise PictureError(f"a picture of {width} x {height} pixels has nothing to see")
    if not vision.tower.side and max(width, height) > MOST_UNEQUAL * min(width, height):
        raise PictureError(
            f"a picture of {width} x {height} pixels has one side more than {MOST_UNEQUAL} times as "
            "long as the other; cut it into parts"
        )


def bytes_for(setup: PictureSetup, width: int, height: int) -> int:
    """Memory that encoding a picture takes at most, beside the tower's weights."""
    return needed(setup, width, height).more_than(0)


def needed(setup: PictureSetup, width: int, height: int) -> EncodingMemory:
    """What encoding a picture takes, phase by phase."""
    check_size(setup.vision, width, height)
    return encoding_bytes(setup.vision, width, height, row_limits(setup))
