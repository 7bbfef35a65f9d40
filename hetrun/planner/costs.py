"""What a pass takes on each backend, from what was measured on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetrun.backend import Backend, Segment
from hetrun.forecast import Forecast, Work
from hetrun.forms import Forms, Unit, coarse
from hetrun.planner.placing import Chain

CALL = "call_s"  # the fact: what one segment more costs
MOST_WRONG = 2.0  # a segment that takes so many times the sum of its units was disturbed


class Costs:
    """Times of a graph's units and segments."""

    def __init__(self, units: Sequence[Unit], backends: Mapping[str, Backend], forecast: Forecast) -> None:
        self.units = units
        self._forecast = forecast
        self._numbers = {unit.scope: i for i, unit in enumerate(units)}
        able: dict[tuple[str, str], bool] = {}
        for unit in units:
            for name, backend in backends.items():
                if (unit.form, name) not in able:
                    able[unit.form, name] = all(backend.supports(op) for op in unit.ops)
        self.able = tuple(frozenset(b for b in backends if able[unit.form, b]) for unit in units)
        self._forms = Forms()

    def seconds(self, unit: int, backend: str, threads: int, tokens: int, depth: float) -> float | None:
        """One unit as a segment of its own; None if it was never measured."""
        return self._forecast.seconds(Work(self.units[unit].form, backend, threads), tokens, depth)

    def call(self, backend: str) -> float:
        """What a segment costs besides its work."""
        return self._forecast.fact(CALL, backend) or 0.0

    def chain(self, names: Iterable[str], threads: int, tokens: int, depth: float) -> Chain:
        """All units on those of the backends that can run them and were measured."""
        names = list(names)
        known: dict[tuple[str, str], float | None] = {}
        times: list[dict[str, float]] = []
        for i, unit in enumerate(self.units):
            row = {}
            for b in names:
                if b not in self.able[i]:
                    continue
                if (unit.form, b) not in known:
                    known[unit.form, b] = self.seconds(i, b, threads, tokens, depth)
                if (found := known[unit.form, b]) is not None:
                    row[b] = found
            times.append(row)
        return Chain(tuple(times), {b: self.call(b) for b in names})

    def scaled(self, chain: Chain, factors: Mapping[str, float]) -> Chain:
        """The same with each backend's times corrected."""
        times = tuple({b: t * factors.get(b, 1.0) for b, t in row.items()} for row in chain.times)
        return Chain(times, {b: t * factors.get(b, 1.0) for b, t in chain.call.items()})

    def members(self, segment: Segment) -> tuple[int, ...]:
        """The units of a segment."""
        return tuple(dict.fromkeys(self._numbers[coarse(op.scope)] for op in segment.ops))

    def form(self, segment: Segment) -> str:
        """A segment's form."""
        return self._forms.of(segment.ops)

    def summed(self, segment: Segment, threads: int, tokens: int, depth: float) -> float | None:
        """A segment as the sum of its units, which share one call."""
        found = [self.seconds(i, segment.backend, threads, tokens, depth) for i in self.members(segment)]
        times = [t for t in found if t is not None]
        if len(times) < len(found):
            return None
        return sum(times) - (len(times) - 1) * self.call(segment.backend)

    def predicted(
        self, segment: Segment, threads: int, tokens: int, depth: float, several: bool = False
    ) -> float | None:
        """A segment: as it was measured itself, or else as the sum of its units."""
        own = self.measured(segment, threads, tokens, depth, several)
        return own if own is not None else self.summed(segment, threads, tokens, depth)

    def measured(
        self, segment: Segment, threads: int, tokens: int, depth: float, several: bool = False
    ) -> float | None:
        """A segment, if runs of it were measured."""
        work = Work(self.form(segment), segment.backend, threads, several)
        return self._forecast.seconds(work, tokens, depth)

    def factors(
        self, segments: Iterable[Segment], threads: int, tokens: int, depth: float
    ) -> dict[str, float]:
        """For each backend, what its longest segment takes against the sum of the units in it.

        Units are measured one by one; together they share calls and caches, and real runs are the judge.
        """
        found: dict[str, tuple[int, float]] = {}
        for s in segments:
            n = len(self.members(s))
            if n < 2 or n <= found.get(s.backend, (0, 0.0))[0]:
                continue
            own = self._forecast.seconds(Work(self.form(s), s.backend, threads), tokens, depth)
            total = self.summed(s, threads, tokens, depth)
            if own and total:
                found[s.backend] = n, min(max(own / total, 1 / MOST_WRONG), MOST_WRONG)
        return {b: factor for b, (_, factor) in found.items()}
