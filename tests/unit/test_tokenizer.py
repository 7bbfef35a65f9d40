"""The tokenizer over a vocabulary of bytes."""

from __future__ import annotations

import pytest

from hetrun.errors import OptionError
from hetrun.loader.source import Vocabulary
from hetrun.text.tokenizer import Tokenizer, whole

BOS, EOS = 256, 257


class Bytes:
    """A token for each byte, and two special ones; it counts what it is asked."""

    n_tokens = 258
    eos: int | None = EOS
    cuts_at_spaces = True  # as each byte is a token

    def __init__(self, bos: int | None = BOS, add_bos: bool = True) -> None:
        self.bos, self.add_bos = bos, add_bos
        self.asked: list[tuple[str, int]] = []
        self.closed = False

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert parse_special
        out = [BOS] if add_special and self.add_bos else []
        while text:
            if text.startswith("<s>"):
                out.append(BOS)
                text = text.removeprefix("<s>")
            else:
                out += text[0].encode()
                text = text[1:]
        return out

    def piece(self, token: int) -> bytes:
        self.asked.append(("piece", token))
        return {BOS: b"<s>", EOS: b"</s>"}.get(token, bytes([token % 256]))

    def pieces(self) -> list[bytes]:
        return [self.piece(token) for token in range(self.n_tokens)]

    def is_control(self, token: int) -> bool:
        return token >= 256

    def is_end(self, token: int) -> bool:
        self.asked.append(("is_end", token))
        return token == EOS

    def close(self) -> None:
        self.closed = True


def test_a_text_begins_with_the_token_that_begins_a_sequence_once() -> None:
    tokenizer = Tokenizer(Bytes())
    assert tokenizer.encode("Hi") == [BOS, *b"Hi"]
    assert tokenizer.encode("<s>Hi") == [BOS, *b"Hi"]
    assert Tokenizer(Bytes(add_bos=False)).encode("Hi") == [*b"Hi"]
    assert Tokenizer(Bytes(bos=None)).encode("<s>Hi") == [BOS, BOS, *b"Hi"]  # nothing calls <s> the beginning
    assert tokenizer.encode("") == [BOS]


def test_text_and_back() -> None:
    tokenizer = Tokenizer(Bytes())
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "<s>Grüße"
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.n_tokens == 258


def test_special_texts_for_templates() -> None:
    assert (Tokenizer(Bytes()).bos_text, Tokenizer(Bytes()).eos_text) == ("<s>", "</s>")
    vocabulary = Bytes(bos=None)
    vocabulary.eos = None
    assert (Tokenizer(vocabulary).bos_text, Tokenizer(vocabulary).eos_text) == ("", "")


def test_a_vocabulary_is_asked_once_for_each_token() -> None:
    vocabulary = Bytes()
    tokenizer = Tokenizer(vocabulary)
    for _ in range(3):
        assert tokenizer.piece(65) == b"A"
        assert not tokenizer.is_end(65)
        assert tokenizer.is_end(EOS)
    assert vocabulary.asked == [("piece", 65), ("is_end", 65), ("is_end", EOS)]


@pytest.mark.parametrize("token", [-1, 258, 1 << 40])
def test_a_number_that_is_no_token_never_reaches_the_vocabulary(token: int) -> None:
    """llama.cpp looks it up without a check; a model may have more logits than its vocabulary has tokens."""
    vocabulary = Bytes()
    tokenizer = Tokenizer(vocabulary)
    with pytest.raises(OptionError, match=f"there is no token {token}: the vocabulary goes from 0 to 257"):
        tokenizer.piece(token)
    with pytest.raises(OptionError, match="there is no token"):
        tokenizer.is_end(token)
    with pytest.raises(OptionError, match="goes from 0 to 257"):
        tokenizer.decode([65, token])
    assert vocabulary.asked in ([], [("piece", 65)])


def test_all_tokens_at_once() -> None:
    vocabulary = Bytes()
    tokenizer = Tokenizer(vocabulary)
    assert tokenizer.pieces() == [*(bytes([b]) for b in range(256)), b"<s>", b"</s>"]
    asked = len(vocabulary.asked)
    assert tokenizer.pieces() is tokenizer.pieces()
    assert len(vocabulary.asked) == asked
    assert tokenizer.ends == {EOS}
    assert tokenizer.control == {BOS, EOS}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\ud83db", "a\ufffdb"),
        ("\ude00", "\ufffd"),
        ("\ud83d\ude00", "\ufffd\ufffd"),
        ("é🙂", "é🙂"),
        ("", ""),
    ],
)
def test_half_a_character_becomes_the_mark_of_what_is_none(text: str, wanted: str) -> None:
    assert whole(text) == wanted
    assert Tokenizer(Bytes()).decode(Tokenizer(Bytes()).encode(text)) == "<s>" + wanted


def test_it_closes_its_vocabulary() -> None:
    vocabulary = Bytes()
    known: Vocabulary = vocabulary
    Tokenizer(known).close()
    assert vocabulary.closed
