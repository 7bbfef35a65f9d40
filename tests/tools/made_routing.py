"""What makes a synthetic mixture choose its experts as a trained one does.

With gaussian weights alone every token chooses experts as good as by lot, and a cache of experts is worth
nothing. Here embeddings consist of a direction that all share, of the centre of a cluster of tokens, and of
noise; they are large beside what the layers add, so that much of a choice depends on the token, and some on
what stood before it. Each layer's router likes some experts more than others (the shared direction), has
experts of its own for each cluster, and answers to all else at random. The output has a matrix of its own,
which makes tokens about as frequent as words are: with the embeddings in its place, as large as they are, a
model would say the same token for ever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

CLUSTERS = 48
NEIGHBOURS = 16  # tokens with numbers side by side, about alike in frequency, that share a cluster
# Parts of an embedding, whose squares make one: what all share, the cluster's, the token's own.
SHARED, CLUSTER = 0.5, 0.5
OWN = math.sqrt(1 - SHARED**2 - CLUSTER**2)
# Deviations of a router's scores: between experts, between clusters, and by all the rest.
POPULARITY, SPECIALITY, CHANCE = 0.3, 0.45, 0.9
FEW = 1 / 32  # of the experts are used where that much popularity is right; where more are, it makes less
CLEAR = 2.0  # what a router's scores are multiplied by: it decides by a few
# Size of an embedding's elements, and about what half a layer adds to them. The same for any number of
# layers, so that choices can be guessed one layer ahead as well in a short model as in a deep one.
SIZE, ADDED = 4.0, 0.45
CALM_SIZE = 2.4  # of a model whose attention adds less
LOGITS = 2.5  # deviation of what depends on the text
NEVER = -20.0  # logit of tokens that are never said
COMMON = 3.0  # added to a token's rank: the most frequent one is 3 % of a text
LETTERS = 1000  # rank of single characters
PIECE = 4096  # rows


@dataclass(frozen=True)
class Tokens:
    """The vocabulary, as far as routing wants to know it."""

    texts: Sequence[str]
    types: Sequence[int]

    @functools.cached_property
    def log_frequencies(self) -> F32:
        """About as Zipf says: a merge that was found early is frequent; marks and bytes are never said."""
        found = np.full(len(self.texts), NEVER, np.float32)
        words = [i for i, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
                 if kind == 1 and len(text) > 1]  # fmt: skip
        letters = [i for i, text in enumerate(self.texts) if len(text) == 1 and text.isascii()]
        found[words] = -np.log(np.arange(len(words), dtype=np.float32) + COMMON)
        found[letters] = -math.log(LETTERS)
        return found


@dataclass(frozen=True)
class Routing:
    """Embeddings, routers and the output matrix of one model."""

    seed: int
    width: int
    layers: int
    experts: int
    used: int
    size: float  # of an embedding's elements
    tokens: Tokens

    def _rng(self, *what: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, 0x70C7, *what))

    @functools.cached_property
    def shared(self) -> F32:
        """The direction that all embeddings share."""
        return self._rng(0).standard_normal(self.width, dtype=np.float32)

    @functools.cached_property
    def centres(self) -> F32:
        return self._rng(1).standard_normal((CLUSTERS, self.width), dtype=np.float32)

    def clusters(self, first: int, rows: int) -> NDArray[np.intp]:
        """Which cluster each of these tokens belongs to."""
        ids = np.arange(first, first + rows) // NEIGHBOURS
        return self._rng(2).integers(CLUSTERS, size=int(ids[-1]) + 1)[ids]

    def embeddings(self, first: int, rows: int) -> F32:
        own = self._rng(3, first).standard_normal((rows, self.width), dtype=np.float32)
        own *= OWN
        own += np.float32(CLUSTER) * self.centres[self.clusters(first, rows)]
        own += np.float32(SHARED) * self.shared
        own *= np.float32(self.size)
        return own

    def outputs(self, first: int, rows: int) -> F32:
        """Rows of the output matrix; behind the last token all are of tokens that are never said."""
        known = self.tokens.log_frequencies[first : first + rows]
        likely = np.full(rows, NEVER, np.float32)
        likely[: len(known)] = known
        # What the layers add takes its share of the normalised stream, too.
        seen = SHARED / math.sqrt(1 + 2 * self.layers * (ADDED / self.size) ** 2)
        rest = self._rng(4, first).standard_normal((rows, self.width), dtype=np.float32)
        rest *= np.float32(LOGITS / math.sqrt(self.width))
        rest += np.outer(likely / np.float32(seen * self.width), self.shared)
        return rest

    def router(self, layer: int) -> F32:
        rng, n = self._rng(5, layer), self.width
        liked, special, other = (
            rng.standard_normal((self.experts, k), dtype=np.float32) for k in (1, CLUSTERS, n)
        )
        # What is by chance says nothing of the shared direction: that alone makes experts popular.
        along = self.shared / np.linalg.norm(self.shared)
        other -= np.outer(other @ along, along)
        popularity = POPULARITY * math.cbrt(self.used / self.experts / FEW)
        out = popularity / SHARED / n * liked * self.shared
        out += SPECIALITY / CLUSTER / n * special @ self.centres
        out += CHANCE / math.sqrt(n) * other
        return (CLEAR * out).astype(np.float32)

    def table(self, name: str, rows: int, pack: Callable[[F32], U8]) -> Iterator[U8]:
        """`token_embd` or `output` packed, some rows at a time. Tokens that only fill a large vocabulary
        share some rows: packing takes its time."""
        make = self.embeddings if name == "token_embd" else self.outputs
        known = min(rows, -(-len(self.tokens.texts) // PIECE) * PIECE)
        for first in range(0, known, PIECE):
            yield pack(make(first, min(PIECE, known - first)))
        if known < rows:
            filling = pack(make(known, PIECE))
            for first in range(known, rows, PIECE):
                yield filling[: rows - first]
