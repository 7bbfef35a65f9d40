"""Texts that begin like others are cut like others, and get the very tokens that they would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetrun.backends.llamacpp.vocabulary import LlamaVocabulary, open_vocabulary
from hetrun.backends.llamacpp.vocabulary.text_limits import _APART
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel
from hetrun.text import encode_cache, tokenizer
from hetrun.text.encode_cache import KEPT, RecentTexts
from hetrun.text.tokenizer import Tokenizer
from tests.models.tiny import MERGES
from tests.support.examples import examples
from tests.support.tiers import exhaustive
from tests.support.vocabularies import byte_level, written
from tests.text.test_tokenizer_corpus import smollm2

# Words, and whatever may stand between or instead of them.
PARTS = [
    *("the", " the", " a", " in", "n't", "'s", " don't", "THE", " Then", "é", " été", "你好", " 你"),
    *(" ", "  ", "\n", "\n\n", " \n ", "\t", ".", " .", "!?", " -- ", "1", " 2345", "1234567", "_x", " x_y"),
    *("<|im_end|>", "<tool>", "<s>", "<|im_start|>", "<|im_end|>\n<|im_start|>user\n", "\u0301", "🙂"),
]
PIECES = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def opened(path: Path) -> LlamaVocabulary:
    return open_vocabulary(GGUFModel(read_gguf(path), "llama"))


def across_words(pre: str) -> dict[str, Any]:
    """With merges that join a word and the space behind it, should a cutter leave them together: unless what
    follows is "qz", which takes the space."""
    more = ["q z", "Ġ qz", *(f"{letter} Ġ" for letter in "aehnst")]
    keys = byte_level(pre)
    keys["merges"] = [*MERGES, *more]
    keys["tokens"] = [*keys["tokens"], *(m.replace(" ", "") for m in more)]
    keys["token_type"] = [*keys["token_type"], *[1] * len(more)]
    return keys


@pytest.fixture(scope="module")
def real() -> Iterator[LlamaVocabulary]:
    found = opened(smollm2())
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are worth it, too."""
    for module in (encode_cache, tokenizer):
        monkeypatch.setattr(module, "LEAST", 8)


def assert_same(vocabulary: LlamaVocabulary, texts: list[str]) -> int:
    """Each text's tokens behind those before it; how many bytes were not cut again."""
    made, known = Tokenizer(vocabulary), 0
    assert made._recent is not None
    for text in texts:
        known += made._recent.beginning(text.encode())[1]
        assert made.encode(text) == Tokenizer(vocabulary).encode(text), text
    return known


def alike(random: Random) -> list[str]:
    """Texts that differ in the middle of a word, or anywhere else."""
    beginning = "".join(random.choices(PARTS, k=60)) + random.choice(["e q", "s q", ""])
    return [
        beginning + random.choice("zx") + "".join(random.choices(PARTS, k=random.randint(0, 20)))
        for _ in range(3)
    ]


# Of each we say only that it may be trusted: what they are is llama.cpp's.
ONE_IN_FOUR = [pytest.param(pre, marks=exhaustive if i % 4 else ()) for i, pre in enumerate(sorted(_APART))]


@settings(max_examples=examples(150))
@given(PIECES, st.lists(PIECES, min_size=1, max_size=4))
def test_a_real_vocabulary(real: LlamaVocabulary, beginning: str, ends: list[str]) -> None:
    assert_same(real, [beginning + end for end in ends])


@pytest.mark.parametrize(
    "pre", [p if i % 4 == 0 else pytest.param(p, marks=exhaustive) for i, p in enumerate(sorted(_APART))]
)
def test_every_way_of_cutting_that_is_trusted(pre: str, tmp_path: Path) -> None:
    vocabulary, random = opened(written(tmp_path / "x.gguf", across_words(pre))), Random(pre)
    assert vocabulary.cuts_at_spaces
    known = 0
    for _ in range(25):
        known += assert_same(vocabulary, alike(random))
    assert known > 2000
    vocabulary.close()


def test_this_would_notice_a_way_of_cutting_that_joins_words(tmp_path: Path) -> None:
    vocabulary, random = opened(written(tmp_path / "x.gguf", across_words("superbpe"))), Random(0)
    assert not vocabulary.cuts_at_spaces
    vocabulary.cuts_at_spaces = True
    texts = [text for _ in range(25) for text in alike(random)]
    with pytest.raises(AssertionError, match="q"):
        assert_same(vocabulary, texts)
    vocabulary.close()


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        ({}, True),
        ({"pre": "superbpe"}, False),
        ({"pre": "exaone-moe"}, False),
        ({"add_eos_token": True}, False),
        ({"tokens": "a tool"}, False),  # a special token with two words
    ],
    ids=str,
)
def test_vocabularies_that_may_join_words_are_not_trusted(
    change: dict[str, Any], cuts: bool, tmp_path: Path
) -> None:
    keys = byte_level()
    if text := change.get("tokens"):
        change = {"tokens": [text if t == "<tool>" else t for t in keys["tokens"]]}
    vocabulary = opened(written(tmp_path / "x.gguf", keys | change))
    assert vocabulary.cuts_at_spaces == cuts
    vocabulary.close()


# --- with a token for each byte


def spell(token: int) -> bytes:
    return b"<s>" if token == 256 else bytes([token])


def test_it_ends_between_two_words_that_both_have() -> None:
    texts = RecentTexts(spell)
    texts.add(b"one two three four", list(b"one two three four"))
    assert texts.beginning(b"one two three five") == (list(b"one two three"), 13)
    assert texts.beginning(b"one two three 4") == (list(b"one two"), 7)
    assert texts.beginning(b"one two three four five") == (list(b"one two three"), 13)
    assert texts.beginning(b"one twofold") == ([], 0), "only a byte of the next word is known"
    assert texts.beginning(b"two three four") == ([], 0)


def test_a_token_in_front_is_no_part_of_the_text() -> None:
    texts = RecentTexts(spell)
    texts.add(b"one two three four", [256, *b"one two three four"])
    assert texts.beginning(b"one two three five") == ([256, *b"one two three"], 13)


def test_tokens_that_do_not_spell_the_end_say_nothing() -> None:
    texts = RecentTexts(spell)
    texts.add(b"one two three four", [*b"one two three four", 256])  # one was put behind it
    assert texts.beginning(b"one two three five") == ([], 0)


def test_the_last_texts_are_remembered() -> None:
    texts = RecentTexts(spell)
    for i in range(KEPT + 1):
        text = f"{i:04} and so on and on".encode()
        texts.add(text, list(text))
        texts.add(text, list(text))
    assert texts.beginning(b"0000 and so on and off") == ([], 0)
    for i in range(1, KEPT + 1):
        assert texts.beginning(f"{i:04} and so on and off".encode())[1] == 18


def test_all_texts_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_cache, "MOST", 50)
    texts = RecentTexts(spell)
    texts.add(b"a b" * 20, list(b"a b" * 20))
    assert not texts._texts
    for text in (b"one two three four", b"two three four five", b"six seven eight nine"):
        texts.add(text, list(text))
    assert [t.raw[:3] for t in texts._texts] == [b"six", b"two"]
