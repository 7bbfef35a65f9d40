"""tokenizer.json to GGUF's keys: llama.cpp must read the vocabulary as the library reads the folder's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.pre_tokenizers import PreTokenizer

from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.errors import ModelFileError
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.formats.hf_folder import Folder, read_folder
from hetrun.loader.gguf_source import GGUFModel
from hetrun.tools.convert import pretokenizers, tokenizer
from hetrun.tools.convert.gguf_writer import write_model
from hetrun.tools.convert.pretokenizers import ROWS, SAMPLE, PretokenizerRow, built, cuts, recognise
from hetrun.tools.convert.tokenizer import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED
from tests.models.hf import Row as Model, folder as model_folder

N_VOCAB = 1200
MODEL = Model("tokenizer", "llama", {"vocab_size": N_VOCAB, "hidden_size": 32, "num_hidden_layers": 1})
# Here llama.cpp tells upper from lower case in ASCII only, whatever program converts; `convert` then says so.
ASCII_ONLY = ("tekken", "gpt-4o")
SPECIAL = ["<s>", "</s>", "<|im_end|>"]

Write = Callable[..., Folder]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A model's folder with this tokenizer and these settings of it."""

    def write(tokenizer: Tokenizer | None, /, **settings: object) -> Folder:
        where = tmp_path / "model"
        where.mkdir()
        for name in ("config.json", "model.safetensors"):
            (where / name).symlink_to(model_folder(MODEL) / name)
        if tokenizer is not None:
            tokenizer.save(str(where / "tokenizer.json"))
        (where / "tokenizer_config.json").write_text(json.dumps(settings))
        return read_folder(where)

    return write


def byte_level(cutter: PreTokenizer, ignore_merges: bool = False) -> Tokenizer:
    """A tokenizer that learnt its merges from some texts."""
    out = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    out.pre_tokenizer, out.decoder = cutter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    out.train_from_iterator([SAMPLE] * 2, learn)
    return out


def sentencepiece(prefix: bool) -> Tokenizer:
    """As llama 2 (with a space in front) and gemma have it."""
    learnt = Tokenizer(models.BPE())
    words = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    learnt.train_from_iterator([SAMPLE.replace(" ", "▁")] * 2, words)
    state = json.loads(learnt.to_str())["model"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *state["vocab"]]
    vocab = {text: i for i, text in enumerate(texts)}
    merges = [(a, b) for a, b in state["merges"]]
    out = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    out.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    out.add_special_tokens(["<unk>", "<s>", "</s>"])
    return out


def add_bos(out: Tokenizer, text: str = "<s>") -> Tokenizer:
    out.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", special_tokens=[(text, out.token_to_id(text))]
    )
    return out


def as_gguf(keys: Mapping[str, Any], path: Path) -> GGUFModel:
    """A file of which llama.cpp reads the vocabulary only."""
    settings = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32}
    heads = {"attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    arch = {f"llama.{key}": value for key, value in (settings | heads).items()}
    write_model(path, {"general.architecture": "llama", **arch, **keys}, [], [], force=True)
    return GGUFModel(read_gguf(path), "llama")


# --- how text is cut into words


def test_every_row_of_the_table_cuts_the_sample_in_its_own_way() -> None:
    assert len({(cuts(built(row)), row.ignore_merges) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_is_recognised_and_read_alike(row: PretokenizerRow, write: Write, tmp_path: Path) -> None:
    theirs = byte_level(built(row), row.ignore_merges)
    converted = tokenizer.convert(write(theirs), N_VOCAB, "llama")
    assert converted.keys["tokenizer.ggml.pre"] == row.name
    assert not converted.notes
    ours = open_vocabulary(as_gguf(converted.keys, tmp_path / "x.gguf"))
    for text in (*SAMPLE.splitlines(keepends=True), "a<s>b </s>", "  lead", "trail  ", "\n\n\n"):
        if row.name in ASCII_ONLY and not text.isascii():
            continue
        assert ours.tokenize(text, False, True) == theirs.encode(text, add_special_tokens=False).ids, text


def test_other_spellings_of_the_same_rules_are_recognised() -> None:
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_step])
    assert recognise(digits, False) == pretokenizers.PretokenizerMatch("smollm", True)
    spelled = (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = pre_tokenizers.Split(Regex(spelled), "isolated")
    no_cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert recognise(pre_tokenizers.Sequence([cut, no_cut]), False).name == "qwen2"


def test_rules_that_llama_cpp_does_not_know_get_the_nearest_name_and_a_warning(write: Write) -> None:
    cut = pre_tokenizers.Split(Regex(r"\p{N}{1,2}|\p{L}+|\s+|[^\s\p{L}\p{N}]"), "isolated")
    no_cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted = tokenizer.convert(write(byte_level(pre_tokenizers.Sequence([cut, no_cut]))), N_VOCAB, "llama")
    assert converted.keys["tokenizer.ggml.pre"] in {row.name for row in ROWS}
    (note,) = converted.notes
    assert "llama.cpp has no name for the way this tokenizer cuts text" in note


# --- SentencePiece's kind


@pytest.mark.parametrize("prefix", [True, False])
def test_byte_fallback_becomes_llama_with_scores(prefix: bool, write: Write, tmp_path: Path) -> None:
    theirs = add_bos(sentencepiece(prefix))
    converted = tokenizer.convert(write(theirs, bos_token="<s>", eos_token="</s>"), N_VOCAB, "llama")
    keys = converted.keys
    assert not converted.notes
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert keys["tokenizer.ggml.unknown_token_id"] == 0
    assert keys["tokenizer.ggml.add_bos_token"] is True
    types = list(np.asarray(keys["tokenizer.ggml.token_type"]))
    assert types[:4] == [CONTROL, CONTROL, CONTROL, BYTE]
    is_read_alike(keys, theirs, tmp_path / "x.gguf")


def is_read_alike(keys: Mapping[str, Any], theirs: Tokenizer, path: Path) -> None:
    ours = open_vocabulary(as_gguf(keys, path))
    for text in (*SAMPLE.splitlines(keepends=True), "a", "Hello<s>world", "\t\x01日本"):
        assert ours.tokenize(text, False, True) == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.tokenize(text, True, True) == theirs.encode(text).ids, text


def test_gemma_4_is_merged_by_rank_and_shows_its_marks(write: Write, tmp_path: Path) -> None:
    theirs = add_bos(sentencepiece(False))
    theirs.add_special_tokens(["<|channel>", "<|turn>"])
    keys = tokenizer.convert(write(theirs, bos_token="<s>", eos_token="</s>"), N_VOCAB, "gemma4").keys
    assert keys["tokenizer.ggml.model"] == "gemma4"
    vocab, types = theirs.get_vocab(), list(np.asarray(keys["tokenizer.ggml.token_type"]))
    assert (types[vocab["<|channel>"]], types[vocab["<|turn>"]]) == (USER_DEFINED, CONTROL)
    is_read_alike(keys, theirs, tmp_path / "x.gguf")


def test_a_missing_byte_is_refused(write: Write) -> None:
    theirs = json.loads(sentencepiece(prefix=True).to_str())
    theirs["model"]["vocab"]["odd"] = theirs["model"]["vocab"].pop("<0x41>")
    folder = write(Tokenizer.from_str(json.dumps(theirs)))
    with pytest.raises(ModelFileError, match="the token <0x41> is missing, which bytes fall back to"):
        tokenizer.convert(folder, N_VOCAB, "llama")


def rewritten(folder: Folder, change: Callable[[dict[str, Any]], object]) -> Folder:
    """The folder with a tokenizer.json that the library did not write."""
    path = folder.path / "tokenizer.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return read_folder(folder.path)


def test_a_token_with_a_number_far_away_is_refused(write: Write) -> None:
    """The library counts up to it, which takes minutes."""
    folder = write(sentencepiece(prefix=True))
    folder = rewritten(folder, lambda found: found["model"]["vocab"].update({"<0x41>": 1 << 31}))
    with pytest.raises(ModelFileError, match="has the token '<0x41>' as number 2147483648, and only"):
        tokenizer.convert(folder, N_VOCAB, "llama")


def test_a_template_that_names_a_token_that_is_not_there_is_refused(write: Write) -> None:
    """The library panics."""
    folder = write(add_bos(sentencepiece(prefix=True)))
    folder = rewritten(folder, lambda found: found["post_processor"]["special_tokens"].clear())
    with pytest.raises(ModelFileError, match="cannot tokenise a text: "):
        tokenizer.convert(folder, N_VOCAB, "llama")


# --- tokens


def test_rows_without_a_token_are_filled_and_tokens_without_a_row_left_out(write: Write) -> None:
    theirs = byte_level(built(ROWS[0]))
    n = theirs.get_vocab_size()
    folder = write(theirs)
    filled = tokenizer.convert(folder, n + 2, "llama")
    assert list(np.asarray(filled.keys["tokenizer.ggml.token_type"])[-3:]) == [NORMAL, UNUSED, UNUSED]
    cut = tokenizer.convert(folder, n - 5, "llama")
    texts = cut.keys["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    assert len(texts) == n - 5
    assert "5 tokens of the tokenizer are left out" in cut.notes[0]


def test_no_two_rows_have_one_text(write: Write) -> None:
    theirs = byte_level(built(ROWS[0]))
    n = theirs.get_vocab_size()
    theirs.add_tokens([f"[PAD{n + 1}]"])
    texts = tokenizer.convert(write(theirs), n + 3, "llama").keys["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    assert len(set(texts)) == n + 3


def test_added_tokens(write: Write) -> None:
    theirs = byte_level(built(ROWS[0]))
    theirs.add_tokens([AddedToken("<|tool|>"), AddedToken("▁▁", normalized=False), "<unused7>"])
    keys = tokenizer.convert(write(theirs), N_VOCAB, "llama").keys
    n = theirs.get_vocab_size()
    assert list(np.asarray(keys["tokenizer.ggml.token_type"])[n - 3 : n]) == [CONTROL, USER_DEFINED, CONTROL]
    texts = keys["tokenizer.ggml.tokens"]
    assert isinstance(texts, list)
    assert texts[n - 2] == "  "


def test_an_end_of_a_message_ends_no_answer_where_others_do(write: Write, tmp_path: Path) -> None:
    """gpt-oss' marks are text for readers of answers, and two of them end these."""
    theirs = byte_level(built(ROWS[0]))
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]
    theirs.add_special_tokens(marks)
    keys = tokenizer.convert(write(theirs, eos_token="<|return|>"), N_VOCAB, "llama").keys
    ours = open_vocabulary(as_gguf(keys, tmp_path / "x.gguf"))
    tokens = ours.tokenize("".join(marks), False, True)
    assert [ours.piece(token).decode() for token in tokens] == marks
    assert [ours.piece(token).decode() for token in tokens if ours.is_end(token)] == marks[-2:]


def test_gemmas_turns_end_answers(write: Write, tmp_path: Path) -> None:
    theirs = sentencepiece(prefix=False)
    marks = [
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<turn|>",
        "<|tool_response>",
    ]
    theirs.add_special_tokens(marks)
    keys = tokenizer.convert(write(theirs, bos_token="<s>", eos_token="</s>"), N_VOCAB, "llama").keys
    ours = open_vocabulary(as_gguf(keys, tmp_path / "x.gguf"))
    tokens = ours.tokenize("".join(marks), False, True)
    assert [ours.piece(token).decode() for token in tokens] == marks
    assert [ours.piece(token).decode() for token in tokens if ours.is_end(token)] == marks[-2:]


def test_special_ids_as_settings_write_them(write: Write) -> None:
    theirs = byte_level(built(ROWS[0]))
    keys = tokenizer.convert(
        write(theirs, bos_token={"content": "<s>"}, eos_token="</s>"), N_VOCAB, "llama"
    ).keys
    assert keys["tokenizer.ggml.bos_token_id"] == theirs.token_to_id("<s>")
    assert keys["tokenizer.ggml.eos_token_id"] == theirs.token_to_id("</s>")
    assert keys["tokenizer.ggml.eot_token_id"] == theirs.token_to_id("<|im_end|>")
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.ggml.add_eos_token"] is False


def test_special_ids_as_the_model_says_them_where_the_tokenizer_does_not(write: Write) -> None:
    keys = tokenizer.convert(write(byte_level(built(ROWS[0]))), N_VOCAB, "llama").keys
    assert keys["tokenizer.ggml.bos_token_id"] == 0
    assert keys["tokenizer.ggml.eos_token_id"] == 1


def test_what_is_put_around_a_text_and_is_neither_bos_nor_eos_is_said(write: Write) -> None:
    theirs = add_bos(byte_level(built(ROWS[0])), "<|im_end|>")
    converted = tokenizer.convert(write(theirs, bos_token="<s>"), N_VOCAB, "llama")
    assert "puts other tokens around a text" in converted.notes[0]


# --- what is not converted


def test_no_tokenizer_gives_no_vocabulary_and_a_warning(write: Write) -> None:
    converted = tokenizer.convert(write(None), N_VOCAB, "llama")
    assert converted.keys == {"tokenizer.ggml.model": "no_vocab"}
    assert "the folder has no tokenizer.json" in converted.notes[0]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})), "the tokenizer is of the kind WordPiece"),
        (Tokenizer(models.BPE({"a": 0}, [])), "is a BPE over characters"),
    ],
    ids=["wordpiece", "characters"],
)
def test_other_kinds_are_refused(theirs: Tokenizer, said: str, write: Write) -> None:
    folder = write(theirs)
    with pytest.raises(ModelFileError, match=said):
        tokenizer.convert(folder, N_VOCAB, "llama")


def test_a_damaged_file_is_one_sentence(write: Write) -> None:
    folder = write(None)
    (folder.path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelFileError, match=r"is not a tokenizer that can be read: .*; download it again"):
        tokenizer.convert(folder, N_VOCAB, "llama")


def test_merges_as_texts_and_as_pairs_are_the_same(write: Write) -> None:
    folder = write(byte_level(built(ROWS[0])))
    pairs = tokenizer.convert(folder, N_VOCAB, "llama").keys["tokenizer.ggml.merges"]
    path = folder.path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"] = [" ".join(m) for m in state["model"]["merges"]]
    path.write_text(json.dumps(state))
    assert tokenizer.convert(folder, N_VOCAB, "llama").keys["tokenizer.ggml.merges"] == pairs
