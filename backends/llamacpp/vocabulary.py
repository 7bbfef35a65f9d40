"""A GGUF file's vocabulary, read by llama.cpp after checks of our own."""

from __future__ import annotations

import ctypes
from ctypes import c_int32
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from hetrun.backends.llamacpp import llama
from hetrun.errors import ModelFileError
from hetrun.formats.gguf import GGUFFile

TOKEN_BYTES = 64  # first guess for the bytes of a piece


class HasFile(Protocol):
    """A model that is a GGUF file."""

    @property
    def file(self) -> GGUFFile: ...


def open_vocabulary(source: HasFile) -> LlamaVocabulary:
    """The vocabulary of a file."""
    check(source.file)
    return LlamaVocabulary(Path(source.file.path))


def check(file: GGUFFile) -> None:
    """What llama.cpp would end the process for, or read beyond: refused here with the key's name."""
    file.require_str("tokenizer.ggml.model")
    tokens = file.get_strings("tokenizer.ggml.tokens")
    if tokens is None or not len(tokens):
        _fail(file, "tokenizer.ggml.tokens is missing or empty: the file has no vocabulary")
    n = len(tokens)
    scores = file.get_array("tokenizer.ggml.scores", n)
    if scores is not None and not np.isfinite(scores.astype(np.float64)).all():
        _fail(file, "tokenizer.ggml.scores holds values that are not finite")
    file.get_array("tokenizer.ggml.token_type", n)
    for key in file.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            file.require_int(key, 0, n - 1)


def _fail(file: GGUFFile, reason: str) -> NoReturn:
    raise ModelFileError(file.path, f"{reason}; convert the model again")


class LlamaVocabulary:
    """llama.cpp's view of a vocabulary."""

    def __init__(self, path: Path) -> None:
        self._lib = llama.library()
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelFileError(
                str(path), "llama.cpp cannot read the tokenizer in it; convert the model again"
            )
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.n_tokens = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.bos = self._token(self._lib.llama_vocab_bos(self._vocab))
        self.eos = self._token(self._lib.llama_vocab_eos(self._vocab))
        self.add_bos = bool(self._lib.llama_vocab_get_add_bos(self._vocab))

    def _token(self, token: int) -> int | None:
        return token if 0 <= token < self.n_tokens else None

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8  # a token is at least a byte, but for the few that are added
        out = (c_int32 * room)()
        n = self._lib.llama_tokenize(self._vocab, raw, len(raw), out, room, add_special, parse_special)
        if n < 0:
            room = -n
            out = (c_int32 * room)()
            n = self._lib.llama_tokenize(self._vocab, raw, len(raw), out, room, add_special, parse_special)
        return list(out[:n])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(TOKEN_BYTES)
        n = self._lib.llama_token_to_piece(self._vocab, token, buffer, TOKEN_BYTES, 0, True)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, -n, 0, True)
        return buffer.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def close(self) -> None:
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None
