"""A GGUF file's vocabulary, read by llama.cpp from a copy that holds what we have checked."""

from __future__ import annotations

import ctypes
from ctypes import c_int32
from itertools import repeat
from typing import Protocol

from hetrun.backends.llamacpp import libllama_api
from hetrun.backends.llamacpp.vocabulary.checks import CheckedVocabulary, checked
from hetrun.backends.llamacpp.vocabulary.gguf_image import copied
from hetrun.backends.llamacpp.vocabulary.stand_in import text_stand_in as text_stand_in
from hetrun.backends.llamacpp.vocabulary.text_limits import TextLimits, cuts_at_spaces
from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.formats.fim_tokens import FimTokens
from hetrun.loader.formats.gguf import GGUFFile
from hetrun.loader.formats.gguf_file import shown

TOKEN_BYTES = 64  # first guess for the bytes of a piece

# Bits of what llama.cpp knows of a token; none at all is an undefined one.
_UNKNOWN, _UNUSED, _CONTROL = 1, 2, 8
_NO_TEXT = _UNKNOWN | _UNUSED | _CONTROL


class HasFile(Protocol):
    """A model that is a GGUF file."""

    @property
    def file(self) -> GGUFFile: ...


def open_vocabulary(source: HasFile) -> LlamaVocabulary:
    """The vocabulary of a file."""
    return LlamaVocabulary(checked(source.file))


class LlamaVocabulary:
    """llama.cpp's view of a vocabulary."""

    def __init__(self, found: CheckedVocabulary) -> None:
        self._lib = libllama_api.library()
        self._path = found.path
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        with copied(found.keys) as path:
            self._model = self._lib.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            named = f"{found.kind!r} as 'tokenizer.ggml.model'"
            if found.cutter:
                named += f" and {shown(found.cutter)} as 'tokenizer.ggml.pre'"
            why = f"llama.cpp cannot read its tokenizer, with {named}"
            raise ModelFileError(found.path, f"{why}: convert the model again, or update llama-cpp-python")
        try:
            self._ask(found)
        except BaseException:
            self.close()
            raise

    def _ask(self, found: CheckedVocabulary) -> None:
        """What llama.cpp knows of it as a whole."""
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.n_tokens = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.bos = self._token(self._lib.llama_vocab_bos(self._vocab))
        self.eos = self._token(self._lib.llama_vocab_eos(self._vocab))
        self.add_bos = bool(self._lib.llama_vocab_get_add_bos(self._vocab))
        kinds = ("pre", "suf", "mid", "pad", "rep", "sep")
        fim = [getattr(self._lib, f"llama_vocab_fim_{kind}")(self._vocab) for kind in kinds]
        self.fim = FimTokens(*map(self._token, fim))
        self._check_added(found.kind == "bert")
        self._limits = TextLimits(found)
        adds_eos = self._lib.llama_vocab_get_add_eos(self._vocab)
        self.cuts_at_spaces = not adds_eos and cuts_at_spaces(found)

    def _token(self, token: int) -> int | None:
        return token if 0 <= token < self.n_tokens else None

    def _check_added(self, always: bool) -> None:
        """llama.cpp ends the process where it is to add a token that there is not."""
        sep = self._token(self._lib.llama_vocab_sep(self._vocab)) if always else None
        add_eos = not always and self._lib.llama_vocab_get_add_eos(self._vocab)
        for name, added, token in (
            ("bos", self.add_bos or always, self.bos),
            ("eos", add_eos, self.eos),
            ("seperator", always, sep),
        ):
            if added and token is None:
                raise ModelFileError(
                    self._path,
                    f"metadata key 'tokenizer.ggml.{name}_token_id' is missing; that token belongs around "
                    "each text: convert the model again",
                )

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        ids = self._limits.guarded(text, raw, lambda: self._tokenize(raw, add_special, parse_special))
        if ids and not (0 <= min(ids) and max(ids) < self.n_tokens):
            raise OptionError(
                "the text has characters for which the model has no token, and it has no token for "
                "unknown characters either"
            )
        return ids

    def _tokenize(self, raw: bytes, add_special: bool, parse_special: bool) -> list[int]:
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

    def pieces(self) -> list[bytes]:
        n, size = self.n_tokens, TOKEN_BYTES
        room = ctypes.create_string_buffer(n * size)  # a place for each: one call for each, and nothing else
        begin = ctypes.addressof(room)
        places = range(begin, begin + n * size, size)
        ask = self._lib.llama_token_to_piece
        lengths = map(ask, repeat(self._vocab), range(n), places, repeat(size), repeat(0), repeat(True))
        found = list(lengths)
        raw = room.raw
        return [
            raw[i * size : i * size + length] if length >= 0 else self.piece(i)
            for i, length in enumerate(found)
        ]

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def is_control(self, token: int) -> bool:
        known = self._lib.llama_vocab_get_attr(self._vocab, token)
        return not known or bool(known & _NO_TEXT)

    def close(self) -> None:
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None
