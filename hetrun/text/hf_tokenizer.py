"""The vocabulary in a folder's tokenizer.json or GPT-2's files, read by the library `tokenizers`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.formats.fim_tokens import by_text
from hetrun.loader.formats.hf_folder import Folder
from hetrun.loader.formats.json_file import read_bytes, read_object
from hetrun.loader.formats.tokenizer_json import check_file, check_post_processor, check_pre_tokenizer, growth

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES = 64 << 20  # the largest in use have 35 MiB
MAX_TEXT = 16 << 20  # bytes of a text: more than the longest contexts there are
MAX_GROWN = 64 << 20  # and of what its normalizer may make of it
MAX_BEYOND = 1 << 16  # added tokens that the model has no rows for
MAX_WORD, MAX_PIECE = 1000, 1000  # characters, where the time is the product of both

# With these a model has finished, whatever its settings say. The list is llama.cpp's.
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
)
# Where both of a pair end answers, <|end|> ends no more than a message, whatever else says that it does
# (gpt-oss, Solar).
MESSAGE_END = "<|end|>"
ANSWER_ENDS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HasFolder(Protocol):
    """A model that is a folder."""

    @property
    def folder(self) -> Folder: ...

    def require_int(self, key: str, lo: int, hi: int) -> int: ...


def open_vocabulary(source: HasFolder) -> HfVocabulary:
    """The vocabulary of a folder."""
    return HfVocabulary(source.folder, source.require_int("vocab_size", 1, 1 << 24))


class HfVocabulary:
    """A tokenizer, and what the files beside it say of its special tokens."""

    cuts_at_spaces = False  # it is unknown what its expressions do

    def __init__(self, folder: Folder, n_rows: int) -> None:
        """`n_rows` is how many tokens the model itself has: often more, for padding, sometimes fewer."""
        whole = folder.has("tokenizer.json")
        self.path = str(folder.path / ("tokenizer.json" if whole else "vocab.json"))
        self._n_rows = n_rows
        self._tokenizer = read_tokenizer(self.path) if whole else gpt2_tokenizer(folder)
        self._most = min(MAX_TEXT, MAX_GROWN // check_steps(self.path, self._tokenizer))
        self._spelling = spelling_of(self.path, self._tokenizer)
        self._added = {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        beyond = max(self._tokenizer.get_vocab_size(), n_rows) + MAX_BEYOND
        if far := [i for i in self._added if i >= beyond]:
            _fail(self.path, f"added_tokens has {self._added[far[0]][:40]!r} as token {far[0]}")
        self._special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._unknown = getattr(self._tokenizer.model, "unk_token", None)
        self.n_tokens = max(n_rows, self._tokenizer.get_vocab_size(), *(i + 1 for i in self._added))
        self.bos = self._token(folder, "bos_token")
        self.eos = self._token(folder, "eos_token")
        self.add_bos = self.bos is not None and self.tokenize("", True, True)[:1] == [self.bos]
        numbers = {text: i for i, text in self._added.items() if i < n_rows}
        self.fim = by_text(numbers.get)
        self._ends = self._find_ends(folder)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not parse_special
        n = len(text.encode())
        if n > self._most:
            raise OptionError(
                f"the text has {n} bytes; hetrun reads up to {self._most} at once with this tokenizer"
            )
        with library(self.path, "cannot tokenise this text"):
            ids = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        for token in ids:
            if token >= self._n_rows:
                written = self.piece(token).decode("utf-8", "replace")
                raise OptionError(
                    f"the text has the token {written!r}, number {token}; the model has only {self._n_rows}"
                )
        return ids

    def piece(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        return b"" if text is None else self._bytes_of(token, text)  # none: a row that pads the model's table

    def pieces(self) -> list[bytes]:
        out = [b""] * self.n_tokens
        for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token < self.n_tokens:
                out[token] = self._bytes_of(token, text)
        return out

    def _bytes_of(self, token: int, text: str) -> bytes:
        return (
            text.encode() if token in self._special else self._spelling.bytes_of(text, token in self._added)
        )

    def is_control(self, token: int) -> bool:
        text = self._tokenizer.id_to_token(token)
        return text is None or token in self._special or text == self._unknown

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def close(self) -> None:
        """The library gives its memory back with the last reference."""
        del self._tokenizer

    def _token(self, folder: Folder, name: str) -> int | None:
        """The id of bos_token or eos_token."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            if text := folder.settings(file).get_token(name):
                return self._tokenizer.token_to_id(text)
        for settings in (folder.settings("generation_config.json"), folder.config):
            for token in settings.get_ids(f"{name}_id"):
                if 0 <= token < self.n_tokens:
                    return token
        return None

    def _find_ends(self, folder: Folder) -> frozenset[int]:
        known = {i for i, text in self._added.items() if text in ENDS}
        own = folder.settings("generation_config.json").get_ids("eos_token_id")
        eos = () if self.eos is None else (self.eos,)
        found = frozenset({*known, *self.fim.ends, *own, *folder.config.get_ids("eos_token_id"), *eos})
        texts = set(self._added.values())
        if any(texts.issuperset(pair) for pair in ANSWER_ENDS):
            found -= {i for i, text in self._added.items() if text == MESSAGE_END}
        return found


def read_tokenizer(path: str) -> Tokenizer:
    """A tokenizer.json as the library reads it."""
    raw = read_bytes(path, MAX_BYTES)
    check_file(path, raw)
    # Its threads would compete with those that compute; one text at a time needs none.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    with library(path, "is not a tokenizer that can be read"):
        tokenizer = Tokenizer.from_buffer(raw)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_steps(path: str, tokenizer: Tokenizer) -> int:
    """Refuse what would not come to an end; the result is how many times longer a text may become."""
    check_pre_tokenizer(path, _state(tokenizer.pre_tokenizer))
    check_post_processor(path, _state(tokenizer.post_processor))
    model = tokenizer.model
    if getattr(model, "max_input_chars_per_word", 0) > MAX_WORD:
        _fail(path, f"model.max_input_chars_per_word is more than {MAX_WORD}")
    if type(model).__name__ == "Unigram":
        longest = max(tokenizer.get_vocab(with_added_tokens=False), key=len, default="")
        if len(longest) > MAX_PIECE:
            _fail(path, f"model.vocab has a piece of {len(longest)} characters, {longest[:40]!r}...")
    return growth(path, _state(tokenizer.normalizer))


def _state(part: Any) -> Any:  # noqa: ANN401 - as the library has it
    """What a part of a tokenizer is set to, it tells as JSON only."""
    return part and json.loads(part.__getstate__())


def _fail(path: str, reason: str) -> NoReturn:
    raise ModelFileError(path, f"{reason}; it is not one that a model was trained with")


def gpt2_tokenizer(folder: Folder) -> Tokenizer:
    """GPT-2's tokenizer out of its own files: tokens with their numbers, and merges, a pair in each line."""
    path, settings = folder.path / "vocab.json", folder.settings("tokenizer_config.json")
    lines = (folder.text("merges.txt") or "").split("\n")
    vocab: Any = read_object(path)  # the library checks what is in it
    merges: Any = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    with library(str(path), "and merges.txt are not a tokenizer that can be read"):
        tokenizer = Tokenizer(models.BPE(vocab, merges))
    prefix = settings.get_bool("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    special = {key: settings.get_token(f"{key}_token") for key in ("bos", "eos", "unk", "pad")}
    known = {key: text for key, text in special.items() if text is not None and text in vocab}
    tokenizer.add_special_tokens(list(known.values()))
    if settings.get_bool("add_bos_token", False) and (bos := known.get("bos")):
        tokenizer.post_processor = processors.TemplateProcessing(
            [bos, "$A"], special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


@contextmanager
def library(path: str, what: str) -> Iterator[None]:
    """Rust's panics are no `Exception`s; of either kind, the file is to blame."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise ModelFileError(path, f"{what}: {str(e)[:200]}; download it again") from e


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the bytes of a token are written in the vocabulary."""

    byte_level: bool  # each byte has a printable stand-in
    byte_fallback: bool  # a byte that no token has is <0x0A>
    replaced: tuple[tuple[str, str], ...]  # such as U+2581 for a space

    def bytes_of(self, text: str, added: bool) -> bytes:
        """The bytes that a token stands for."""
        if self.byte_level:
            try:
                return text.encode() if added else text.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()
        if self.byte_fallback and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        for old, new in self.replaced:
            text = text.replace(old, new)
        return text.encode()


def spelling_of(path: str, tokenizer: Tokenizer) -> Spelling:
    """What the tokenizer's decoder undoes."""
    state = _state(tokenizer.decoder)
    steps = list(_steps(state)) if state else []
    kinds = {step["type"] if "Regex" not in step.get("pattern", ()) else "Replace by Regex" for step in steps}
    if unknown := kinds - {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}:
        raise ModelFileError(
            path, f"its decoder {min(unknown)} is not one that hetrun knows; use a GGUF of the model"
        )
    replaced = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    replaced += [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    return Spelling("ByteLevel" in kinds, "ByteFallback" in kinds, tuple(replaced))


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] == "Sequence":
        for step in state["decoders"]:
            yield from _steps(step)
    else:
        yield state


def _stand_ins() -> dict[str, int]:
    """GPT-2's: what prints stands for itself, the other bytes for the letters from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


STAND_INS = _stand_ins()


class _Bytes(dict[int, int]):
    """From a stand-in's number to its byte's; other letters to one that no byte has."""

    def __missing__(self, letter: int) -> int:
        return 0xFFFF


_BYTES = _Bytes({ord(letter): byte for letter, byte in STAND_INS.items()})
