"""A model whose weights stay where they are, while it runs: the books of what it takes, and how much of the
rest keys and values may have.

Who asks for more rows than that gets none, and waits (`KvCache.limit_bytes`): so what backends work in may
come to more than was planned, and the budget holds all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

from hetrun.memory import breakdown
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.ledger import Books, MemoryGrant
from hetrun.prefetch.mapped_weights import MappedPart

LOOK_S = 0.25  # between looks at what the kernel counts


class InMemory:
    """The books of a model that keeps its weights; all of it belongs to the engine's thread."""

    def __init__(
        self,
        books: Books,
        kv: KvCache,
        weights: Callable[[], int],
        copies: Callable[[], Mapping[str, int]],
        kv_of_all: Callable[[int], int],
        mapped: MappedPart | None,
    ) -> None:
        """`weights`: what they take, without those that are `mapped`; `copies`: what of that further copies
        take, by backend; `kv_of_all`: what rows may take of so much memory beside them."""
        self._books, self._kv = books, kv
        self._weights, self._copies, self._mapped = weights, copies, mapped
        self._kv_of_all = kv_of_all
        self._most = kv.limit_bytes or kv.least_bytes
        self._looked = 0.0

    def tend(self) -> None:
        """Between two passes: rows may take what is left, and no more than was planned."""
        if perf_counter() - self._looked < LOOK_S:
            return
        self._looked = perf_counter()
        self.look()
        self._share()

    def look(self) -> None:
        """Bring the books in line with what there is."""
        copies = self._copies()
        self._books.holds(breakdown.WEIGHTS, "anonymous", self._weights() - sum(copies.values()))
        for backend, nbytes in copies.items():
            self._books.holds(breakdown.copies_for(backend), "anonymous", nbytes)
        if mapped := self._mapped:
            self._books.grows(breakdown.MAPPED, "file-backed", mapped.mapping.resident_bytes, mapped.room)
        self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, self._limit)
        self._books.reconcile()

    def set_limit(self, granted: MemoryGrant) -> None:
        """Another budget from now on; BudgetError where what is in use needs more."""
        self.look()
        others = self._books.total - self._limit
        if (needed := others + self._kv.least_bytes) > granted.nbytes:
            mend = f"Restart with {granted.as_option}: then part of the weights is read from disk"
            raise granted.below_use(needed, mend)
        self._books.granted = granted
        self._most = max(self._kv.least_bytes, self._kv_of_all(granted.nbytes - others))
        self._share()

    @property
    def _limit(self) -> int:
        return self._kv.limit_bytes or 0

    def _share(self) -> None:
        limit = max(self._kv.least_bytes, min(self._most, self._limit + self._books.free))
        if limit != self._limit:
            self._kv.limit_bytes = limit
            self._books.grows(breakdown.KV, "shared", self._kv.held_bytes, self._limit)
