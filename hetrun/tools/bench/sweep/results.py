"""What was measured in each budget of a sweep, and what could not have been exceeded there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from hetrun.tools.bench.cases import BenchCase
from hetrun.tools.bench.disk_bandwidth import Ceiling
from hetrun.tools.bench.sweep.budgets import SweepBudget
from hetrun.tools.bench.sweep.worker import SweepSample, WorkerState
from hetrun.tools.bench.texts import TextOrigin

CACHED = 0.9  # of what our readers brought: if the kernel fetched less, the rest was in its cache
ABOVE = 1.02  # a share of the bound that cannot be reached, noise apart


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One of our samples, and what the disk gave beside it."""

    sample: SweepSample
    ceilings: tuple[Ceiling, ...]  # before and after

    @property
    def ceiling(self) -> float | None:
        """Bytes per second: the mean of both."""
        return mean(c.rate for c in self.ceilings) if self.ceilings else None

    def bound(self, compute: float | None, ceiling: float | None, batch: int) -> float | None:
        """Tokens per second that cannot be exceeded: a step computes for `compute` seconds if all weights are
        in memory, and reads what it reads at the disk's ceiling."""
        longest = max(compute or 0.0, self.sample.per_step / ceiling if ceiling else 0.0)
        return batch / longest if longest else None

    def above(self, compute: float | None, batch: int) -> bool:
        """Whether it was faster than it can have been by all that the disk gave beside it: a mistake of ours,
        or a cache."""
        if not self.sample.streamed or not self.ceilings:
            return False
        bound = self.bound(compute, max(c.rate for c in self.ceilings), batch)
        return bound is not None and self.sample.tok_s > ABOVE * bound


@dataclass(frozen=True, slots=True)
class PeerPoint:
    """The peer in the same budget."""

    name: str
    version: str = ""
    threads: int = 0
    samples: tuple[float, ...] = ()
    per_step: float = 0.0  # bytes that the kernel fetched for it
    peak: int | None = None
    failed: str | None = None
    load: str = "mmap"  # how it has its weights

    @property
    def tok_s(self) -> float | None:
        """The median."""
        return median(self.samples) if self.samples else None


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """One budget."""

    budget: SweepBudget | None  # None: as much as it takes
    nbytes: int | None
    batch: int = 1
    context: int = 0
    turns: tuple[SampleTurn, ...] = ()
    state: WorkerState | None = None
    group_peak: int | None = None
    failed: str | None = None  # why it was refused, or how it ended
    peer: PeerPoint | None = None
    ratio: float | None = None

    @property
    def name(self) -> str:
        """As it was typed."""
        return self.budget.name if self.budget else "all"

    @property
    def tok_s(self) -> float | None:
        """The median."""
        return median(t.sample.tok_s for t in self.turns) if self.turns else None

    @property
    def step(self) -> float | None:
        """Seconds."""
        return self.batch / self.tok_s if self.tok_s else None

    def middle(self, of: Callable[[SweepSample], float]) -> float:
        """The median of some number of the samples."""
        return median(of(t.sample) for t in self.turns)

    @property
    def cached(self) -> bool:
        """Whether some of what our readers brought came from memory, and not from the disk."""
        return self.streams and self.middle(lambda s: s.read / (s.streamed or 1)) < CACHED

    @property
    def streams(self) -> bool:
        """Whether any weights come from disk."""
        return any(t.sample.streamed for t in self.turns)

    @property
    def ceiling(self) -> float | None:
        """Bytes per second that the disk gave."""
        found = [t.ceiling for t in self.turns if t.ceiling]
        return median(found) if found else None

    def bounds(self, compute: float | None) -> list[float]:
        """What could not be exceeded while each sample was taken."""
        found = [t.bound(compute, t.ceiling, self.batch) for t in self.turns]
        return [bound for bound in found if bound]

    def bound(self, compute: float | None) -> float | None:
        """The median."""
        found = self.bounds(compute)
        return median(found) if found else None

    def above(self, compute: float | None) -> bool:
        """Whether most samples were faster than they can have been."""
        return 2 * sum(t.above(compute, self.batch) for t in self.turns) > len(self.turns)

    def of_bound(self, compute: float | None) -> float | None:
        """How much of it was reached; each sample is held against its own."""
        found = self.bounds(compute)
        if not found:
            return None
        return median(t.sample.tok_s / bound for t, bound in zip(self.turns, found, strict=False))


@dataclass(frozen=True, slots=True)
class Sweep:
    """All of them."""

    model: str
    model_bytes: int
    case: BenchCase
    points: tuple[BudgetPoint, ...]
    load: tuple[float, float] = (0.0, 0.0)
    kv_type: str = "f16"  # of both sides
    groupless: str | None = None  # why ours ran in no group of its own; None: it did
    text: TextOrigin | None = None  # that was read and written

    @property
    def title(self) -> str:
        """In a line."""
        return f"{self.model}: tokens per second over memory"

    @property
    def compute(self) -> tuple[float, str] | None:
        """Seconds that a step computes, and how that is known."""
        steps = [p.step for p in self.points if p.step and not p.streams]
        if steps:
            return min(steps), "all weights in memory"
        works = [p.step * (1 - p.state.held.waiting) for p in self.points if p.step and p.state]
        return (min(works), "the fastest budget, without its waiting for the disk") if works else None
