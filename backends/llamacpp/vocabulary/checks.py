"""What llama.cpp needs of a vocabulary, and what it would end the process for: said here, with key and token.

Where it ends the process: a text twice; a byte of SentencePiece's or a begin of text that is missing; a
character table that leads nowhere (exceptions leave its C interface); byte tokens in WordPiece; very long
tokens (tries and matches recurse); a cut into words that leaves spaces. Where it does not come back: RWKV's
without every byte, PLaMo's with long tokens. Numbers of layers, heads and so on are not in the copy it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from hetrun.backends.llamacpp.vocabulary.strings import Bytes, Ints, Strings
from hetrun.errors import ModelFileError
from hetrun.loader.formats import precompiled_charsmap
from hetrun.loader.formats.gguf import GGUFFile, Value
from hetrun.loader.formats.gguf_file import Numbers, shown

MAX_TOKENS = 1 << 21  # the largest in use have a million
MAX_TEXT = 64 << 20  # bytes of all tokens, and of all merges
MAX_SQUARES = 1 << 27  # of all tokens' lengths, as much time as they may take; those in use have a third
MAX_TRIE = 1 << 22  # bytes of all tokens where each becomes a node of more than a hundred bytes
MAX_CUBES = 1 << 31  # of all tokens' lengths: PLaMo's table holds every piece of every end of a token
MAX_SPECIAL = 1 << 16  # tokens that are looked for in every text, one after the other

NORMAL, UNKNOWN, USER_DEFINED, BYTE = 1, 2, 4, 6  # control tokens, 3, lie between unknown and the user's own

_P = "tokenizer.ggml."
_IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "prefix", "suffix", "middle"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)
# Some tokens are handled otherwise by the name of the model; llama.cpp then wants these to be there.
_PHI3 = ("</s>", "<unk>", "<s>", "<|endoftext|>")
_OWN_RULES = ("nomic-bert-moe", "jina-bert-v3")


@dataclass(frozen=True, slots=True)
class CheckedVocabulary:
    """A vocabulary that llama.cpp can be given."""

    path: str
    kind: str
    cutter: str  # how texts are cut into words, by llama.cpp's name
    tokens: Strings
    types: Numbers
    keys: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class _TokenizerKind:
    """What one kind of tokenizer asks for."""

    longest: int  # bytes of a token
    check: Callable[[GGUFFile, Strings], None]
    byte_tokens: bool = True
    copied: tuple[str, ...] = ()  # what it reads and no other does; that was looked at by `check`


def checked(file: GGUFFile) -> CheckedVocabulary:
    """Everything that llama.cpp reads of a file's tokenizer, found to be sound."""
    name = file.require_str(_P + "model")
    if (kind := _KINDS.get(name)) is None:
        known = ", ".join(_KINDS)
        fail(file, "model", f"is {shown(name)}; hetrun knows the tokenizers {known}: use another file")
    tokens = _tokens(file, kind.longest)
    types = _types(file, tokens, kind)
    kind.check(file, tokens)
    cutter = file.get_str(_P + "pre", "")
    if cutter == "whitespace" and name != cutter:
        fail(file, "pre", f"is 'whitespace', which does not go with a tokenizer {name!r}")
    keys: dict[str, Value] = {"general.architecture": _architecture(file), _P + "model": name}
    keys |= _model_name(file, tokens)
    if cutter:
        keys[_P + "pre"] = cutter
    keys[_P + "tokens"], keys[_P + "token_type"] = tokens.array, types
    for key in kind.copied:
        if _P + key in file.metadata:
            keys[_P + key] = file.metadata[_P + key]
    keys |= _scores(file, len(tokens))
    keys |= {key: file.get_bool(key, False) for flag in _FLAGS if (key := _P + flag) in file.metadata}
    return CheckedVocabulary(file.path, name, cutter, tokens, types, keys | _ids(file, len(tokens)))


def fail(file: GGUFFile, key: str, reason: str) -> NoReturn:
    """Refuse a file for one of its tokenizer's keys."""
    raise ModelFileError(file.path, f"metadata key '{_P}{key}' {reason}; convert the model again")


def _fail_at(file: GGUFFile, tokens: Strings, index: int, reason: str) -> NoReturn:
    fail(file, "tokens", f"has the token {index}, {shown(tokens.array[index])}, {reason}")


def _tokens(file: GGUFFile, longest: int) -> Strings:
    array = file.get_strings(_P + "tokens")
    if array is None or not len(array):
        fail(file, "tokens", "is missing or empty: the file has no vocabulary")
    if len(array) > MAX_TOKENS or len(array.blob) > MAX_TEXT:
        most = f"hetrun reads up to {MAX_TOKENS} tokens and {MAX_TEXT} bytes"
        fail(file, "tokens", f"has {len(array)} tokens of {len(array.blob)} bytes; {most}")
    tokens = Strings(array)
    at = int(tokens.lengths.argmax())
    if tokens.lengths[at] > longest:
        _fail_at(file, tokens, at, f"of {tokens.lengths[at]} bytes; such a tokenizer has up to {longest}")
    if np.square(tokens.lengths).sum() > MAX_SQUARES:
        fail(file, "tokens", "has too many long tokens: they would take minutes to look for in a text")
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(tokens) != (rows := prod(table.shape[:-1])):
        fail(file, "tokens", f"has {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    _check_unique(file, tokens)
    if tokens.hold_nul():
        _check_cut(file, tokens)
    return tokens


def _check_unique(file: GGUFFile, tokens: Strings) -> None:
    if (found := tokens.first_twice()) is not None:
        _fail_at(file, tokens, found[1], f"which is already the token {found[0]}")
    empty, _ = tokens.of_length(0)
    if len(empty):  # llama.cpp calls them so
        names = {f"[EMPTY_{i}]".encode(): i for i in empty.tolist()}
        long = np.flatnonzero((tokens.lengths > 8) & (tokens.data[tokens.starts] == ord("[")))
        for i in long.tolist():
            if (other := names.get(tokens.array.raw(i))) is not None:
                _fail_at(file, tokens, i, f"which is how llama.cpp calls the empty token {other}")


def _check_cut(file: GGUFFile, tokens: Strings) -> None:
    """llama.cpp reads each text up to its first NUL."""
    seen: dict[bytes, int] = {}
    for i in range(len(tokens)):
        text = tokens.array.raw(i).partition(b"\0")[0] or f"[EMPTY_{i}]".encode()
        if (before := seen.setdefault(text, i)) != i:
            _fail_at(file, tokens, i, f"which is the token {before} up to its NUL, where llama.cpp ends it")


def _types(file: GGUFFile, tokens: Strings, kind: _TokenizerKind) -> Numbers:
    types = file.get_array(_P + "token_type", len(tokens))
    if types is None:
        return np.full(len(tokens), NORMAL, "<i4")
    if types.dtype != np.dtype("<i4"):
        fail(file, "token_type", f"holds {types.dtype} numbers, not int32")
    wrong = np.flatnonzero((types < 0) | (types > BYTE))
    if len(wrong):
        fail(file, "token_type", f"says {types[wrong[0]]} of token {wrong[0]}; types go from 0 to {BYTE}")
    if len(special(types)) > MAX_SPECIAL:
        fail(file, "token_type", f"has more than {MAX_SPECIAL} special tokens, each looked for in every text")
    _check_byte_tokens(file, tokens, np.flatnonzero(types == BYTE), kind.byte_tokens)
    return types


def special(types: Numbers) -> Ints:
    """The tokens that are found in a text before it is cut into words."""
    return np.flatnonzero((types >= UNKNOWN) & (types <= USER_DEFINED))


def _check_byte_tokens(file: GGUFFile, tokens: Strings, which: Ints, allowed: bool) -> None:
    if not len(which):
        return
    if not allowed:
        _fail_at(file, tokens, int(which[0]), "of the type byte, which such a tokenizer does not have")
    right = np.zeros(len(tokens), bool)
    right[_written_bytes(tokens, b"0123456789ABCDEFabcdef")[0]] = True
    wrong = which[~right[which]]
    if len(wrong):
        _fail_at(file, tokens, int(wrong[0]), "of the type byte; it must be like '<0x0A>'")


def _written_bytes(tokens: Strings, digits: bytes) -> tuple[Ints, Bytes]:
    """The tokens that are like <0x0A>, and their two digits."""
    which, rows = tokens.of_length(6)
    frame = (rows[:, [0, 1, 2, 5]] == np.frombuffer(b"<0x>", np.uint8)).all(axis=1)
    known = frame & _among(digits)[rows[:, 3:5]].all(axis=1)
    return which[known], rows[known, 3:5]


def _among(letters: bytes) -> npt.NDArray[np.bool_]:
    """Of each byte, whether it is one of these."""
    out = np.zeros(256, bool)
    out[list(letters)] = True
    return out


def _scores(file: GGUFFile, n: int) -> dict[str, Value]:
    scores = file.get_array(_P + "scores", n)
    if scores is None:
        return {}
    if scores.dtype.str not in ("<f4", "<i4"):
        fail(file, "scores", f"holds {scores.dtype} numbers, not float32")
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        fail(file, "scores", f"holds {scores[wrong[0]]} for token {wrong[0]}, which is not finite")
    return {_P + "scores": scores}


def _ids(file: GGUFFile, n: int) -> dict[str, Value]:
    """The special tokens; also those that are never read must be tokens."""
    for key in file.metadata:
        if key.startswith(_P) and key.endswith("_token_id"):
            file.require_int(key, 0, n - 1)
    keys = (f"{_P}{name}_token_id" for name in _IDS)
    return {key: file.require_int(key, 0, n - 1) for key in keys if key in file.metadata}


def _architecture(file: GGUFFile) -> str:
    """Any that llama.cpp knows will do, but for two with a rule of their own."""
    name = file.get_str("general.architecture", "llama")
    return name if name in _OWN_RULES else "llama"


def _model_name(file: GGUFFile, tokens: Strings) -> dict[str, Value]:
    name = file.get_str("general.name", "").lower()
    if "phi-3" in name or "phi3" in name:
        return {"general.name": "phi-3"} if all(tokens.find(text) is not None for text in _PHI3) else {}
    return {"general.name": "modern-bert"} if "modern-bert" in name else {}


# --- one kind after the other


def _check_pieces(file: GGUFFile, tokens: Strings) -> None:
    """SentencePiece's: what no token has becomes bytes, and llama.cpp looks for them without asking."""
    _, digits = _written_bytes(tokens, b"0123456789ABCDEF")
    have = {int(bytes(pair), 16) for pair in digits.tolist()}
    have |= set(tokens.of_length(1)[1].ravel().tolist()) - {0}
    if missing := sorted(set(range(256)) - have):
        fail(file, "tokens", f"has no token <0x{missing[0]:02X}>, which a text may need")


def _check_merges(file: GGUFFile, tokens: Strings) -> None:
    array = file.get_strings(_P + "merges")
    if array is None:
        if file.get_str(_P + "pre", "") != "kimi-k2":
            fail(file, "merges", "is missing, but this kind of tokenizer needs it")
        return
    if len(array.blob) > MAX_TEXT:
        fail(file, "merges", f"has {len(array.blob)} bytes; hetrun reads up to {MAX_TEXT}")
    merges = Strings(array)
    spaces = np.flatnonzero(np.frombuffer(array.blob, np.uint8) == ord(" "))
    behind = np.searchsorted(spaces, merges.starts + 1)  # the first that has a letter before it
    first = np.append(spaces, len(array.blob))[behind]
    wrong = np.flatnonzero(first >= merges.starts + merges.lengths - 1)
    if len(wrong):
        index = int(wrong[0])
        fail(
            file, "merges", f"has {shown(array[index])} as merge {index}, which is not two parts and a space"
        )


def _check_unigram(file: GGUFFile, tokens: Strings) -> None:
    _check_trie(file, tokens)
    table = file.get_array(_P + "precompiled_charsmap")
    if table is None:
        return
    if table.dtype.str not in ("|u1", "|i1"):
        fail(file, "precompiled_charsmap", f"holds {table.dtype} numbers, not bytes")
    if (why := precompiled_charsmap.objection(table.tobytes())) is not None:
        fail(file, "precompiled_charsmap", f"is damaged: {why}")


def _check_trie(file: GGUFFile, tokens: Strings) -> None:
    if tokens.lengths.sum() > MAX_TRIE:
        fail(file, "tokens", f"has tokens of more than {MAX_TRIE} bytes, which would become gigabytes")


def _check_rwkv(file: GGUFFile, tokens: Strings) -> None:
    """llama.cpp starts over for ever where the beginning of a token is no token."""
    _check_trie(file, tokens)
    have = set(tokens.of_length(1)[1].ravel().tolist()) - {ord("\\")}
    escapes = {ord("t"): 9, ord("n"): 10, ord("r"): 13}
    have |= {
        escapes.get(b, b) for a, b in tokens.of_length(2)[1].tolist() if a == ord("\\") and b != ord("x")
    }
    _, rows = tokens.of_length(4)
    hexed = (rows[:, :2] == np.frombuffer(b"\\x", np.uint8)).all(axis=1)
    hexed &= _among(b"0123456789abcdef")[rows[:, 2:]].all(axis=1)
    have |= {int(bytes(pair), 16) for pair in rows[hexed, 2:].tolist()}
    if missing := sorted(set(range(256)) - have):
        fail(file, "tokens", f"has no token for the byte 0x{missing[0]:02X}, which a text may need")


def _check_plamo(file: GGUFFile, tokens: Strings) -> None:
    cubes = 0
    for i in range(len(tokens)):
        try:
            cubes += len(tokens.array.raw(i).decode()) ** 3
        except UnicodeDecodeError:
            _fail_at(file, tokens, i, "which is not UTF-8")
        if cubes > MAX_CUBES:
            _fail_at(file, tokens, i, "and too many long ones before it: its table would have no end")


def _check_nothing(file: GGUFFile, tokens: Strings) -> None:
    """Its tokens may be anything."""


_KINDS = {
    "llama": _TokenizerKind(4096, _check_pieces),
    "gpt2": _TokenizerKind(4096, _check_merges, copied=("merges",)),
    "gemma4": _TokenizerKind(4096, _check_merges, copied=("merges",)),
    "hybriddna": _TokenizerKind(4096, _check_merges, copied=("merges",)),
    "whitespace": _TokenizerKind(4096, _check_merges, copied=("merges",)),
    "t5": _TokenizerKind(256, _check_unigram, copied=("precompiled_charsmap",)),
    "bert": _TokenizerKind(128, _check_nothing, byte_tokens=False),
    "rwkv": _TokenizerKind(512, _check_rwkv),
    "plamo2": _TokenizerKind(256, _check_plamo),
}
