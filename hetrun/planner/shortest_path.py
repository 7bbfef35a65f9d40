"""Where the units of one pass run best, exactly: they follow each other, so a shortest path decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Times = Mapping[str, float]  # backend -> seconds of one unit there, as a segment of its own


@dataclass(frozen=True, slots=True)
class Chain:
    """Units one after the other. Neighbours on one backend are one segment, which saves a call."""

    times: tuple[Times, ...]
    call: Times  # backend -> seconds of a call, which a unit saves that joins its neighbour's segment

    def seconds(self, backends: Sequence[str]) -> float:
        """What a placement takes."""
        total = sum(times[b] for times, b in zip(self.times, backends, strict=True))
        joins = (a for a, b in pairwise(backends) if a == b)
        return total - sum(self.call.get(b, 0.0) for b in joins)

    def best(self) -> tuple[str, ...]:
        """The placement that takes least time; among equals the one that changes backends least."""
        if not self.times:
            return ()
        ways = {b: PartialPath(t, 0, (b,)) for b, t in self.times[0].items()}
        for times in self.times[1:]:
            ways = {
                b: min(self._step(way, b, t) for way in ways.values())
                for b, t in times.items()
            }  # fmt: skip
        return min(ways.values()).backends

    def _step(self, way: PartialPath, backend: str, seconds: float) -> PartialPath:
        stays = way.backends[-1] == backend
        saved = self.call.get(backend, 0.0) if stays else 0.0
        return PartialPath(way.seconds + seconds - saved, way.changes + (not stays), (*way.backends, backend))

    def taking_turns(self, seconds: float) -> Chain:
        """The same where every segment costs so much more: the price of the change to its backend."""
        times = tuple({b: t + seconds for b, t in row.items()} for row in self.times)
        backends = {b for row in self.times for b in row}
        return Chain(times, {b: self.call.get(b, 0.0) + seconds for b in backends})

    def only(self, allowed: Sequence[frozenset[str]]) -> Chain:
        """The same where each unit may run on some backends only."""
        times = (
            {b: t for b, t in times.items() if b in some}
            for times, some in zip(self.times, allowed, strict=True)
        )
        return Chain(tuple(times), self.call)


@dataclass(frozen=True, slots=True, order=True)
class PartialPath:
    """A placement of the first units."""

    seconds: float
    changes: int
    backends: tuple[str, ...]
