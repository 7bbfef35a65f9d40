"""Vocabularies out of tokenizer.json, beside what transformers makes of the same files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.formats.hf_folder import read_folder
from hetrun.loader.hf_source import has_vocabulary
from hetrun.text.detokenizer import StreamDecoder
from hetrun.text.hf_tokenizer import STAND_INS, HfVocabulary
from hetrun.text.tokenizer import Tokenizer as HetrunTokenizer

SPECIAL = ["<s>", "</s>", "<|im_end|>"]
TEXTS = [
    "The engine runs.",
    "  two  spaces, then\n\na\ttab ",
    "Grüße, 你好 👋🏽 \u200d",
    "<|im_end|>mid<s>dle</s>",
    "<tool> x </tool>",
    "\x00\x7f\ufffd",
    "",
]
CORPUS = ["The engine runs what the planner decides, and the planner measures what the engine runs."] * 3


def byte_level() -> Tokenizer:
    """As llama 3, qwen and smollm have it."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    t.add_tokens([AddedToken("<tool>", special=False), AddedToken("né", special=False)])
    return t


def sentencepiece() -> Tokenizer:
    """As llama 2, phi 3 and gemma have it: U+2581 for a space, tokens for single bytes."""
    vocab = {w: i for i, w in enumerate(["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ("▁", "t", "h", "e", "n", "g", "i", "r", "u", "s", "▁t", "▁th", "▁the", "en", "ru", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("e", "n"), ("r", "u"), ("▁", "▁")]
    t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    t.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    t.add_special_tokens(SPECIAL)
    t.add_tokens([AddedToken("▁▁", normalized=False, special=False)])
    return t


def metaspace() -> Tokenizer:
    """The same with a pre-tokenizer in place of the normalizer, as transformers 5 writes it."""
    t = sentencepiece()
    t.normalizer = None
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return t


def gemma4() -> Tokenizer:
    """As Gemma 3 and 4 have it: no space is put in front, and spaces end pieces before they are merged."""
    t = sentencepiece()
    t.normalizer = normalizers.Replace(" ", "▁")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|tool_response>"])
    return t


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "gemma4": gemma4}


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **beside: object) -> Path:
    """A model's folder with this tokenizer; `beside` are its other JSON files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    save_file({"w": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def opened(folder: Path, n_rows: int = 1000) -> HfVocabulary:
    return HfVocabulary(read_folder(folder), n_rows)


def text_of(vocabulary: HfVocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.piece(t) for t in tokens).decode("utf-8", "replace")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    beside = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}
    return write(tmp_path, KINDS[request.param](), tokenizer_config=beside)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(folder: Path, text: str) -> None:
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = opened(folder)
    for special in (True, False):
        assert ours.tokenize(text, special, True) == theirs(text, add_special_tokens=special)["input_ids"]
        plain = theirs(text, add_special_tokens=special, split_special_tokens=True)["input_ids"]
        assert ours.tokenize(text, special, False) == plain
    assert (ours.bos, ours.eos) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_two_files_of_gpt2(tmp_path: Path, add_bos: bool) -> None:
    """As OPT's first folders have them, a table in place of a text where a token is special."""
    bos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True}
    said = {
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": "<s>",
        "unk_token": bos,
        "add_bos_token": add_bos,
    }
    folder = write(tmp_path, byte_level(), tokenizer_config={**said, "tokenizer_class": "GPT2Tokenizer"})
    (folder / "tokenizer.json").unlink()
    assert not has_vocabulary(read_folder(folder))
    byte_level().model.save(str(folder))
    assert (folder / "merges.txt").read_text().startswith("#version")
    assert has_vocabulary(read_folder(folder))
    ours, theirs = opened(folder), GPT2Tokenizer.from_pretrained(folder)
    assert (ours.bos, ours.eos, ours.add_bos) == (1, 1, add_bos)
    assert ours.is_end(1)
    for text in ("The engine runs.", "  two  spaces\n", "Grüße, 你好 👋🏽", "mid<s>dle</s>", ""):
        assert ours.tokenize(text, False, True) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenize(text, True, True) == theirs(text)["input_ids"]
        assert ours.tokenize(text, True, True) == [1] * add_bos + ours.tokenize(text, False, True)
        assert text_of(ours, ours.tokenize(text, False, True)) == text
    (folder / "merges.txt").write_text("#version: 0.2\nT h e\n")
    with pytest.raises(ModelFileError, match=r"vocab\.json.*merges\.txt"):
        opened(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert not has_vocabulary(read_folder(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(folder: Path, text: str) -> None:
    """But for the space that the older kind puts in front, and behind each special token."""
    vocabulary = opened(folder)
    for parse_special in (True, False):
        found = text_of(vocabulary, vocabulary.tokenize(text, False, parse_special))
        if vocabulary.add_bos:
            found, text = found.replace(" ", ""), text.replace(" ", "")
        assert found == text


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfVocabulary:
    return opened(write(tmp_path_factory.mktemp("folder"), KINDS[request.param]()))


@given(text=st.text())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_streams_as_it_is(vocabulary: HfVocabulary, text: str) -> None:
    if "▁" in text:
        return  # is written as a space by all who have that stand-in
    tokens, decoder = vocabulary.tokenize(text, False, False), StreamDecoder(())
    streamed = "".join(decoder.push(vocabulary.piece(t)) for t in tokens) + decoder.flush()
    assert streamed.removeprefix(" ") == text.removeprefix(" ")


def test_pieces_that_are_half_a_character(tmp_path: Path) -> None:
    vocabulary = opened(write(tmp_path, byte_level()))
    tokens = vocabulary.tokenize("é", False, True)
    assert [vocabulary.piece(t) for t in tokens] == [b"\xc3", b"\xa9"]
    assert vocabulary.piece(vocabulary.tokenize("né", False, True)[0]) == "né".encode()  # added: as written
    assert len(STAND_INS) == 256
    assert sorted(STAND_INS.values()) == list(range(256))


def test_half_a_character_can_be_given(vocabulary: HfVocabulary) -> None:
    tokenizer = HetrunTokenizer(vocabulary)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")).removeprefix("<s>").strip() == "a\ufffdb"


def test_a_text_begins_with_bos_once(tmp_path: Path) -> None:
    write(tmp_path, sentencepiece(), tokenizer_config={"bos_token": "<s>"})
    tokenizer = HetrunTokenizer(opened(tmp_path))
    assert tokenizer.encode("the")[0] == tokenizer.encode("<s>the")[0] == 1
    assert tokenizer.encode("<s>the").count(1) == 1
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "")


Says = dict[str, Any]
ENDS: dict[str, tuple[Says, Says, set[str]]] = {
    "nothing but a known text": ({}, {}, {"<|im_end|>", "</s>"}),
    "one in config": ({"eos_token_id": 0}, {}, {"<s>", "</s>", "<|im_end|>"}),
    "several in config": ({"eos_token_id": [0, 2]}, {}, {"<s>", "</s>", "<|im_end|>"}),
    "in generation_config": ({}, {"generation_config": {"eos_token_id": [0]}}, {"<s>", "</s>", "<|im_end|>"}),
    "no such token": ({"eos_token_id": -1}, {}, {"</s>", "<|im_end|>"}),
    "a token of its own": (
        {},
        {"tokenizer_config": {"eos_token": "<tool>"}},
        {"<tool>", "</s>", "<|im_end|>"},
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_tokens_that_end_an_answer(tmp_path: Path, name: str) -> None:
    config, beside, expected = ENDS[name]
    vocabulary = opened(write(tmp_path, byte_level(), config, **beside))
    found = {vocabulary.piece(i).decode() for i in range(vocabulary.n_tokens) if vocabulary.is_end(i)}
    assert found == expected


def test_gemmas_marks_are_texts_for_readers_and_two_end_answers(tmp_path: Path) -> None:
    vocabulary = opened(write(tmp_path, gemma4()))
    text = '<|tool_call>the<|"|> en\n<|"|><tool_call|>'
    tokens = vocabulary.tokenize(text, False, True)
    assert text_of(vocabulary, tokens) == text
    assert vocabulary.is_control(tokens[0])
    ends = vocabulary.tokenize("<turn|><|tool_response>", False, True)
    assert [vocabulary.is_end(token) for token in (*ends, *tokens)] == [True] * 2 + [False] * len(tokens)


@pytest.mark.parametrize("pair", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_an_end_of_a_message_ends_no_answer_where_others_do(tmp_path: Path, pair: tuple[str, str]) -> None:
    made = byte_level()
    made.add_special_tokens(["<|end|>", *pair])
    tokens = [token for text in ("<|end|>", *pair) if (token := made.token_to_id(text)) is not None]
    vocabulary = opened(write(tmp_path, made, {"eos_token_id": tokens}))
    assert [vocabulary.is_end(token) for token in tokens] == [False, True, True]
    assert vocabulary.piece(tokens[0]) == b"<|end|>"


@pytest.mark.parametrize(
    ("config", "beside", "bos"),
    [
        ({}, {}, None),
        ({"bos_token_id": 0}, {}, 0),
        ({"bos_token_id": 999_999}, {}, None),
        ({}, {"special_tokens_map": {"bos_token": {"content": "</s>"}}}, 1),
        ({"bos_token_id": 0}, {"tokenizer_config": {"bos_token": "</s>"}}, 1),
        ({"bos_token_id": 2}, {"tokenizer_config": {"bos_token": None}}, 2),
        ({}, {"tokenizer_config": {"bos_token": "no token"}}, None),
    ],
)
def test_where_bos_is_said(tmp_path: Path, config: Says, beside: Says, bos: int | None) -> None:
    vocabulary = opened(write(tmp_path, byte_level(), config, **beside))
    assert (vocabulary.bos, vocabulary.add_bos) == (bos, False)


def test_a_padded_table_has_tokens_without_text(tmp_path: Path) -> None:
    vocabulary = opened(write(tmp_path, byte_level()), 500)
    assert vocabulary.n_tokens == 500
    assert vocabulary.piece(499) == b""
    assert not vocabulary.is_end(499)


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    vocabulary = opened(write(tmp_path, byte_level()), 280)
    assert vocabulary.n_tokens > 280
    with pytest.raises(
        OptionError, match=r"the text has the token '<tool>', number \d+; the model has only 280"
    ):
        vocabulary.tokenize("a <tool>", False, True)


def wordpiece() -> Tokenizer:
    t = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    t.decoder = decoders.WordPiece()
    return t


def regex() -> Tokenizer:
    from tokenizers import Regex

    t = byte_level()
    t.decoder = decoders.Sequence([decoders.Replace(Regex("a+"), " ")])
    return t


@pytest.mark.parametrize(("make", "named"), [(wordpiece, "WordPiece"), (regex, "Replace by Regex")])
def test_other_decoders_are_named(tmp_path: Path, make: Callable[[], Tokenizer], named: str) -> None:
    write(tmp_path, make())
    with pytest.raises(ModelFileError, match=f"its decoder {named} is not one that hetrun knows"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"{}", "is not a tokenizer that can be read: "),
        (b'{"version": "1.0", "model": ' + b"[" * 100_000, "is not a tokenizer that can be read: "),
        (b"\xff\xfe", "is not a tokenizer that can be read: "),
    ],
)
def test_a_bad_tokenizer_is_a_sentence(tmp_path: Path, raw: bytes, message: str) -> None:
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path)


def test_an_endless_tokenizer_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    os.truncate(tmp_path / "tokenizer.json", 500 << 20)
    with pytest.raises(ModelFileError, match="it needs 524288000 bytes; hetrun reads up to 67108864"):
        opened(tmp_path)


def test_a_tokenizer_that_fails_at_work_is_to_blame(tmp_path: Path) -> None:
    write(tmp_path, Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")))
    vocabulary = opened(tmp_path)
    with pytest.raises(ModelFileError, match="cannot tokenise this text: WordLevel error"):
        vocabulary.tokenize("b", False, True)
    vocabulary.close()
