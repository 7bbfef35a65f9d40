"""What a pass takes on each backend, from what was measured on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, inf, log, log2, pow

from hetrun.backend import Backend, Segment
from hetrun.graph import Op
from hetrun.graph.identity_cache import IdentityCache
from hetrun.graph.signature import Forms, Unit, coarse, of_wanted_rows
from hetrun.planner.costmodel import OpWork, TimingBin, WorkTimes
from hetrun.planner.shortest_path import Chain

CALL = "call_s"  # the fact: what one segment more costs
MOST_WRONG = 2.0  # a segment that takes more than this many times the sum of its units was disturbed
MOST_SAVED = 0.5  # of the shortest unit
# Distances are in doublings of tokens.
NEAR = 0.6  # the same size, as far as a measurement goes
SURE = 5  # runs: a size measured so often is believed, whatever the sum of units says
NEAREST = 0.05  # keeps the weight of a size that was measured itself finite
ALONE = 0.1  # the weight of no correction at all
SHALLOW = 32.0  # below this, depth makes no difference
SHARED, SHARED_FEW = 0.9, 0.3  # powers of the threads, by which large passes and small ones become faster
FEW = 16  # tokens: up to here a pass is usually one token of each of several sequences, all of them wanted


class SegmentCosts:
    """Times of a graph's units and segments."""

    def __init__(
        self,
        units: Sequence[Unit],
        backends: Mapping[str, Backend],
        forecast: WorkTimes,
        threads: Sequence[int] = (),
    ) -> None:
        """`threads`: numbers of which one may stand for another that was not measured."""
        self.units = units
        self._forecast = forecast
        self._threads = tuple(threads)
        self._numbers = {unit.scope: i for i, unit in enumerate(units)}
        able: dict[tuple[str, str], bool] = {}
        for unit in units:
            for name, backend in backends.items():
                if (unit.form, name) not in able:
                    able[unit.form, name] = all(backend.supports(op) for op in unit.ops)
        self.able = tuple(frozenset(b for b in backends if able[unit.form, b]) for unit in units)
        self._forms = Forms()
        self._of_wanted = tuple(of_wanted_rows(unit.ops) for unit in units)
        self._asked: dict[tuple[str, str, int, int, float], float | None] = {}
        # By the identity of a segment's ops: equality costs as much as finding.
        self._members = IdentityCache[Sequence[Op], tuple[int, ...]]()
        self._kinds = IdentityCache[Sequence[Op], list[tuple[int, int]]]()

    def seconds(self, unit: int, backend: str, threads: int, tokens: int, depth: float) -> float | None:
        """One unit as a segment of its own; None if it was never measured."""
        if self._of_wanted[unit]:
            tokens, depth = _wanted(tokens)
        form = self.units[unit].form
        key = form, backend, threads, tokens, depth
        if key not in self._asked:
            work = OpWork(form, backend, threads)
            self._asked[key] = self._forecast.seconds(work, tokens, depth) or self._by_others(
                work, tokens, depth
            )
        return self._asked[key]

    def knows(self, threads: int) -> bool:
        """Whether much was measured with `threads` threads: all units but one or two, on one backend."""
        backends = {b for some in self.able for b in some}
        forms = {unit.form for unit in self.units}
        return any(
            2 * sum(self._forecast.knows(OpWork(form, b, threads)) for form in forms) > len(forms)
            for b in backends
        )

    def _by_others(self, work: OpWork, tokens: int, depth: float) -> float | None:
        """With a number of threads that was not measured: from one that was."""
        for n in sorted(self._threads, key=lambda n: abs(n - work.threads)):
            if n != work.threads and (
                found := self._forecast.seconds(replace(work, threads=n), tokens, depth)
            ):
                return found * pow(n / work.threads, SHARED if tokens > FEW else SHARED_FEW)
        return None

    def fresh(self) -> None:
        """Ask the forecast again: while a plan is made, the same times are wanted many times over."""
        self._asked.clear()

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
        return Chain(tuple(times), {b: self._saved(b, (t[b] for t in times if b in t)) for b in names})

    def _saved(self, backend: str, times: Iterable[float]) -> float:
        """What a unit saves that joins its neighbour: a call, and never as much as the unit takes."""
        return min(self.call(backend), MOST_SAVED * min(times, default=0.0))

    def scaled(self, chain: Chain, factors: Mapping[str, float]) -> Chain:
        """The same with each backend's times corrected."""
        times = tuple({b: t * factors.get(b, 1.0) for b, t in row.items()} for row in chain.times)
        return Chain(times, {b: t * factors.get(b, 1.0) for b, t in chain.call.items()})

    def members(self, segment: Segment) -> tuple[int, ...]:
        """The units of a segment."""
        return self._members.get(segment.ops, self._members_of)

    def _members_of(self, ops: Sequence[Op]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._numbers[coarse(op.scope)] for op in ops))

    def form(self, segment: Segment) -> str:
        """A segment's form."""
        return self._forms.of(segment.ops)

    def summed(self, segment: Segment, threads: int, tokens: int, depth: float) -> float | None:
        """A segment as the sum of its units, which share one call."""
        found = []
        for unit, times in self.kinds(segment):
            seconds = self.seconds(unit, segment.backend, threads, tokens, depth)
            if seconds is None:
                return None
            found.append((times, seconds))
        joined = sum(times for times, _ in found) - 1
        saved = self._saved(segment.backend, (seconds for _, seconds in found))
        return sum(times * seconds for times, seconds in found) - joined * saved

    def predicted(
        self,
        segment: Segment,
        threads: int,
        tokens: int,
        depth: float,
        several: bool = False,
        believed: float = inf,
    ) -> float | None:
        """A segment: the sum of its units, corrected by what runs of it took at sizes near this one; by a
        factor of at most `believed`."""
        work = OpWork(self.form(segment), segment.backend, threads, several)
        tokens, depth = size_of(segment.ops, tokens, depth)
        total = self.summed(segment, threads, tokens, depth)
        if not total:
            return self._forecast.seconds(work, tokens, depth)
        return total * min(max(self.correction(segment, work, tokens, depth), 1 / believed), believed)

    def measured(
        self, segment: Segment, threads: int, tokens: int, depth: float, several: bool = False
    ) -> float | None:
        """A segment, if runs of it were measured at about this size."""
        work = OpWork(self.form(segment), segment.backend, threads, several)
        cells = self._forecast.measured(work).cells.values()
        here = size_of(segment.ops, tokens, depth)
        near = any(cell.runs and distance(cell, *here) < NEAR for cell in cells)
        return self.predicted(segment, threads, tokens, depth, several) if near else None

    def correction(self, segment: Segment, work: OpWork, tokens: int, depth: float) -> float:
        """What real runs took against the sum of units: units together share caches, and runs are the judge.

        Each measured size counts the more the nearer it is; with none nearby the sum stands as it is.
        """
        weights, logs = ALONE, 0.0
        tokens, depth = size_of(segment.ops, tokens, depth)
        for one in (work, work.other):
            for cell in self._forecast.measured(one).cells.values():
                total = cell.runs and self.summed(segment, work.threads, round(cell.tokens), cell.depth)
                if total:
                    away = distance(cell, tokens, depth) + (one is not work)
                    weight = 1 / (away * away + NEAREST)
                    ratio = cell.smoothed / total
                    if away >= NEAR or cell.runs < SURE:
                        ratio = min(max(ratio, 1 / MOST_WRONG), MOST_WRONG)
                    weights, logs = weights + weight, logs + weight * log(ratio)
        return exp(logs / weights)

    def kinds(self, segment: Segment) -> list[tuple[int, int]]:
        """A unit of each form in a segment, and how many of the form there are."""
        return self._kinds.get(segment.ops, self._kinds_of)

    def _kinds_of(self, ops: Sequence[Op]) -> list[tuple[int, int]]:
        found: dict[str, list[int]] = {}
        for i in self._members.get(ops, self._members_of):
            found.setdefault(self.units[i].form, []).append(i)
        return [(same[0], len(same)) for same in found.values()]


def longest(segments: Iterable[Segment]) -> dict[str, Segment]:
    """The longest segment of each backend."""
    found: dict[str, Segment] = {}
    for s in segments:
        if s.backend not in found or len(s.ops) > len(found[s.backend].ops):
            found[s.backend] = s
    return found


def size_of(ops: Sequence[Op], tokens: int, depth: float) -> tuple[int, float]:
    """The size that the times of some ops are kept under. Where only wanted rows go in, these are counted:
    of a large pass one is wanted, or as good as one."""
    if not of_wanted_rows(ops):
        return tokens, depth
    return _wanted(tokens)


def _wanted(tokens: int) -> tuple[int, float]:
    return (tokens if tokens <= FEW else 1), 1.0


def distance(cell: TimingBin, tokens: int, depth: float) -> float:
    """How far a measured size is from another: in doublings, those of the depth count half."""
    deeper = log2(max(cell.depth, SHALLOW) / max(depth, SHALLOW))
    return abs(log2(cell.tokens / tokens)) + abs(deeper) / 2
