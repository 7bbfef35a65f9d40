"""The prefix cache: beginnings that were computed already are not computed again.

A sequence that has finished stays in the KV cache as an entry. A new one whose tokens begin like an entry's,
or like those of a sequence that runs now, begins as a fork of it, which shares its rows instead of copying
them; or it is that entry, where it goes on almost where that ended. The least recently used entry goes first.

How the engine uses it; all of it on its own thread:

- A request that gets a place: `seq, n = begin(tokens)`. The sequence holds the first n tokens already, so
  its `computed` begins at n, which is also what it reports as cached. n is less than len(tokens): logits
  come from computing a token. Where every row of the prompt is wanted (log-probabilities of the prompt),
  `begin(tokens, reuse=False)`: others may begin with its rows, but it computes them all.
- `progress(seq, computed)` after each step in which it had a part. The model's own length says less: in the
  middle of a pass that stands aside it counts rows that are not written yet.
- Every sequence that `begin` gave ends with exactly one of `keep(seq, tokens)` and `free(seq)`: the first
  for what ended well or was cancelled (each row in the cache is a good one, a failed step leaves none), the
  second for one that gives up its rows while it waits for memory, and whatever is no use to anybody.
- A request that could get a place, but `soon(tokens, computing)`: hold it back. A prompt that runs now is
  about to compute what it would compute as well.
- Before a step, where memory is short: `while not model.fits(chunks) and prefixes.drop_one(): pass`.

With --deterministic a row has the same bits whatever runs beside, so that those of an entry are the
very bits that computing them again would give.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from hetrun.errors import BudgetError
from hetrun.memory.kv.radix_tree import Tokens, TokenTree

CACHED = 64  # entries
Spans = Sequence[tuple[int, int]]  # tokens a to b that are of use together, as those of a picture
LEAST = 16  # tokens: to compute fewer takes hardly longer than to fork
LITTLE = 16  # tokens at an entry's end that are computed again, if need be, rather than fork for their sake
WORTH = 64  # tokens for which a request waits until another one has computed them


def outside(n: int, spans: Spans) -> int:
    """As many of the first n tokens as end in no span."""
    return next((a for a, b in spans if a < n < b), n)


class Sequences(Protocol):
    """The part of a `Model` that holds sequences."""

    def alloc(self) -> int: ...
    def fork(self, seq: int, n: int | None = None) -> int: ...
    def truncate(self, seq: int, n: int) -> object: ...
    def free(self, seq: int) -> None: ...
    def length(self, seq: int) -> int: ...
    def shareable(self, seq: int, n: int) -> int: ...


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A sequence that is kept, and the tokens that it holds."""

    seq: int
    tokens: Tokens


class Prefixes:
    """Sequences that have finished, and the prompts of those that run."""

    def __init__(self, model: Sequences, most: int = CACHED, most_tokens: int | None = None) -> None:
        """At most `most` entries; with 0 beginnings are shared only with what runs. Together they hold at
        most `most_tokens` tokens, but for the last used, which may be longer; None: as many as find room."""
        self._model = model
        self._most, self._most_tokens = most, most_tokens
        self._tree = TokenTree()  # entries with all that they hold, running ones with their prompts
        self._used: dict[int, int] = {}  # of each entry: when it was used last
        self._running: dict[int, int] = {}  # how much of each is computed
        self._clock = count()

    @property
    def n_entries(self) -> int:
        """Sequences that are kept."""
        return len(self._used)

    @property
    def n_running(self) -> int:
        """Sequences that `begin` gave and that have not ended."""
        return len(self._running)

    @property
    def n_tokens(self) -> int:
        """Tokens of all entries; a beginning that several share counts for each."""
        return sum(len(self._tree.tokens(seq)) for seq in self._used)

    def entries(self) -> list[PrefixEntry]:
        """What is kept, the last used first."""
        order = sorted(self._used, key=self._used.__getitem__, reverse=True)
        return [PrefixEntry(seq, self._tree.tokens(seq)) for seq in order]

    def holding(self, tokens: Tokens) -> tuple[int, int]:
        """The entry that can give most of these tokens' beginning, and how much of it; 0: there is none."""
        best, length = -1, 0
        for seq, shared in self._tree.shared(tokens).items():
            if seq in self._used and (n := self._model.shareable(seq, shared)) > length:
                best, length = seq, n
        return best, length

    def forget(self, tokens: Tokens) -> None:
        """Free the entries that begin with all of these tokens."""
        found = self._tree.shared(tokens).items() if len(tokens) else ()
        for seq in [seq for seq, shared in found if seq in self._used and shared == len(tokens)]:
            self._drop(seq)

    # --- sequences that run

    def begin(self, tokens: Sequence[int] | Tokens, reuse: bool = True, spans: Spans = ()) -> tuple[int, int]:
        """A new sequence for these tokens, and how many of them it holds already: never a part of a span.

        Where the model has no place left, entries go until it has; BudgetError if that does not help.
        """
        wanted = np.array(tokens, np.int32)
        seq, n = self._place(*(self._best(wanted, spans) if reuse else (None, 0)))
        with self._given_back(seq):
            self._tree.add(seq, wanted)
        self._running[seq] = n
        return seq, n

    def known(self, tokens: Sequence[int] | Tokens) -> int:
        """How much of these tokens' beginning some sequence holds, whether or not it can be shared there."""
        return max((n for n, _, _ in self._reaches(np.asarray(tokens, np.int32))), default=0)

    def progress(self, seq: int, computed: int) -> None:
        """This many tokens of a sequence are computed now."""
        if seq in self._running:
            self._running[seq] = computed

    def soon(self, tokens: Sequence[int] | Tokens, computing: Collection[int]) -> bool:
        """Whether waiting pays: one of these sequences, which compute their prompts now, is about to hold
        at least `WORTH` more of these tokens' beginning than can be had yet.

        It becomes false by itself when that one has come so far, or has ended. Asked again and again, so give
        an int32 array.
        """
        wanted = np.asarray(tokens, np.int32)
        found, most = self._tree.shared(wanted), len(wanted) - 1
        later = min(max((found.get(seq, 0) for seq in computing), default=0), most)
        if later < WORTH:
            return False
        return later - max(min(shared, most, self._held(seq)) for seq, shared in found.items()) >= WORTH

    def alloc(self) -> int:
        """An empty sequence for something that is no request; the caller gives it back to the model."""
        return self._place(None, 0)[0]

    def free(self, seq: int) -> None:
        """A sequence has ended, and nothing of it is kept."""
        self._model.free(seq)
        self._leave(seq)

    # --- sequences that have ended

    def keep(self, seq: int, tokens: Sequence[int] | Tokens) -> None:
        """A sequence has ended: it becomes an entry, the last used, or is freed where it gives nothing new.

        `tokens` are those that it holds, or more: of an answer's last token there is mostly no row. It may
        also be one that `begin` did not give: then it is a gift. If this raises, the sequence is freed.
        """
        if seq in self._running:
            self._leave(seq)
        with self._given_back(seq):
            self._keep(seq, tokens)
        while self._most_tokens is not None and self.n_entries > 1 and self.n_tokens > self._most_tokens:
            self.drop_one()

    def _keep(self, seq: int, tokens: Sequence[int] | Tokens) -> None:
        n = self._model.length(seq)
        held = np.array(tokens[:n], np.int32)
        if len(held) < n:
            raise ValueError(f"sequence {seq} holds {n} tokens, but only {len(held)} are known")
        if n < LEAST or not self._most or self._is_held(held):
            self._model.free(seq)
            return
        for other in self._beginnings(seq, held):
            self._drop(other)
        while len(self._used) >= self._most:
            self.drop_one()
        self._tree.add(seq, held)
        self._used[seq] = next(self._clock)

    def drop_one(self) -> bool:
        """Free the entry that was not used for the longest time; False if there is none."""
        if not self._used:
            return False
        self._drop(min(self._used, key=self._used.__getitem__))
        return True

    def clear(self) -> None:
        """Free every entry."""
        while self.drop_one():
            pass

    # --- finding

    def _best(self, wanted: Tokens, spans: Spans) -> tuple[int | None, int]:
        """Who holds the longest beginning that a new sequence can share, and how long it is."""
        best: int | None = None
        length = LEAST - 1
        for n, _, seq in sorted(self._reaches(wanted), reverse=True):
            if n <= length:
                break
            if (shareable := self._shareable(seq, n, spans)) > length:
                best, length = seq, shareable
        return (None, 0) if best is None else (best, length)

    def _shareable(self, seq: int, n: int, spans: Spans) -> int:
        """How many of a sequence's first n tokens a new one could begin with, without a part of a span."""
        while (found := self._model.shareable(seq, n)) and (n := outside(found, spans)) < found:
            pass
        return found

    def _reaches(self, wanted: Tokens) -> Iterator[tuple[int, int, int]]:
        """How much of the beginning each one holds, its last use (-1: it runs), and who it is."""
        most = len(wanted) - 1
        for seq, shared in self._tree.shared(wanted).items():
            yield min(shared, most, self._held(seq)), self._used.get(seq, -1), seq

    def _held(self, seq: int) -> int:
        """How many tokens of a sequence are computed."""
        computed = self._running.get(seq)
        return len(self._tree.tokens(seq)) if computed is None else computed

    def _is_held(self, held: Tokens) -> bool:
        """Whether an entry begins with all of these tokens; it has been used then."""
        for seq, shared in self._tree.shared(held).items():
            if shared == len(held) and seq in self._used and self._gives(seq, shared):
                self._used[seq] = next(self._clock)
                return True
        return False

    def _beginnings(self, seq: int, held: Tokens) -> list[int]:
        """The entries that a sequence can stand for, because it begins with all of them."""
        return [
            other
            for other, shared in self._tree.shared(held).items()
            if other in self._used and shared == len(self._tree.tokens(other)) and self._gives(seq, shared)
        ]

    def _gives(self, seq: int, n: int) -> bool:
        """Whether others could begin with about n tokens of a sequence: windows may have moved on."""
        return self._model.shareable(seq, n) > n - LEAST

    # --- places

    def _place(self, source: int | None, n: int) -> tuple[int, int]:
        """A sequence with n tokens of another, or an empty one."""
        if source is not None and source in self._used:
            if self._model.length(source) - n <= LITTLE:
                return self._take(source, n), n
            self._used[source] = next(self._clock)
        while True:
            try:
                return (self._model.alloc(), 0) if source is None else (self._model.fork(source, n), n)
            except BudgetError:
                if any(seq != source for seq in self._used):
                    self.drop_one()  # never the source, which was used last
                elif source in self._used:
                    return self._take(source, n), n
                elif source is None:
                    raise
                else:
                    source, n = None, 0  # one that runs cannot be shared: an empty one may need less

    def _take(self, seq: int, n: int) -> int:
        """An entry itself, cut: no place is needed, and no time. It becomes an entry again."""
        del self._used[seq]
        self._tree.remove(seq)
        with self._given_back(seq):
            self._model.truncate(seq, n)
        return seq

    @contextmanager
    def _given_back(self, seq: int) -> Iterator[None]:
        """A sequence that nothing knows of yet goes back to the model, if this fails."""
        try:
            yield
        except BaseException:
            self._model.free(seq)
            raise

    def _leave(self, seq: int) -> None:
        del self._running[seq]
        self._tree.remove(seq)

    def _drop(self, seq: int) -> None:
        self._model.free(seq)
        del self._used[seq]
        self._tree.remove(seq)
