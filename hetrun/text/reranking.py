"""How a reranker judges a document: the prompt that asks for yes or no, and what its last hidden state says.

Qwen3-Reranker is a model that writes text. Its makers ask it whether a document meets the requirements of a
query, and compare the logits of yes and no; no other row of the output matrix is needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Weight
from hetrun.loader.rerankers import HEAD, TEMPLATE, has_head, is_published
from hetrun.loader.source import ModelSource
from hetrun.loader.table_rows import TableRows
from hetrun.text.tokenizer import Tokenizer

F32 = NDArray[np.float32]
Encode = Callable[[str, bool], list[int]]  # a text, and whether special tokens in it are meant

YES, NO = "yes", "no"
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    "query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"(\{query\}|\{document\})")


@dataclass(frozen=True, slots=True)
class Reranker:
    """What there is of a reranker besides the model that computes hidden states."""

    template: RerankTemplate
    direction: F32  # the row of yes less that of no
    bias: float = 0.0

    def log_odds(self, hidden: F32) -> bytes:
        """How much more likely yes is than no, after the last token's hidden state, as it crosses pipes."""
        return struct.pack("<f", float(hidden.astype(np.float64) @ self.direction) + self.bias)


@dataclass(frozen=True, slots=True)
class RerankTemplate:
    """A prompt, as text around the places of query and document.

    `head` and `tail` are marks of the template, in which special tokens are meant. What lies between is
    encoded as one text, because tokens may reach across the places; nothing in it is a special token,
    so that no document can end its own part of the prompt.
    """

    head: str
    middle: tuple[str, ...]  # texts and the names of places
    tail: str

    def text(self, query: str, document: str) -> str:
        """The part with query and document."""
        filled = {"{query}": query, "{document}": document}
        return "".join(filled.get(part, part) for part in self.middle)

    def tokens(self, query: str, document: str, encode: Encode) -> list[int]:
        """The whole prompt."""
        return [
            *(encode(self.head, True) if self.head else []),
            *encode(self.text(query, document), False),
            *(encode(self.tail, True) if self.tail else []),
        ]


def parsed(template: str, specials: Sequence[str]) -> RerankTemplate:
    """A template cut at its special tokens: the last one before the places, and the first one behind them."""
    parts = [part for part in PLACES.split(template) if part]
    first, last = parts[0], parts[-1]
    marks = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")
    head, tail = "", ""
    if not PLACES.fullmatch(first):
        at = max((found.end() for found in marks.finditer(first)), default=0)
        head, parts[0] = first[:at], first[at:]
    if not PLACES.fullmatch(last):
        found = marks.search(last)
        at = found.start() if found else len(last)
        parts[-1], tail = last[:at], last[at:]
    return RerankTemplate(head, tuple(part for part in parts if part), tail)


def reranker_of(source: ModelSource, tokenizer: Tokenizer | None) -> Reranker | None:
    """How the model judges; None: it is no reranker, or lacks the words. Called on the engine thread."""
    if tokenizer is None or not (has_head(source) or is_published(source)):
        return None
    text = source.chat_templates.get(TEMPLATE, QWEN3)
    if not all(place in text for place in ("{query}", "{document}")):
        text = QWEN3
    specials = [tokenizer.piece(token).decode("utf-8", "replace") for token in tokenizer.control]
    template = parsed(text, [special for special in specials if special])
    if has_head(source):
        return _with_head(source, template)
    words = [tokenizer.encode_plain(word) for word in (YES, NO)]
    table = source.find("output.weight") or source.find("token_embd.weight")
    if table is None or any(len(word) != 1 for word in words):
        return None
    yes, no = _rows(table, [word[0] for word in words])
    return Reranker(template, yes - no)


def _with_head(source: ModelSource, template: RerankTemplate) -> Reranker:
    """By a matrix of its own. Converters put yes first; a single row is already the difference."""
    head, bias = source.find(f"{HEAD}.weight"), source.find(f"{HEAD}.bias")
    assert head is not None
    signs = np.array([1.0, -1.0][: head.shape[0]], np.float32)
    direction = signs @ _rows(head, range(head.shape[0]))
    return Reranker(template, direction, float(signs @ _rows(bias, [0])[0]) if bias else 0.0)


def _rows(table: Weight, numbers: Sequence[int]) -> F32:
    rows = TableRows(table)
    try:
        return rows(numbers)
    finally:
        rows.close()
