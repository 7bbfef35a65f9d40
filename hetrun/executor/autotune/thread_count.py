"""How many threads a pass gets while other programs want the same cores.

Threads of a pass wait for each other after every op. One that has lost its core holds up all of them, many
times over, so a thread fewer is much faster than one that seldom runs. That a core is taken is a state of the
machine and no property of the work: what passes take meanwhile is kept here, and no forecast hears of it.

Passes that take much longer than they should raise an alarm. Then the system is asked what others do; where
it cannot say, fewer threads are tried. More threads are tried when the system says that cores are free again,
and now and then whatever it says: others may run only where nobody else wants to. They stay if passes with
them are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor

from hetrun.executor.compiled_plan import Ran
from hetrun.planner.plan import Plan, PlanSet

SLOW = 1.5  # times as long as it should: somebody may be in the way
FEW = 3  # slow passes in a row are no accident
LOST_S = 0.15  # by slow passes in a row: long ones need not be so many
SHORT_S, LOOK_S = 0.1, 0.5  # between two looks at the system, in doubt and otherwise
LONG_AGO_S = 2.0  # what others did since then is not what they do now
TAKEN, SPARE = 0.5, 0.35  # cores of others: so many are in the way; so little is not when threads come back
CALM, CALMEST = 2, 8  # looks in a row that find cores free before these are tried: at first, and at most
SETTLED_S = 20.0  # who falls back again sooner waits longer the next time
FASTER = 0.97  # of the time of a pass: what more threads have to reach
GOOD, BAD = 3, 2  # passes of a trial that decide it
SILENT = 20  # passes that end a trial though they say nothing: they want fewer threads, or nobody knows them
PRICE = 0.04  # of the time may go into trials
JUDGED = 3  # passes after which a number of threads is judged by what it took
SMOOTHING = 0.3
MOST_HELD = 64  # passes of which it is not known yet what they say
BELIEVED = 20  # passes, once nobody is in the way: so many tell the forecast how it is now


@dataclass(frozen=True, slots=True)
class Rest:
    """Seconds until more threads are tried whatever the system says: at first, and at most."""

    first: float
    most: float


TOLD, BLIND = Rest(4.0, 16.0), Rest(1.0, 4.0)  # where the system says what others do, and where it does not


@dataclass(slots=True)
class Ratio:
    """How many times as long as with all cores passes take, of late."""

    value: float
    runs: int = 0

    def add(self, ratio: float) -> None:
        """One more pass."""
        self.runs += 1
        self.value += (ratio - self.value) * max(SMOOTHING, 1 / self.runs)


@dataclass(slots=True)
class Slowness:
    """Slow passes in a row."""

    passes: int = 0
    seconds: float = 0.0  # that they took...
    lost: float = 0.0  # ...and how many of them too long
    held: list[tuple[Ran, float]] = field(default_factory=list)  # each with how many times too long it took

    @property
    def alarming(self) -> bool:
        """Whether that is more than an accident."""
        return self.seconds >= SHORT_S and (self.passes >= FEW or self.lost > LOST_S)


@dataclass(slots=True)
class Trial:
    """More threads than before, for a few passes."""

    before: int
    good: int = 0
    bad: int = 0
    slow: int = 0  # though they were good
    lost: float = 0.0  # seconds, by the bad ones
    silent: int = 0  # that say nothing of more threads
    held_up: int = 0  # of those: slow


class Crew:
    """Knows how many threads get a core now. Told and asked by the engine's thread only."""

    def __init__(self, most: int, look: Callable[[float], float | None], cores: int) -> None:
        """`most` threads of a pass; `look`: how many of the cores others kept busy since it was called."""
        self.most = self.now = most
        self._look, self._cores = look, cores
        self._slowness = Slowness()
        self._ratios: dict[tuple[str, int], Ratio] = {}  # by bucket and threads
        self._trial: Trial | None = None
        self._believed = 0  # passes that are learnt from whatever they take
        self._looked = self._next = 0.0  # when the system was asked, and when there is something to decide
        self._before = 0.0  # cores that others took then
        self._ran = 0.0  # seconds of passes since the system was asked
        self._calm, self._patience = 0, CALM
        self._came = -SETTLED_S  # when all threads were there again
        self._rests, self._rest, self._trial_at = TOLD, TOLD.first, 0.0

    @property
    def crowded(self) -> bool:
        """Whether others take cores of ours, as far as we know."""
        return self.now < self.most or self._trial is not None

    def threads(self, bucket: str, planned: int) -> int:
        """What a bucket gets that would have so many: all the same where fewer have proved slower."""
        fewer, all_of_them = self._ratios.get((bucket, self.now)), self._ratios.get((bucket, planned))
        if planned <= self.now or self._trial:
            return min(planned, self.now)
        slower = fewer and all_of_them and fewer.runs >= JUDGED and all_of_them.value < FASTER * fewer.value
        return planned if slower else self.now

    def factor(self, bucket: str, threads: int) -> float:
        """How many times as long as with all cores passes take with so many threads."""
        ratio = self._ratios.get((bucket, threads))
        return ratio.value if ratio and ratio.runs >= JUDGED else max(1.0, self.most / threads)

    # --- what ran

    def hear(self, ran: Ran, expected: float | None) -> None:
        """A pass ran that takes so long where all cores are free. If they were, the forecast learns of it."""
        self._ran += ran.seconds
        if expected is None or expected <= 0 or not ran.warm:
            if self._trial:
                self._hear_silent(self._trial, 1.0)
            elif not self.crowded:
                ran.learn()
            return
        ratio = ran.seconds / expected
        if self._trial:
            self._hear_trial(self._trial, ran, ratio, expected)
            return
        usual = 1.0
        if self.crowded:
            usual = self.factor(ran.bucket, ran.threads)
            self._book(ran, ratio)
        if ratio > SLOW * usual and not self._believed:
            self._hear_slow(ran, ratio, expected * usual)
            return
        self._believed = max(0, self._believed - 1)
        self._release()
        if not self.crowded:
            ran.learn()

    def _hear_slow(self, ran: Ran, ratio: float, usual: float) -> None:
        slow = self._slowness
        slow.passes += 1
        slow.seconds += ran.seconds
        slow.lost += ran.seconds - usual
        if not self.crowded:
            slow.held.append((ran, ratio))
            if len(slow.held) > MOST_HELD:
                slow.held.pop(0)[0].learn()
        if slow.alarming:
            self._next = 0.0

    def _hear_trial(self, trial: Trial, ran: Ran, ratio: float, expected: float) -> None:
        if ran.threads != self.now:
            self._hear_silent(trial, ratio)
            return
        now = self.factor(ran.bucket, trial.before)
        if ratio < FASTER * now:
            trial.good += 1
            trial.slow += ratio > SLOW
        else:
            trial.bad += 1
            trial.lost += ran.seconds - expected * now
            self._book(ran, ratio)
        if trial.good >= GOOD or trial.bad >= BAD or trial.lost > LOST_S:
            self._next = 0.0

    def _hear_silent(self, trial: Trial, ratio: float) -> None:
        trial.silent += 1
        trial.held_up += ratio > SLOW
        if trial.silent >= SILENT:
            self._next = 0.0

    def _book(self, ran: Ran, ratio: float) -> None:
        self._ratios.setdefault((ran.bucket, ran.threads), Ratio(ratio)).add(ratio)

    def _release(self) -> None:
        """What was slow was nobody's doing: it is learnt."""
        if self._slowness.passes:
            for ran, _ in self._slowness.held:
                ran.learn()
            self._slowness = Slowness()

    # --- what follows

    def due(self, at: float) -> bool:
        """Whether there is something to decide."""
        return at >= self._next

    def decide(self, at: float) -> str:
        """Why there are other threads from now on; empty if there are not, or for a trial only."""
        if self._trial:
            return self._judge(self._trial, at)
        slow = self._slowness
        if slow.passes and not slow.alarming and not self.crowded:
            self._next = at + SHORT_S  # one look is to tell of all slow passes
            return ""
        others, since = self._look(at), at - self._looked
        recent = since <= LONG_AGO_S + self._ran
        self._looked, self._ran, self._next = at, 0.0, at + LOOK_S
        if slow.alarming and self.now > 1 and recent:
            return self._alarmed(self._meanwhile(others, since), at)
        self._before = others or 0.0
        if self.crowded:
            self._watch(others if recent else None, at)
        return ""

    def _meanwhile(self, others: float | None, since: float) -> float | None:
        """What others took while passes were slow, if before that it was what it had been."""
        slow = self._slowness.seconds
        if others is None or slow >= since:
            return others
        found = (others * since - self._before * (since - slow)) / slow
        return min(max(found, 0.0), float(self._cores))

    def _alarmed(self, others: float | None, at: float) -> str:
        """Passes are slow: by others, or by themselves."""
        if not self.crowded and others is not None and others < TAKEN:
            self._release()
            self._believed = BELIEVED
            return ""
        for ran, ratio in self._slowness.held:
            self._book(ran, ratio)
        self._slowness = Slowness()
        if not self.crowded:
            self._patience = min(2 * self._patience, CALMEST) if at < self._came + SETTLED_S else CALM
        return self._fall_back(others, at)

    def _fall_back(self, others: float | None, at: float) -> str:
        before = self.now
        if others is None:
            self.now = before - 1 if before == self.most else before // 2
        else:
            self.now = max(1, min(before - 1, self._cores - ceil(others - SPARE)))
        # What another crowd was like is no measure of this one.
        self._ratios = {key: ratio for key, ratio in self._ratios.items() if key[1] >= before}
        self._rests = BLIND if others is None else TOLD
        self._rest, self._calm = self._rests.first, 0
        self._trial_at = at + self._rest
        return f"{_who(others)}: {_count(self.now)} instead of {before}"

    def _watch(self, others: float | None, at: float) -> None:
        """Try more threads when cores seem to be free, or when it was not tried for long."""
        free = self.now if others is None else min(self.most, floor(self._cores - others + SPARE))
        self._calm = self._calm + 1 if free > self.now else 0
        if self._calm >= self._patience:
            self._try(free)
        elif at >= self._trial_at:
            self._try(self.now + (self.most - self.now + 1) // 2)

    def _try(self, threads: int) -> None:
        self._trial, self.now = Trial(self.now), threads
        self._next = float("inf")  # until passes have run

    def _judge(self, trial: Trial, at: float) -> str:
        self._trial, self._next = None, at + LOOK_S
        # Passes that want fewer threads lose nothing by more: only a crowd that they feel speaks against it.
        unopposed = not trial.bad and trial.silent >= SILENT and 2 * trial.held_up < SILENT
        if trial.good >= GOOD or unopposed:
            self._came = at
            self._calm, self._trial_at = 0, at + LOOK_S
            if not self.crowded:
                self._ratios.clear()
                self._believed = (
                    BELIEVED if trial.slow else 0
                )  # fewer threads were no better: it is like this
            return f"cores are free again: {_count(self.now)} instead of {trial.before}"
        self.now = trial.before
        self._patience = min(2 * self._patience, CALMEST) if self._calm else self._patience
        self._rest = min(2 * self._rest, self._rests.most)
        self._calm, self._trial_at = 0, at + max(self._rest, trial.lost / PRICE)
        return ""


def manned(plans: PlanSet, crew: Crew, why: str) -> PlanSet:
    """The same plans with the threads that get a core; `why` these are not those that were planned."""
    found = {b: _with(p, crew.threads(b, p.threads)) for b, p in plans.plans.items()}
    if all(found[b] is p for b, p in plans.plans.items()):
        return plans
    return replace(plans, plans=found, reason=why)


def _with(plan: Plan, threads: int) -> Plan:
    return plan if plan.threads == threads else replace(plan, threads=threads)


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _who(others: float | None) -> str:
    if others is None:
        return "passes take far too long"
    taken = ceil(others - SPARE)
    return "another program takes a core" if taken <= 1 else f"other programs take {taken} cores"
