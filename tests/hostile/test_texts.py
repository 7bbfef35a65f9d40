"""Texts that llama.cpp would not survive, or not finish with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetrun.backends.llamacpp.vocabulary import open_vocabulary
from hetrun.backends.llamacpp.vocabulary.text_limits import MAX_FOUND
from hetrun.errors import OptionError
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel
from tests.hostile.vocabulary_trial import tried
from tests.support import vocabularies as v
from tests.support.limits import Within
from tests.support.tiers import exhaustive

RUNS = ("a", "A", "1", " ", "-", "\n", "中", "\u0301", "ab ", "aA", "'s")
EXPRESSIONS = (
    "default",
    "deepseek-llm",
    "deepseek-v3",
    "tekken",
    "gpt-4o",
    "viking",
    "superbpe",
    "exaone-moe",
    "jais-2",
)
DAILY = ("deepseek-llm", "superbpe")  # two refusals, one, and none is what the others have


@pytest.mark.parametrize(
    "pre", [pytest.param(pre, marks=() if pre in DAILY else exhaustive) for pre in EXPRESSIONS]
)
def test_a_long_text_never_ends_the_process(pre: str, tmp_path: Path) -> None:
    """Each of these ended it: C++'s expressions call themselves for each character."""
    path = v.written(tmp_path / "x.gguf", v.byte_level(pre))
    refused = [said for said, _ in tried([(path, text, 60000 // len(text)) for text in RUNS]) if said]
    assert all("in a row that its way of cutting words" in said for said in refused)
    # Line ends are spaces, too.
    assert len(refused) == {"deepseek-llm": 2, "jais-2": 2, "superbpe": 1}.get(pre, 0)


def opened(path: Path, keys: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the vocabulary of a library
    return open_vocabulary(GGUFModel(read_gguf(v.written(path, keys)), "llama"))


def test_texts_that_would_take_minutes_are_refused(tmp_path: Path, within: Within) -> None:
    keys = v.byte_level()
    keys["tokens"] += [f"<s{i}>" for i in range(6000)]
    keys["token_type"] += [v.USER_DEFINED] * 6000
    vocabulary = opened(tmp_path / "x.gguf", keys)
    plain = opened(tmp_path / "y.gguf", v.byte_level())
    with within(5):
        said = "the text has '<' 1000000 times, with which 6004 special tokens begin"
        with pytest.raises(OptionError, match=said):
            vocabulary.tokenize("<" * 10**6, True, True)
        with pytest.raises(OptionError, match=f"100000 special tokens in it; hetrun reads up to {MAX_FOUND}"):
            plain.tokenize("<s>" * 100000, True, True)
        with pytest.raises(OptionError, match="the text has 17000000 bytes; hetrun reads up to 16777216"):
            plain.tokenize("a" * 17_000_000, True, True)


@pytest.mark.slow
def test_texts_that_take_seconds_are_read(tmp_path: Path) -> None:
    plain = opened(tmp_path / "y.gguf", v.byte_level())
    assert plain.tokenize("<s>" * MAX_FOUND, False, True) == [0] * MAX_FOUND
    assert len(plain.tokenize("<" * 10**6, False, True)) == 10**6


def test_characters_that_no_token_stands_for(tmp_path: Path) -> None:
    """llama.cpp then answers with the token -1."""
    two = {"tokens": ["a", "\n"], "token_type": [1, 1], "scores": [-1.0, -2.0], "add_eos_token": False}
    vocabulary = opened(tmp_path / "x.gguf", {"model": "t5", **two})
    assert vocabulary.tokenize("a\na", False, True) == [0, 1, 0]
    with pytest.raises(OptionError, match="characters for which the model has no token"):
        vocabulary.tokenize("abz", False, True)
