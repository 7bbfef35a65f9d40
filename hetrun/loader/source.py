"""What is known of a model before it runs, in GGUF's words, whether it is a file or a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from hetrun.graph import ModelMeta, Weight, WeightSource
from hetrun.graph.pooling import Pooling
from hetrun.system.file_identity import Stamp

# llama.cpp's numbers; 0 says nothing, and 4 is a model that ranks texts (`rerankers`).
POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
LEAST_TEMPERATURE = 1e-6  # of those above 0, as for requests


class ModelSource(ModelMeta, WeightSource, Protocol):
    """All that is known of a model before it runs: settings and weights in GGUF's words, and its texts."""

    @property
    def architecture(self) -> str:
        """As GGUF names it."""
        ...

    @property
    def name(self) -> str:
        """What people call the model."""
        ...

    @property
    def vocabulary(self) -> str:
        """Which reader of vocabularies understands its tokenizer, by registered name; "" if it has none."""
        ...

    @property
    def vocabulary_entries(self) -> int:
        """Its tokens and merges, about: what a vocabulary takes in memory grows with them."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The templates that it was trained with, by name; most models have one, named default."""
        ...

    @property
    def chat_template_place(self) -> str:
        """Where they lie, for people."""
        ...

    @property
    def temperature(self) -> float | None:
        """The temperature that its makers recommend."""
        ...

    @property
    def pooling(self) -> Pooling:
        """What its embeddings are made of; the mean where nothing is said."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        ...

    @property
    def stamps(self) -> Mapping[str, Stamp]:
        """The files with its weights by path, as they were when their headers were read."""
        ...

    def weights(self) -> Iterator[Weight]:
        """Every tensor as a matrix, in the order of the files."""
        ...


def recommended(temperature: float) -> float | None:
    """A recommended temperature that can be followed: below 0 it is none, and next to 0 it is 0."""
    if temperature < 0:
        return None
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


class Vocabulary(Protocol):
    """A model's own tokens. Calls are native: the engine thread makes them."""

    n_tokens: int
    bos: int | None
    eos: int | None
    add_bos: bool
    cuts_at_spaces: bool  # before each one between two ASCII letters a token ends, whatever follows

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """The tokens of a text that UTF-8 can write."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; special tokens as they are written in templates."""
        ...

    def pieces(self) -> list[bytes]:
        """`piece` of every token."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether a model says with this token that it has finished."""
        ...

    def is_control(self, token: int) -> bool:
        """Whether this token is no text: a mark of a template, an unknown text, an unused row."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...
