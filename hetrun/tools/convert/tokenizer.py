"""A tokenizer.json as the keys of a GGUF file, and the question whether llama.cpp reads them alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.formats.hf_folder import Folder
from hetrun.loader.source import Vocabulary
from hetrun.system.units import counted
from hetrun.text.hf_tokenizer import MAX_BEYOND, library, read_tokenizer
from hetrun.tools.convert import pretokenizers
from hetrun.tools.convert.gguf_writer import MetaValue

if TYPE_CHECKING:
    from tokenizers import AddedToken

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # how SentencePiece writes a space
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endofturn|>", "<turn|>", "[EOT]")
MESSAGE_END = "<|eom_id|>"
# Of Gemma 4's special tokens those that llama.cpp writes into its answers.
SHOWN = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    '<|"|>',
)
GGUF_NAMES = {"unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """The keys below `tokenizer.`, and what the user should know."""

    keys: Mapping[str, MetaValue]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class TokenPieces:
    """Every token: how it is written, of which kind, and how early it is merged."""

    texts: list[str]
    types: list[int]
    notes: list[str] = field(default_factory=list)


class TokenizerFile:
    """tokenizer.json, as the `tokenizers` library reads it."""

    def __init__(self, folder: Folder) -> None:
        """Read it; what the library refuses is refused."""
        self.path = str(folder.path / "tokenizer.json")
        self.tokenizer = read_tokenizer(self.path)
        vocab = self.tokenizer.get_vocab()
        last = max(vocab, key=lambda text: vocab[text], default="")
        # The library counts up to it when it says it again.
        if last and vocab[last] >= len(vocab) + MAX_BEYOND:
            raise ModelFileError(
                self.path,
                f"has the token {last[:40]!r} as number {vocab[last]}, and only {len(vocab)} tokens; "
                "it is not one that a model was trained with",
            )
        # As the library says it again: of the right types, nothing twice, and no default left out.
        self.json: dict[str, Any] = json.loads(self.tokenizer.to_str())
        self.model: dict[str, Any] = self.json["model"]
        self.settings = [folder.settings(f) for f in ("tokenizer_config.json", "special_tokens_map.json")]
        self.ids = (folder.settings("generation_config.json"), folder.config)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The parts of a normalizer, pre_tokenizer, post_processor or decoder, one after the other."""
        return list(_flat(self.json.get(name)))

    @property
    def byte_level(self) -> bool:
        """Whether its pieces are GPT-2's stand-ins for bytes."""
        everywhere = ("normalizer", "pre_tokenizer", "decoder")
        return any(step.get("type") == "ByteLevel" for name in everywhere for step in self.steps(name))

    def merges(self) -> Iterable[tuple[str, str]]:
        """The pairs in the order in which they are merged; older files have them as one text each."""
        for merge in self.model.get("merges", []):
            a, b = merge.split(" ", 1) if isinstance(merge, str) else merge
            yield a, b


def _flat(step: object) -> Iterable[dict[str, Any]]:
    if isinstance(step, dict):
        inner = [v for v in step.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        if step.get("type") == "Sequence" and inner:
            for part in inner[0]:
                yield from _flat(part)
        else:
            yield step


def convert(folder: Folder, n_vocab: int, architecture: str) -> ConvertedTokenizer:
    """The tokenizer of a folder, for a model that knows `n_vocab` tokens."""
    if not folder.has("tokenizer.json"):
        note = "the folder has no tokenizer.json: the file will have no vocabulary, and takes token ids only"
        return ConvertedTokenizer({"tokenizer.ggml.model": "no_vocab"}, (note,))
    file = TokenizerFile(folder)
    kind = file.model.get("type", "BPE")
    if kind != "BPE":
        _refuse(file, f"is of the kind {kind}")
    pieces = read_pieces(file, n_vocab)
    if file.byte_level:
        keys = _byte_level(file, pieces)
    elif file.model.get("byte_fallback"):
        keys = _sentencepiece(file, pieces)
        if architecture == "gemma4":
            keys |= _merged(file, pieces)
    else:
        _refuse(file, "is a BPE over characters, without bytes for those it does not know")
    keys |= {
        "tokenizer.ggml.tokens": pieces.texts,
        "tokenizer.ggml.token_type": np.array(pieces.types, "<i4"),
    }
    keys |= special_tokens(file, pieces)
    return ConvertedTokenizer(keys, tuple(pieces.notes))


def _refuse(file: TokenizerFile, what: str) -> NoReturn:
    raise ModelFileError(
        file.path,
        f"the tokenizer {what}; hetrun converts byte-level BPE (llama 3, qwen, gpt-2) and BPE with byte "
        "fallback (llama 2, mistral, gemma). Without tokenizer.json it becomes a file without vocabulary",
    )


def read_pieces(file: TokenizerFile, n_vocab: int) -> TokenPieces:
    """A token for each row of the model: gaps are filled, what is beyond is left out."""
    vocab: dict[str, int] = file.tokenizer.get_vocab(with_added_tokens=True)
    added = file.tokenizer.get_added_tokens_decoder()
    pieces = TokenPieces([f"[PAD{i}]" for i in range(n_vocab)], [UNUSED] * n_vocab)
    beyond = sorted(text for text, i in vocab.items() if i >= n_vocab)
    if beyond:
        are = "is" if len(beyond) == 1 else "are"
        pieces.notes.append(
            f"{counted(len(beyond), 'token')} of the tokenizer {are} left out, {beyond[0]!r} first: "
            "the model has no rows for them"
        )
    for text, i in vocab.items():
        if i < n_vocab:
            special = added.get(i)
            pieces.types[i] = _type_of(file, text) if special is None else _type_of_added(special)
            # llama.cpp looks for these in the text itself, where a space is a space.
            pieces.texts[i] = text.replace(SPACE, " ") if pieces.types[i] == USER_DEFINED else text
    _be_unique(file, pieces)
    return pieces


def _type_of(file: TokenizerFile, text: str) -> int:
    if text == file.model.get("unk_token"):
        return UNKNOWN
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return BYTE if is_byte and file.model.get("byte_fallback") else NORMAL


def _type_of_added(token: AddedToken) -> int:
    """Some tokens that only templates use are not marked as special."""
    text: str = token.content
    marked = (text.startswith("<|") and text.endswith("|>")) or (
        text.startswith("<unused") and text.endswith(">")
    )
    return CONTROL if token.special or marked or text in ("<pad>", "<mask>", "[@BOS@]") else USER_DEFINED


def _be_unique(file: TokenizerFile, pieces: TokenPieces) -> None:
    """llama.cpp ends the process for a vocabulary with a text twice."""
    at: dict[str, int] = {}
    for i, text in enumerate(pieces.texts):
        if text in at:
            other = at[text]
            unused = next((j for j in (i, other) if pieces.types[j] == UNUSED), None)
            if unused is None:
                raise ModelFileError(file.path, f"the tokens {other} and {i} are both written {text!r}")
            pieces.texts[unused] = f"[UNUSED{unused}]"
        at[text] = i


def _byte_level(file: TokenizerFile, pieces: TokenPieces) -> dict[str, MetaValue]:
    ignore_merges = bool(file.model.get("ignore_merges"))
    found = pretokenizers.recognise(file.tokenizer.pre_tokenizer, ignore_merges)
    if not found.exact:
        pieces.notes.append(
            "llama.cpp has no name for the way this tokenizer cuts text into words. The file has the nearest "
            f"one, {found.name!r}: some texts become other tokens than the model was trained with"
        )
    merges = [f"{a.replace(' ', 'Ġ')} {b.replace(' ', 'Ġ')}" for a, b in file.merges()]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": found.name,
        "tokenizer.ggml.merges": merges,
    }


def _sentencepiece(file: TokenizerFile, pieces: TokenPieces) -> dict[str, MetaValue]:
    """llama.cpp merges what gives the piece with the highest score, so an early merge is a high score."""
    known = set(pieces.texts)
    if missing := [f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in known]:
        raise ModelFileError(file.path, f"the token {missing[0]} is missing, which bytes fall back to")
    ranks: dict[str, int] = {}
    for rank, (a, b) in enumerate(file.merges()):
        ranks.setdefault(a + b, rank)
    last = len(ranks) + 1
    scores = [
        -float(ranks.get(text, last)) if kind == NORMAL else 0.0
        for text, kind in zip(pieces.texts, pieces.types, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": np.array(scores, "<f4"),
        "tokenizer.ggml.add_space_prefix": _adds_space(file),
    }


def _merged(file: TokenizerFile, pieces: TokenPieces) -> dict[str, MetaValue]:
    """Gemma 4's: llama.cpp merges by rank, and shows the tokens that thoughts and calls are known by."""
    for i, text in enumerate(pieces.texts):
        if text in SHOWN:
            pieces.types[i] = USER_DEFINED
    merges = [f"{a} {b}" for a, b in file.merges()]
    return {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.merges": merges}


def _adds_space(file: TokenizerFile) -> bool:
    """Whether a text is read as if it began with a space."""
    for step in (*file.steps("normalizer"), *file.steps("pre_tokenizer")):
        if step["type"] == "Prepend":
            return bool(step.get("prepend") == SPACE)
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    return False


def special_tokens(file: TokenizerFile, pieces: TokenPieces) -> dict[str, MetaValue]:
    """The ids that begin and end texts and turns, and whether the tokenizer adds them by itself."""
    ids = {name: _named_id(file, name) for name in ("bos", "eos", "unk", "pad")}
    ids["unk"] = _id(file, file.model.get("unk_token")) if ids["unk"] is None else ids["unk"]
    ends = next((found for c in file.ids if (found := c.get_ids("eos_token_id"))), ())
    others = [i for i in ends if i != ids["eos"]]
    turn = next((i for text in TURN_ENDS if (i := _id(file, text)) is not None), None)
    ids["eot"] = turn if turn is not None else next(iter(others), None)
    ids["eom"] = _id(file, MESSAGE_END)
    before, behind = _added(file)
    if len(before) == 1 and ids["bos"] is None:
        ids["bos"] = before[0]
    adds = {"bos": before == [ids["bos"]], "eos": behind == [ids["eos"]]}
    if (before and not adds["bos"]) or (behind and not adds["eos"]):
        pieces.notes.append(
            "the tokenizer puts other tokens around a text than its bos and eos, which GGUF cannot say"
        )
    keys: dict[str, MetaValue] = {
        f"tokenizer.ggml.{GGUF_NAMES.get(name, name)}_token_id": i
        for name, i in ids.items()
        if i is not None and i < len(pieces.texts)
    }
    return keys | {f"tokenizer.ggml.add_{name}_token": added for name, added in adds.items()}


def _named_id(file: TokenizerFile, name: str) -> int | None:
    """A special token's id: as the tokenizer's settings write it, else the number among the model's."""
    for settings in file.settings:
        if (found := _id(file, settings.get_token(f"{name}_token"))) is not None:
            return found
    listed = (c.get_ids(f"{name}_token_id") for c in file.ids if name != "unk")
    return next((ids[0] for ids in listed if ids and ids[0] >= 0), None)


def _id(file: TokenizerFile, text: str | None) -> int | None:
    found: int | None = None if text is None else file.tokenizer.token_to_id(text)
    return found


def _added(file: TokenizerFile) -> tuple[list[int], list[int]]:
    """The tokens that it puts before and behind a text, unasked."""
    with library(file.path, "cannot tokenise a text"):
        plain = file.tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = file.tokenizer.encode("a").ids
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


def difference(ours: Vocabulary, theirs: Vocabulary) -> str | None:
    """A line of the sample that two vocabularies turn into different tokens, if there is one."""
    for text in pretokenizers.SAMPLE.splitlines(keepends=True):
        try:
            wanted = theirs.tokenize(text, add_special=False, parse_special=True)
        except OptionError:
            continue  # it has tokens that the model itself does not know
        if ours.tokenize(text, add_special=False, parse_special=True) != wanted:
            return text
    return None
