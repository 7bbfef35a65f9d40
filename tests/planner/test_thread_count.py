"""How many threads a pass gets beside other programs, in a world of made-up times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.executor.autotune.thread_count import CALM, Crew, manned
from hetrun.executor.compiled_plan import Ran
from hetrun.planner.costmodel import Measured
from tests.planner.test_online_planner import static
from tests.support.examples import examples

BARRIERS = 20.0  # times as long: a pass of which one thread has lost its core


@dataclass
class World:
    """A machine whose passes take `seconds` with all cores; it runs them one after the other."""

    cores: int
    seconds: float
    told: bool = True  # whether the system says what others do
    others: Callable[[float], float] = lambda at: 0.0
    slower: Callable[[float, int], float] = lambda at, threads: 1.0
    at: float = 100.0
    threads: list[tuple[float, int]] = field(default_factory=list)  # of passes, and when they began
    reasons: list[tuple[float, str]] = field(default_factory=list)
    expected: Measured = field(default_factory=Measured)  # what would be kept for the next start

    def __post_init__(self) -> None:
        self.crew = Crew(self.cores, self.look, self.cores)
        self.looked = self.at

    def look(self, at: float) -> float | None:
        steps = [self.others(self.looked + (at - self.looked) * i / 20) for i in range(20)]
        self.looked = at
        return sum(steps) / 20 if self.told else None

    def run(self, seconds: float, bucket: str = "1", planned: int | None = None) -> World:
        end, planned = self.at + seconds, planned or self.cores
        while self.at < end:
            n = self.crew.threads(bucket, planned)
            takes = self.seconds * planned / n * self.slower(self.at, n)
            if n + self.others(self.at) > self.cores:
                takes *= BARRIERS
            self.threads.append((self.at, n))
            self.at += takes
            self.crew.hear(a_pass(takes, n, self.expected, bucket), self.seconds)
            if self.crew.due(self.at) and (why := self.crew.decide(self.at)):
                self.reasons.append((self.at, why))
        return self

    def first(self, after: float, good: Callable[[int], bool]) -> float:
        """Seconds until a pass has so many threads."""
        return next(at for at, n in self.threads if at >= after and good(n)) - after

    def passes(self, begin: float, end: float) -> int:
        return len([at for at, _ in self.threads if begin <= at < end])


def a_pass(seconds: float, threads: int, learnt: Measured, bucket: str = "1", warm: bool = True) -> Ran:
    return Ran(bucket, threads, 1, 100.0, False, seconds, warm, [(learnt, 1, 100.0, seconds)])


def between(begin: float, end: float, cores: float) -> Callable[[float], float]:
    return lambda at: cores if begin <= at < end else 0.0


@settings(max_examples=examples(100))
@given(
    cores=st.integers(2, 16),
    others=st.integers(1, 3),
    seconds=st.floats(1e-3, 0.1),
    told=st.booleans(),
    begin=st.floats(102, 104),
    long=st.floats(5, 40),
)
def test_it_falls_back_within_a_second_and_returns_within_five(
    cores: int, others: int, seconds: float, told: bool, begin: float, long: float
) -> None:
    others = min(others, cores - 1)
    world = World(cores, seconds, told, between(begin, begin + long, others)).run(long + 30)
    in_the_middle = BARRIERS * seconds * cores  # a pass that had begun when it happened
    assert world.first(begin, lambda n: n < cores) < max(1.0, 3 * in_the_middle)
    if told:
        assert world.first(begin, lambda n: n <= cores - others) < max(1.0, 3 * in_the_middle)
        kept = [n for at, n in world.threads if begin + 1 + 3 * in_the_middle < at < begin + long]
        assert sum(n < cores - others for n in kept) == 0, "no thread too few"
    if told or (cores == 2 and seconds < 0.01):  # who is told nothing must not try often what costs much
        assert world.first(begin + long, lambda n: n == cores) < 5
        assert world.threads[-1][1] == cores
    assert "in the way" not in str(world.reasons)
    # What was measured meanwhile is not what the work takes.
    cell = world.expected.cell(1, 100.0)
    assert cell.smoothed == pytest.approx(seconds)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seconds", [0.004, 0.03])
def test_trials_beside_somebody_who_stays_cost_little(told: bool, seconds: float) -> None:
    world = World(2, seconds, told, between(102, 1e9, 1)).run(200)
    perfect = 90 / (2 * seconds)
    assert world.passes(110, 200) > 0.93 * perfect
    assert world.threads[-1][1] == 1


def test_reasons_are_sentences() -> None:
    world = World(2, 0.004, True, between(102, 106, 1)).run(12)
    assert [why for _, why in world.reasons] == [
        "another program takes a core: 1 thread instead of 2",
        "cores are free again: 2 threads instead of 1",
    ]
    world = World(8, 0.004, True, between(102, 106, 2)).run(6)
    assert world.reasons[0][1] == "other programs take 2 cores: 6 threads instead of 8"


def once(when: float, slower: float) -> Callable[[float, int], float]:
    return lambda at, threads: slower if at == when else 1.0


def test_an_accident_changes_nothing() -> None:
    world = World(2, 0.004).run(5)
    for long in (0.02, 0.02, 3.0):
        world.slower = once(world.at, long / world.seconds)
        world.run(1)
    assert {n for _, n in world.threads} == {2}
    assert world.expected.cell(1, 100.0).runs > 1000


@pytest.mark.parametrize("told", [True, False])
def test_work_that_became_slow_by_itself_keeps_its_threads_and_is_learnt(told: bool) -> None:
    world = World(2, 0.004, told, slower=lambda at, n: 3.0 if at > 105 else 1.0).run(40)
    assert world.threads[-1][1] == 2
    assert world.expected.cell(1, 100.0).smoothed == pytest.approx(0.012, rel=0.1)
    few = [at for at, n in world.threads if n == 1]
    assert len(few) < 0.2 * len(world.threads)


def test_who_comes_and_goes_is_followed_less_and_less() -> None:
    world = World(2, 0.004, True, lambda at: float(int(at) % 4 == 0)).run(120)
    early = [at for at, _ in world.reasons if at < 130]
    late = [at for at, _ in world.reasons if at > 190]
    assert len(late) < len(early)


def test_a_bucket_for_which_fewer_threads_are_slower_keeps_all() -> None:
    learnt = Measured()
    crew = Crew(2, lambda at: 1.0, 2)
    crew.decide(0.0)
    for _ in range(4):
        crew.hear(a_pass(1.6, 2, learnt, "257+"), 1.0)
    assert crew.decide(0.5)
    assert crew.threads("257+", 2) == crew.threads("1", 2) == 1
    for _ in range(4):
        crew.hear(a_pass(2.1, 1, learnt, "257+"), 1.0)
    assert crew.threads("257+", 2) == 2
    assert crew.threads("1", 2) == 1
    assert not learnt.runs


def test_passes_that_want_fewer_threads_do_not_hold_up_the_end_of_a_crowd() -> None:
    """Prompts made way for somebody; then only single tokens run, which are planned with one thread."""
    world = World(4, 0.01, others=between(102, 110, 2)).run(5)
    before = world.crew.now
    world.run(20, bucket="2-4", planned=1)
    assert before < world.crew.now == 4
    assert not world.crew.crowded
    assert world.reasons[-1][1].startswith("cores are free again")


def test_first_runs_say_nothing() -> None:
    crew, learnt = Crew(2, lambda at: 1.0, 2), Measured()
    crew.decide(0.0)
    for _ in range(10):
        crew.hear(a_pass(1.0, 2, learnt, warm=False), 0.001)
        crew.hear(a_pass(1.0, 2, learnt), None)
    assert not crew.due(0.2)
    assert not crew.decide(0.5)
    assert crew.now == 2


def test_what_others_did_long_ago_is_no_evidence() -> None:
    crew, learnt = Crew(2, lambda at: 1.0, 2), Measured()
    crew.decide(0.0)
    for _ in range(3):
        crew.hear(a_pass(0.05, 2, learnt), 0.001)
    assert not crew.decide(60.0), "they may have run before"
    assert crew.decide(60.2)


def test_plans_have_the_threads_that_get_a_core() -> None:
    plans, crew = static(), Crew(2, lambda at: 1.0, 2)
    assert manned(plans, crew, "why") is plans
    crew.now = 1
    fewer = manned(plans, crew, "why")
    assert {p.threads for p in fewer.plans.values()} == {1}
    assert fewer.reason == "why"
    assert all(p.stages is plans.plans[b].stages for b, p in fewer.plans.items()), "what was compiled is kept"


def test_calm_is_more_than_a_moment() -> None:
    world = World(2, 0.004, True, lambda at: 1.0 if 102 <= at < 110 and at % 1 > 0.3 else 0.0).run(10)
    assert CALM > 1
    assert 1 <= len(world.reasons) <= 3
