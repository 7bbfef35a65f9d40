"""What llama.cpp says of prompts with pictures: libllama and libmtmd, as llama-server calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetrun.loader.vision import read_vision
from hetrun.pictures.picture import Picture
from tests.support import peer

_QUIET: list[Any] = []  # hears what the libraries log, for as long as they are there


class Oracle:
    """A model and its tower. The library is imported with the first one."""

    def __init__(self, text: Path, mmproj: Path, context: int = 1024, batch: int = 512) -> None:
        llama_cpp, mtmd_cpp = peer.llama_cpp(), peer.mtmd_cpp()
        self._llama, self._mtmd, self._batch = llama_cpp, mtmd_cpp, batch
        if not _QUIET:
            _QUIET.append(llama_cpp.llama_log_callback(lambda *_: None))
        quiet = _QUIET[0]
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
        mtmd_cpp.mtmd_helper_log_set(quiet, ctypes.c_void_p())
        p = llama_cpp.llama_model_default_params()
        p.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(text).encode(), p)
        c = llama_cpp.llama_context_default_params()
        c.n_ctx, c.n_batch, c.n_ubatch, c.n_threads, c.n_threads_batch = context, batch, batch, 1, 1
        c.type_k = c.type_v = llama_cpp.GGML_TYPE_F32
        c.swa_full = True
        c.flash_attn_type = 0
        self._context = llama_cpp.llama_init_from_model(self._model, c)
        m = mtmd_cpp.mtmd_context_params_default()
        m.use_gpu, m.n_threads, m.print_timings, m.warmup = False, 1, False, False
        self._tower = mtmd_cpp.mtmd_init_from_file(str(mmproj).encode(), self._model, m)
        assert None not in (self._model, self._context, self._tower)
        vision = read_vision(mmproj)
        self._line_end: np.ndarray | None = None
        if vision.line_end:
            self._line_end = np.fromfile(mmproj, np.float32, vision.width, offset=vision.line_end)

    def greedy(
        self, text: str, pictures: Sequence[Picture], n: int
    ) -> tuple[list[int], list[float], np.ndarray]:
        """The next tokens, by how much each was better than the second best, and the log-probabilities of the
        first."""
        mtmd, llama = self._mtmd, self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = []
        for picture in pictures:
            pixels = (ctypes.c_uint8 * len(picture.rgb)).from_buffer_copy(picture.rgb)
            bitmaps.append(mtmd.mtmd_bitmap_init(picture.width, picture.height, pixels))
        raw = text.encode()
        said = mtmd.mtmd_input_text(raw, len(raw), True, True)
        array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        assert mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(said), array, len(bitmaps)) == 0
        place, found, margins = self._eval(chunks), list[int](), list[float]()
        first = self._logits().astype(np.float64)
        first -= np.log(np.exp(first - first.max()).sum()) + first.max()
        for _ in range(n):
            logits = self._logits()
            two = np.partition(logits, -2)[-2:]
            found.append(int(logits.argmax()))
            margins.append(float(two[1] - two[0]))
            self._step(found[-1], place)
            place += 1
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
        mtmd.mtmd_input_chunks_free(chunks)
        return found, margins, first

    def _eval(self, chunks: Any) -> int:  # noqa: ANN401
        """As mtmd_helper_eval_chunks does it; where the next token stands.

        Pixtral's graph makes the ends of lines of memory that nothing has written, times 0: what is no number
        there is put right."""
        mtmd, past = self._mtmd, ctypes.c_int32(0)
        n_chunks = mtmd.mtmd_input_chunks_size(chunks)
        for i in range(n_chunks):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            at: Any = ctypes.byref(past)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                args: Any = (
                    self._tower,
                    self._context,
                    chunk,
                    past.value,
                    0,
                    self._batch,
                    i == n_chunks - 1,
                    at,
                )
                assert mtmd.mtmd_helper_eval_chunk_single(*args) == 0
                continue
            assert mtmd.mtmd_encode_chunk(self._tower, chunk) == 0
            rows, n = mtmd.mtmd_get_output_embd(self._tower), mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            width = self._llama.llama_model_n_embd_inp(self._model)
            made = np.ctypeslib.as_array(rows, (n, width))
            wrong = ~np.isfinite(made).all(1)
            if wrong.any():
                assert self._line_end is not None
                made[wrong] = self._line_end
            args = (self._tower, self._context, chunk, rows, past.value, 0, self._batch, at)
            assert (
                mtmd.mtmd_helper_decode_image_chunk(*args, mtmd.mtmd_helper_post_decode_callback(), None) == 0
            )
        return past.value

    def _logits(self) -> np.ndarray:
        llama = self._llama
        n = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, -1), (n,)).copy()

    def _step(self, token: int, place: int) -> None:
        llama = self._llama
        batch = llama.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, token, place
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        assert llama.llama_decode(self._context, batch) == 0
        llama.llama_batch_free(batch)

    def close(self) -> None:
        """Give everything back."""
        self._mtmd.mtmd_free(self._tower)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)
