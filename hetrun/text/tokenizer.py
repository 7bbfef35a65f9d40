"""Text to tokens and back, over a vocabulary that another module understands."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, cast

from hetrun.errors import OptionError
from hetrun.loader.formats.fim_tokens import FimTokens
from hetrun.system import entry_points
from hetrun.text.encode_cache import LEAST, RecentTexts

if TYPE_CHECKING:  # numpy comes with it
    from collections.abc import Callable

    from hetrun.loader.source import ModelSource, Vocabulary

_HALF = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A vocabulary with the pieces it was asked for kept at hand."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._recent = RecentTexts(self.piece) if vocabulary.cuts_at_spaces else None

    @property
    def n_tokens(self) -> int:
        """Tokens in the vocabulary."""
        return self._vocabulary.n_tokens

    @property
    def cuts_at_spaces(self) -> bool:
        """Whether a token ends before each space between two ASCII letters, whatever follows."""
        return self._vocabulary.cuts_at_spaces

    @property
    def bos(self) -> int | None:
        """The token that begins a sequence."""
        return self._vocabulary.bos

    @property
    def eos(self) -> int | None:
        """The token that ends one."""
        return self._vocabulary.eos

    @property
    def add_bos(self) -> bool:
        """Whether the model wants a sequence to begin with its token."""
        return self._vocabulary.add_bos

    @property
    def fim(self) -> FimTokens:
        """The tokens with which the model fills in the middle; a plugin's vocabulary need not name them."""
        found: FimTokens = getattr(self._vocabulary, "fim", FimTokens())
        return found

    @cached_property
    def bos_text(self) -> str:
        """How the beginning of a sequence is written in a template."""
        bos = self._vocabulary.bos
        return "" if bos is None else self.piece(bos).decode("utf-8", "replace")

    @cached_property
    def eos_text(self) -> str:
        """How the end of a sequence is written in a template."""
        eos = self._vocabulary.eos
        return "" if eos is None else self.piece(eos).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, special ones parsed.

        The first is the one that begins a sequence, where the model wants that; a text may say it itself.
        """
        says_it = bool(self.bos_text) and text.startswith(self.bos_text)
        text = whole(text)
        if self._recent is None or len(text) < LEAST:
            return self._vocabulary.tokenize(text, add_special=not says_it, parse_special=True)
        raw = text.encode()
        tokens, at = self._recent.beginning(raw)
        rest = raw[at:].decode() if at else text
        tokens += self._vocabulary.tokenize(rest, add_special=not (says_it or at), parse_special=True)
        self._recent.add(raw, tokens)
        return tokens

    def encode_as(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The same as it is wished: what begins a sequence added or not, special tokens parsed or not."""
        says_it = parse_special and bool(self.bos_text) and text.startswith(self.bos_text)
        return self._vocabulary.tokenize(whole(text), add_special and not says_it, parse_special)

    def encode_plain(self, text: str) -> list[int]:
        """The tokens of a text as it stands: nothing added, nothing special in it."""
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        return b"".join(self.piece(t) for t in tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""
        if token not in self._pieces:
            self._check(token)
            self._pieces[token] = self._vocabulary.piece(token)
        return self._pieces[token]

    def pieces(self) -> list[bytes]:
        """The bytes of every token, in order; tens of milliseconds the first time."""
        return self._all_pieces

    @cached_property
    def _all_pieces(self) -> list[bytes]:
        return self._vocabulary.pieces()

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens with which the model has finished."""
        return frozenset(filter(self._vocabulary.is_end, range(self.n_tokens)))

    @cached_property
    def control(self) -> frozenset[int]:
        """The tokens that are no text."""
        return frozenset(filter(self._vocabulary.is_control, range(self.n_tokens)))

    def is_end(self, token: int) -> bool:
        """Whether the model has finished with this token."""
        if token not in self._ends:
            self._check(token)
            self._ends[token] = self._vocabulary.is_end(token)
        return self._ends[token]

    def close(self) -> None:
        """Give the vocabulary back."""
        self._vocabulary.close()

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise OptionError(f"there is no token {token}: the vocabulary goes from 0 to {self.n_tokens - 1}")


def whole(text: str) -> str:
    """Half a character (a surrogate without its other half) cannot be passed on: U+FFFD stands for it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF.sub("\N{REPLACEMENT CHARACTER}", text)
    return text


def open_vocabulary(source: ModelSource) -> Vocabulary | None:
    """The model's vocabulary; None where it has none, or where nothing is installed that could read it."""
    opener = entry_points.named("vocabularies", source.vocabulary)
    return cast("Callable[[ModelSource], Vocabulary]", opener)(source) if opener else None
