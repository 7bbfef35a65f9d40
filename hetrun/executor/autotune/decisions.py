"""Sentences about decisions: what changed, from what to what, and why."""

from __future__ import annotations

from math import ceil

from hetrun.planner.bandit import Verdict
from hetrun.planner.online import passes_of
from hetrun.planner.plan import Plan
from hetrun.system.units import counted

TAKEN, SPARE = 0.5, 0.35  # cores of others: more than TAKEN are in the way; less than SPARE are not


def in_words(v: Verdict, others: float | None) -> str:
    """What the passes of a trial showed, from what to what the plan changed, and why.

    `others`: cores that other programs keep busy; None: not known.
    """
    where, measured = passes_of(v.bucket), f"{_time(v.ratio)} before ({_evidence(v)})"
    if same_places(v.plan, v.before):
        tried, old = count(v.plan.threads), v.before.threads
        if v.kept:
            return f"{_cause(v.plan.threads, old, others)}: {tried} instead of {old} for {where}, {measured}"
        return f"{where} use {count(old)} again instead of {v.plan.threads}, with which they took {measured}"
    new, old_places = backends(v.plan), backends(v.before)
    other = f" instead of {old_places}" if new != old_places else ", with other parts on each"
    if v.kept:
        return f"{where} now run on {new}{other}: they take {measured}"
    if new == old_places:
        return f"{where} run on {new} as before, not with other parts on each: they took {measured}"
    return f"{where} run on {old_places} again instead of {new}, where they took {measured}"


def _time(ratio: float) -> str:
    """The time of a pass beside the time of another one: "12% less time than", "7.4 times as long as"."""
    if ratio >= 2:
        return f"{ratio:.1f} times as long as"
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'} time than"


def _evidence(v: Verdict) -> str:
    """What a verdict rests on."""
    passes = "1 pass" if v.passes == 1 else f"{v.passes} passes"
    predicted = f"{abs(1 - v.expected):.0%} {'less' if v.expected < 1 else 'more'} was predicted"
    return f"measured in {passes}, spread {v.spread:.0%}; {predicted}"


def of_threads(now: int, before: int, ratio: float, others: float | None) -> str:
    """Other threads, because the same work took `ratio` times as long with them."""
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
