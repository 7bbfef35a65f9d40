"""Which weights are mapped (mapped_weights.py) where not all fit into memory: the experts of mixtures, of
which a pass needs few, and then whatever else can be used as it lies in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp import fusion
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary
from hetrun.backends.llamacpp.kernels.paging import pager
from hetrun.backends.llamacpp.kernels.sigbus_guard import guard
from hetrun.backends.llamacpp.mapped_weights import MappedPages
from hetrun.graph import Op, Weight

Bytes = Callable[[Sequence[WeightUse]], int]


class MappedWeights:
    """All of them; see hetrun.backend.weight_streaming.Mappable."""

    def __init__(self, lib: GgmlLibrary, resident_bytes: Bytes) -> None:
        self._lib = lib
        self._resident_bytes = resident_bytes
        self._chosen: frozenset[Weight] = frozenset()
        self._room = 0
        self.files: MappedPages | None = None

    def choose(self, ops: Sequence[Op], room: int) -> tuple[Weight, ...]:
        """Experts first, then other products, the largest first, until the others fit."""
        uses = fusion.wants(ops)
        # A table is in memory anyway, also where it is the head as well.
        tables = {use.weight for use in uses if use.use == "lookup"}
        candidates = [u for u in uses if u.weight not in tables and MappedPages.refusal(u) is None]
        candidates.sort(key=lambda u: (u.use != "experts", -u.weight.nbytes))
        left, chosen = list(uses), list[Weight]()
        # All experts, or none: a pass takes few of each layer's.
        for weights in _groups(candidates):
            if self._resident_bytes(left) + self.least(ops, chosen) <= room:
                break
            chosen += weights
            left = [use for use in left if use.weight not in weights]
        return tuple(chosen) if self._resident_bytes(left) + self.least(ops, chosen) <= room else ()

    def least(self, ops: Sequence[Op], weights: Sequence[Weight]) -> int:
        """What one op reads of them has to be there at once."""
        found = set(weights)
        return MappedPages.least(
            [use for use in fusion.uses(item) if use.weight in found] for item in fusion.fuse(ops)
        )

    def map(self, weights: Sequence[Weight], room: int) -> None:
        """From now on these are mapped when they are wanted."""
        self.files = MappedPages(self._lib, pager(), guard())
        self._chosen, self._room = frozenset(weights), room

    def hold(self, use: WeightUse) -> MappedPages | None:
        """Who holds a weight, if it is one of these."""
        return self.files if use.weight in self._chosen and use.use in ("experts", "product") else None

    def arm(self) -> None:
        """Before a run."""
        if self.files:
            if self.files.room != self._room:
                self.files.room = self._room
            self.files.arm()

    def check(self) -> None:
        """After a run: whether its results count."""
        if self.files:
            self.files.check()
            if not self.files.pager:
                self.files.trim()

    @property
    def bytes_read(self) -> int:
        """What came from the files so far."""
        return self.files.bytes_read if self.files else 0

    @property
    def resident_bytes(self) -> int:
        """What mapped pages take in memory, at most."""
        return self.files.resident_bytes if self.files else 0

    def close(self) -> None:
        """Give everything back."""
        if self.files:
            self.files.close()


def _groups(candidates: Sequence[WeightUse]) -> Iterator[list[Weight]]:
    """What is mapped together."""
    if experts := [use.weight for use in candidates if use.use == "experts"]:
        yield experts
    for use in candidates:
        if use.use != "experts":
            yield [use.weight]
