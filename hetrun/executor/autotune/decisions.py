"""What was decided, on what grounds, and what became of it: in words."""

from __future__ import annotations

from math import ceil

from hetrun.planner.bandit import Verdict
from hetrun.planner.online import passes_of
from hetrun.planner.plan import Plan
from hetrun.system.units import counted

TAKEN, SPARE = 0.5, 0.35  # cores of others: so many are in the way; so few are not


def in_words(v: Verdict, others: float | None) -> str:
    """What passes showed of a plan; `others`: cores that other programs keep busy, None: nobody knows."""
    off = f"{abs(1 - v.ratio):.0%} {'less' if v.ratio < 1 else 'more'} time than before"
    off += f", spread {v.spread:.0%}, "
    off += f"by {v.passes} passes in turn" if v.passes > 1 else "by 1 pass"
    off += f"; {abs(1 - v.expected):.0%} {'less' if v.expected < 1 else 'more'} was predicted"
    where = passes_of(v.bucket)
    if same_places(v.plan, v.before):
        what = f"{count(v.plan.threads)} instead of {v.before.threads} for {where}"
        if not v.kept:
            return f"{what} are taken back: {off}"
        return f"{_cause(v.plan.threads, v.before.threads, others)}: {what}: {off}"
    kept = "stays in force" if v.kept else "is taken back"
    return f"{where}: the plan on {backends(v.plan)} {kept}: {off}"


def of_threads(now: int, before: int, ratio: float, others: float | None) -> str:
    """Other threads, because the same work took so many times as long with them."""
    what = f"{count(now)} instead of {before}: the same work then takes {1 - ratio:.0%} less time"
    return what if others is None else f"{_cause(now, before, others)}: {what}"


def _cause(now: int, before: int, others: float | None) -> str:
    if now > before:
        return "cores are free again"
    if others is None or others < TAKEN:
        return "passes take far too long"
    taken = ceil(others - SPARE)
    return "another program takes a core" if taken <= 1 else f"other programs take {taken} cores"


def same_places(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in threads at most."""
    return a.places == b.places


def backends(plan: Plan) -> str:
    """Where a plan runs, the most segments first."""
    names = [backend for _, backend in plan.places]
    return " and ".join(sorted(set(names), key=lambda name: (-names.count(name), name)))


def count(threads: int) -> str:
    """A number of threads."""
    return counted(threads, "thread")
