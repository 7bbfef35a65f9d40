"""Vocabularies of strangers: each is refused with its key and the token, and none ends the process.

What llama.cpp would die or hang of is tried in a process of its own, all in one: it says how each case ended,
so that a case which ends it is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.errors import ModelFileError
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel
from tests.hostile.vocabulary_trial import TEXT, attempt, tried
from tests.models.tiny import TinyLlama, write_gguf
from tests.support import vocabularies as v

MOST_S = 2.0  # half of it on an idle machine: there, nothing takes a second
Change = Mapping[str, Any]


def tokens(kind: str, **at: str | bytes) -> Change:
    """The tokens of a kind, some of them others: t5="x" makes token 5 an "x"."""
    out = list(v.KINDS[kind]()["tokens"])
    for name, text in at.items():
        out[int(name[1:])] = text
    return {"tokens": out}


def types(kind: str, **at: int) -> Change:
    out = list(v.KINDS[kind]()["token_type"])
    for name, number in at.items():
        out[int(name[1:])] = number
    return {"token_type": out}


def without(kind: str, *texts: str) -> Change:
    """Without these tokens: rows in their place that stand for nothing."""
    keys = v.KINDS[kind]()
    gone = {i for i, text in enumerate(keys["tokens"]) if text in texts}
    named = [f"row {i}" if i in gone else text for i, text in enumerate(keys["tokens"])]
    return {"tokens": named, "token_type": [1 if i in gone else n for i, n in enumerate(keys["token_type"])]}


def table(change: Callable[[bytearray], object]) -> Change:
    """The table of characters, damaged."""
    raw = bytearray(v.unigram()["precompiled_charsmap"])
    change(raw)
    return {"precompiled_charsmap": bytes(raw)}


def unit(index: int, value: int) -> Callable[[bytearray], object]:
    def change(raw: bytearray) -> None:
        raw[4 + 4 * index : 8 + 4 * index] = value.to_bytes(4, "little")

    return change


def looping(raw: bytearray) -> None:
    """From "a" on, the state in which an "a" may follow."""
    state = 200 << 2
    unit(0, state << 10)(raw)
    unit(state ^ 97, (97 << 10) | 97)(raw)


LONG = "x" * 5000
# What is changed of which kind, and what is said of it.
REFUSED: dict[str, tuple[str, Change, str]] = {
    "tokens missing": ("byte level", {"tokens": None}, "'tokenizer.ggml.tokens' is missing or empty"),
    "tokens empty": ("byte level", {"tokens": []}, "'tokenizer.ggml.tokens' is missing or empty"),
    "tokens numbers": (
        "byte level",
        {"tokens": [1, 2]},
        "'tokenizer.ggml.tokens' must be an array of strings",
    ),
    "a text twice": (
        "byte level",
        tokens("byte level", t9="<s>"),
        "token 9, '<s>', which is already the token 0",
    ),
    "bytes twice": (
        "byte level",
        tokens("byte level", t9=b"\xff\xfe" * 20, t50=b"\xff\xfe" * 20),
        "token 50, .* already the token 9",
    ),
    "a text twice of 2 million": (
        "sentencepiece",
        {"tokens": ["a"] * (1 << 20), "token_type": None, "scores": None},
        "the token 1, 'a', which is already the token 0",
    ),
    "empty and its name": (
        "byte level",
        tokens("byte level", t9="", t12="[EMPTY_9]"),
        "token 12, .* empty token 9",
    ),
    "a text twice up to a NUL": (
        "byte level",
        tokens("byte level", t50="<s>\0x"),
        r"token 50, '<s>\\x00x', which is the token 0 up to its NUL",
    ),
    "a long token": ("byte level", tokens("byte level", t9=LONG), "token 9, 'xxx.*, of 5000 bytes"),
    "a long token in a trie": ("unigram", tokens("unigram", t9="x" * 300), "token 9, .*, of 300 bytes"),
    "many long tokens": (
        "byte level",
        {"tokens": [f"{i:04}" * 1000 for i in range(30)], "token_type": None},
        "'tokenizer.ggml.tokens' has too many long tokens",
    ),
    "types too few": (
        "byte level",
        {"token_type": [1, 2]},
        "'tokenizer.ggml.token_type' must be an array of",
    ),
    "types floats": (
        "wordpiece",
        {"token_type": [1.0] * len(v.wordpiece()["tokens"])},
        "'tokenizer.ggml.token_type' holds float32",
    ),
    "type 7": ("byte level", types("byte level", t9=7), "says 7 of token 9; types go from 0 to 6"),
    "type -1": ("byte level", types("byte level", t9=-1), "says -1 of token 9"),
    "too many special": (
        "byte level",
        {"tokens": [f"<{i}>" for i in range(70000)], "token_type": [3] * 70000},
        "has more than 65536 special tokens",
    ),
    "scores too few": ("sentencepiece", {"scores": [0.5]}, "'tokenizer.ggml.scores' must be an array of"),
    "scores NaN": (
        "sentencepiece",
        {"scores": [0.5] * 9 + [float("nan")] + [0.5] * (len(v.sentencepiece()["tokens"]) - 10)},
        "'tokenizer.ggml.scores' holds nan for token 9",
    ),
    "scores texts": (
        "sentencepiece",
        {"scores": ["a"]},
        "'tokenizer.ggml.scores' must be an array of numbers",
    ),
    "byte -1": ("sentencepiece", tokens("sentencepiece", t9="<0x-1>"), "token 9, '<0x-1>', of the type byte"),
    "byte short": ("sentencepiece", tokens("sentencepiece", t9="<0"), "token 9, '<0', of the type byte"),
    "byte long": (
        "sentencepiece",
        tokens("sentencepiece", t9="<0x0001>"),
        "token 9, '<0x0001>', of the type byte",
    ),
    "byte in wordpiece": (
        "wordpiece",
        types("wordpiece", t9=6),
        "the token 9, .*, of the type byte, which such",
    ),
    "byte missing": ("sentencepiece", without("sentencepiece", "<0xE4>"), "has no token <0xE4>"),
    "NUL missing": ("sentencepiece", without("sentencepiece", "<0x00>"), "has no token <0x00>"),
    "merges missing": ("byte level", {"merges": None}, "'tokenizer.ggml.merges' is missing"),
    "merges numbers": (
        "byte level",
        {"merges": [1, 2]},
        "'tokenizer.ggml.merges' must be an array of strings",
    ),
    "a merge without a space": ("byte level", {"merges": ["a b", "cd"]}, "has 'cd' as merge 1"),
    "a merge of nothing": ("byte level", {"merges": ["a b", "", "a b"]}, "has '' as merge 1"),
    "a merge with nothing": ("byte level", {"merges": ["a b", "a b", " b", "a"]}, "has ' b' as merge 2"),
    "a merge to nothing": ("byte level", {"merges": ["abc "]}, "has 'abc ' as merge 0"),
    "bos outside": (
        "byte level",
        {"bos_token_id": 1 << 20},
        "'tokenizer.ggml.bos_token_id' must be between 0",
    ),
    "eot outside": (
        "byte level",
        {"eot_token_id": 1 << 31},
        "'tokenizer.ggml.eot_token_id' must be between 0",
    ),
    "cls outside": ("wordpiece", {"cls_token_id": 4000}, "'tokenizer.ggml.cls_token_id' must be between 0"),
    "fim outside": ("byte level", {"fim_pad_token_id": 999999}, "'tokenizer.ggml.fim_pad_token_id' must be"),
    "an id that is a text": (
        "byte level",
        {"eom_token_id": "x"},
        "'tokenizer.ggml.eom_token_id' must be a whole",
    ),
    "a flag that is a number": (
        "byte level",
        {"add_bos_token": 1},
        "'tokenizer.ggml.add_bos_token' must be true",
    ),
    "bos wanted, but there is none": (
        "byte level",
        {
            "tokens": list("abcde"),
            "token_type": None,
            "add_bos_token": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "'tokenizer.ggml.bos_token_id' is missing",
    ),
    "eos wanted, but there is none": (
        "byte level",
        {
            "tokens": list("abcde"),
            "token_type": None,
            "add_eos_token": True,
            "eos_token_id": None,
            "bos_token_id": 1,
        },
        "'tokenizer.ggml.eos_token_id' is missing",
    ),
    "bos of glm4": (
        "byte level",
        {"pre": "glm4", "add_bos_token": True, "bos_token_id": None},
        "'tokenizer.ggml.bos_token_id' is missing",
    ),
    "no separator": (
        "wordpiece",
        {"seperator_token_id": None},
        "'tokenizer.ggml.seperator_token_id' is missing",
    ),
    "no such kind": (
        "byte level",
        {"model": "word2vec"},
        "'tokenizer.ggml.model' is 'word2vec'; hetrun knows",
    ),
    "llama.cpp's own tests'": ("byte level", {"model": "test"}, "'tokenizer.ggml.model' is 'test'"),
    "a kind that is a number": ("byte level", {"model": 3}, "'tokenizer.ggml.model' must be a string"),
    "no such cutter": ("byte level", {"pre": "nope"}, "'nope' as 'tokenizer.ggml.pre'"),
    "a cutter that leaves spaces": (
        "byte level",
        {"pre": "whitespace"},
        "'tokenizer.ggml.pre' is 'whitespace'",
    ),
    "a table of floats": ("unigram", {"precompiled_charsmap": [0.5]}, "_charsmap' holds float32"),
    "a table of three bytes": (
        "unigram",
        {"precompiled_charsmap": b"abc"},
        "its first four bytes are not the size",
    ),
    "a table with a huge size": (
        "unigram",
        {"precompiled_charsmap": b"\xfc\xff\xff\xff" + bytes(64)},
        "its first four bytes are not the size",
    ),
    "a table with no text": ("unigram", table(lambda raw: raw.extend(b"x")), "its last text has no end"),
    "a table with a long text": (
        "unigram",
        table(lambda raw: raw.extend(b"x" * 1000 + b"\0")),
        "it replaces characters by more than 128 bytes",
    ),
    "a table that leads outside": (
        "unigram",
        table(unit(0, 0x3FFF << 10)),
        "it leads to places outside of it",
    ),
    "a table with a loop": ("unigram", table(looping), "keys of more than 64 bytes, or without an end"),
    "rwkv without a byte": ("rwkv", tokens("rwkv", t98="row"), "has no token for the byte 0x61"),
    "rwkv without newline": ("rwkv", tokens("rwkv", t11="row"), "has no token for the byte 0x0A"),
    "plamo not UTF-8": ("plamo", tokens("plamo", t261=b"\xff\xfea"), "the token 261, .*, which is not UTF-8"),
    "plamo with long tokens": (
        "plamo",
        {
            "tokens": [*v.plamo()["tokens"], *(f"{i:03}" * 80 for i in range(200))],
            "token_type": None,
            "scores": None,
        },
        "too many long ones before it",
    ),
}


def write_case(path: Path, kind: str, change: Change) -> Path:
    return v.written(path, v.KINDS[kind]() | dict(change))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, float]]:
    """How each case ended."""
    folder = tmp_path_factory.mktemp("cases")
    cases = [
        (write_case(folder / f"{i}.gguf", kind, change), TEXT, 1)
        for i, (kind, change, _) in enumerate(REFUSED.values())
    ]
    return dict(zip(REFUSED, tried(cases), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_is_refused_with_key_and_token(name: str, ends: Mapping[str, tuple[str, float]]) -> None:
    said, _ = ends[name]
    assert re.search(REFUSED[name][2], said), said
    assert ".gguf: " in said
    assert said.isprintable()
    assert len(said) < 500


@pytest.mark.slow
@pytest.mark.alone
def test_no_refusal_takes_long(ends: Mapping[str, tuple[str, float]]) -> None:
    assert {name: seconds for name, (_, seconds) in ends.items() if seconds >= MOST_S} == {}


@pytest.mark.parametrize("kind", v.KINDS)
def test_what_is_odd_but_right_is_read(kind: str, tmp_path: Path) -> None:
    """Empty tokens, bytes that are no UTF-8, and no types, scores or merges where they may be absent."""
    keys = v.KINDS[kind]()
    keys["tokens"] += ["", "", "[EMPTY_1]", "plain" if kind == "plamo" else b"\xff\xfe\x80", "\0", "\r\n"]
    for name in ("token_type", "scores"):
        if name in keys:
            keys[name] = [*keys[name], *[keys[name][-1]] * 6]
    assert (
        attempt(write_case(tmp_path / "x.gguf", "byte level", keys | {"merges": keys.get("merges", ["a b"])}))
        == ""
    )


@pytest.mark.parametrize("kind", v.KINDS)
def test_what_a_kind_does_not_read_may_be_anything(kind: str, tmp_path: Path) -> None:
    keys = v.KINDS[kind]()
    odd: Change = {"merges": [1, 2], "precompiled_charsmap": [1, 2]}
    read = "precompiled_charsmap" if kind == "unigram" else "merges" if "merges" in keys else ""
    others = {key: value for key, value in odd.items() if key != read}
    assert attempt(write_case(tmp_path / "x.gguf", kind, others)) == ""


def test_a_file_that_is_replaced_while_it_is_read_does_no_harm(tmp_path: Path) -> None:
    path = v.written(tmp_path / "x.gguf", v.byte_level())
    file = read_gguf(path)
    path.write_bytes(b"not a model any more")
    vocabulary = open_vocabulary(GGUFModel(file, "llama"))
    assert vocabulary.tokenize("the", False, True)


def test_more_tokens_than_the_model_has_rows(tmp_path: Path) -> None:
    write_gguf(TinyLlama("more"), tmp_path / "x.gguf")
    file = read_gguf(tmp_path / "x.gguf")
    rows = {**file.tensors, "token_embd.weight": file.tensors["blk.0.attn_q.weight"]}
    with pytest.raises(ModelFileError, match=r"has \d+ tokens, but token_embd.weight has 128 rows"):
        open_vocabulary(GGUFModel(replace(file, tensors=rows), "llama"))
