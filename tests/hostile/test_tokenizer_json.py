"""What a stranger's tokenizer.json asks for: refused with the place where it says so."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer as Theirs, models, normalizers, pre_tokenizers, processors

from hetrun.errors import ModelFileError, OptionError
from hetrun.loader.formats import precompiled_charsmap
from hetrun.loader.formats.regex_safety import objection
from tests.support import vocabularies as v
from tests.support.limits import Within
from tests.text.test_hf_tokenizer import byte_level, opened, write

A = models.BPE({"a": 0, "b": 1, "c": 2}, [], unk_token="a")


def folder_with(tmp_path: Path, **parts: Any) -> Path:  # noqa: ANN401
    out = Theirs(A)
    for name, part in parts.items():
        setattr(out, name, part)
    return write(tmp_path, out)


def template(text: str) -> Any:  # noqa: ANN401
    return processors.TemplateProcessing(text, special_tokens=[("a", 0)])


BAD_STEPS: dict[str, tuple[str, Any, str]] = {
    "replace": (
        "normalizer",
        normalizers.Replace("a", "a" * 1000),
        "normalizer makes a text more than 256 times",
    ),
    "replacements": (
        "normalizer",
        normalizers.Sequence([normalizers.NFC(), *[normalizers.Replace("a", "aaaa")] * 40]),
        r"normalizer.normalizers\[4\] makes a text more than 256 times longer",
    ),
    "replacements of nothing": (
        "normalizer",
        normalizers.Sequence([normalizers.Replace(Regex("x?"), "aa")] * 6),
        r"normalizer.normalizers\[5\] makes a text more than",
    ),
    "bytes of bytes": (
        "normalizer",
        normalizers.Sequence([normalizers.ByteLevel()] * 9),
        r"normalizer.normalizers\[8\] makes",
    ),
    "a long beginning": ("normalizer", normalizers.Prepend("a" * 1000), "normalizer makes a text more than"),
    "many steps": (
        "normalizer",
        normalizers.Sequence([normalizers.Strip()] * 80),
        r"normalizer.normalizers\[63\] is one of more",
    ),
    "an expression in a normalizer": (
        "normalizer",
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("(a+)+$"), "b")]),
        r"normalizer.normalizers\[1\].pattern repeats what varies, near '\(a\+\)\+'",
    ),
    "an expression": (
        "pre_tokenizer",
        pre_tokenizers.Split(Regex("(a|aa)*$"), "isolated"),
        "pre_tokenizer.pattern repeats what varies",
    ),
    "a later expression": (
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex("(?:a?){9,}b"), "removed")]
        ),
        r"pre_tokenizer.pretokenizers\[1\].pattern repeats",
    ),
    "a template that repeats": (
        "post_processor",
        template("$A a $A"),
        "post_processor has a template that repeats",
    ),
    "a long template": ("post_processor", template("$A" + " a" * 100), "post_processor has a template"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_what_a_folder_does_to_a_text_has_limits(name: str, tmp_path: Path, within: Within) -> None:
    part, value, says = BAD_STEPS[name]
    folder_with(tmp_path, **{part: value})
    with within(3), pytest.raises(ModelFileError, match=rf"tokenizer.json: {says}"):
        opened(tmp_path)


def rewritten(tmp_path: Path, change: Callable[[dict[str, Any]], object], **dump: Any) -> Path:  # noqa: ANN401
    """A folder whose tokenizer.json was changed by hand."""
    write(tmp_path, byte_level())
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state, **dump))
    return path


BOMB = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}] * 9,
}


@pytest.mark.parametrize("where", ["first", "last", "escaped", "in the vocabulary too"])
def test_tokens_that_would_grow_while_the_file_is_read(where: str, tmp_path: Path) -> None:
    """The library applies the normalizer to added tokens before anybody can look at it."""

    def change(state: dict[str, Any]) -> None:
        state["added_tokens"].append(
            {**state["added_tokens"][0], "id": 999, "content": "aaa", "normalized": True}
        )
        state["model"]["vocab"]["normalizer"] = 998
        if where in ("first", "in the vocabulary too"):
            state["normalizer"] = BOMB
        else:
            del state["normalizer"]
            state["normalizer"] = BOMB

    path = rewritten(tmp_path, change)
    if where == "escaped":
        path.write_text(path.read_text().replace('"normalizer": {', '"\\u006eormalizer": {'))
    with pytest.raises(
        ModelFileError, match=r"normalizer.normalizers\[1\] makes a text more than 256 times longer"
    ):
        opened(tmp_path)


def test_a_word_normalizer_in_the_vocabulary_is_a_word(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda state: state["model"]["vocab"].update({"normalizer": 998, "x": -1 % 997}))
    assert opened(tmp_path).tokenize("the", False, True)


def test_keys_that_are_there_twice(tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda state: None)
    path.write_text(path.read_text()[:-1] + ', "normalizer": null}')
    with pytest.raises(ModelFileError, match="'normalizer' appears twice"):
        opened(tmp_path)


@pytest.mark.parametrize("deep", [100, 1000, 100_000])
def test_nesting(deep: int, tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda state: state.update(normalizer="HERE"))
    begin, end = '{"type": "Sequence", "normalizers": [', "]}"
    path.write_text(path.read_text().replace('"HERE"', begin * deep + end * deep))
    with pytest.raises(
        ModelFileError, match=r"is one of more than 64 steps|is not a tokenizer that can be read"
    ):
        opened(tmp_path)


def test_numbers_of_added_tokens(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda state: state["model"]["vocab"].update({"</s>": 4_000_000_000}))
    with pytest.raises(ModelFileError, match=r"added_tokens has '</s>' as token 4000000000"):
        opened(tmp_path)
    rewritten(tmp_path, lambda state: state["model"]["vocab"].update({"far": 4_000_000_000}))
    assert opened(tmp_path).pieces()[-1] == b""


def test_words_and_pieces_have_limits(tmp_path: Path) -> None:
    word = Theirs(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]", max_input_chars_per_word=10**6))
    with pytest.raises(ModelFileError, match=r"model.max_input_chars_per_word is more than 1000"):
        opened(write(tmp_path, word))
    piece = Theirs(models.Unigram([("<unk>", 0.0), ("a" * 2000, -1.0)], 0, False))
    with pytest.raises(ModelFileError, match=r"model.vocab has a piece of 2000 characters"):
        opened(write(tmp_path, piece))


def test_a_table_of_characters_in_a_folder(tmp_path: Path) -> None:
    good = v.unigram()["precompiled_charsmap"]
    folder = folder_with(tmp_path, normalizer=normalizers.Precompiled(good))
    assert opened(folder).tokenize("Ａ", False, True) == [0]  # noqa: RUF001
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["normalizer"]["precompiled_charsmap"] = base64.b64encode(good[:-1] + b"x").decode()
    path.write_text(json.dumps(state))
    with pytest.raises(
        ModelFileError, match=r"normalizer.precompiled_charsmap is damaged: its last text has no end"
    ):
        opened(folder)


def test_a_text_may_grow_to_a_limit(tmp_path: Path) -> None:
    vocabulary = opened(folder_with(tmp_path, normalizer=normalizers.Replace("b", "a" * 200)))
    assert len(vocabulary.tokenize("b" * 10, False, True)) == 2000
    with pytest.raises(OptionError, match="the text has 400000 bytes; hetrun reads up to 335544 at once"):
        vocabulary.tokenize("b" * 400000, False, True)


# --- the parts


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(a|a)*$",
        "(?:a{1,3}){2,}",
        "(?:a{1,3}){2,20}",
        "(a?)*",
        "((a{1,9})b?)+x",
        "(?i:(x+x+)+y)",
        r"(\(a+\))*",
        "([a]b*)+",
    ],
)
def test_expressions_that_may_take_for_ever(expression: str) -> None:
    assert "repeats what varies" in str(objection(expression))


HONEST = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lo}&&[^\p{Han}]]+(?i:'s|'t)?|\p{N}{1,3}",
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?=(\d{3})+(?!\d))",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"\(a+\)*b",
    r"[(a+)+]+",
    r"[^]]+",
    r"\[a+",
    "a++b",
    " {2,}",
)


@pytest.mark.parametrize("expression", HONEST)
def test_expressions_in_use(expression: str) -> None:
    assert objection(expression) is None


def test_a_long_expression() -> None:
    assert objection("a" * 40000) == "is an expression of 40000 characters"


def test_tables_of_characters() -> None:
    good = v.unigram()["precompiled_charsmap"]
    assert precompiled_charsmap.objection(good) is None
    assert precompiled_charsmap.longest_text(good) == 2
    for cut in range(0, len(good) - 1, 97):
        assert precompiled_charsmap.objection(good[:cut]) is not None
