"""Where the time of a prompt or a step went, and what that is up against, in numbers and in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hetrun.backend.op_profile import ACTIVITIES
from hetrun.tools.bench.roofline import Limit
from hetrun.tools.bench.timed_window import BackendSeconds, WindowSeconds

NAMES = {"other": "other ops"}
WAITING, PYTHON = "waiting", "Python"
WORTH_SAYING = 0.05  # of the time
FULL = 0.5  # of what memory gives: a program that reads more slowly is not limited by it
SMALL = 0.02  # what waiting and Python may take before it is said


@dataclass(frozen=True, slots=True)
class TimePart:
    """What some of the time went into."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The whole time in parts; they add up."""

    unit: str  # "prompt" or "step"
    parts: tuple[TimePart, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(p.seconds for p in self.parts)

    def of(self, name: str) -> float:
        """Seconds that went into something."""
        return sum(p.seconds for p in self.parts if p.name == name)

    def share(self, name: str) -> float:
        """The part of the whole that it is."""
        return self.of(name) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """For `bench -o json`."""
        return {
            "unit": self.unit,
            "seconds": self.seconds,
            "parts": {p.name: {"seconds": p.seconds, "share": self.share(p.name)} for p in self.parts},
        }


def mean(measured: Sequence[WindowSeconds]) -> WindowSeconds:
    """Of several samples."""
    names = dict.fromkeys(name for m in measured for name in m.inside)
    return WindowSeconds(
        fmean(m.total for m in measured),
        {name: fmean(m.inside.get(name, 0.0) for m in measured) for name in names},
        fmean(m.waited for m in measured),
        fmean(m.idle for m in measured),
    )


def dissect(unit: str, measured: WindowSeconds, looked: BackendSeconds) -> Anatomy:
    """The time that was measured, by the shares that were seen in a profile.

    What a backend's segments took beyond its ops, and everything outside of segments (scheduling, sampling,
    planning), is Python's. A backend that shows nothing of its inside is a part of its own.
    """
    known = sum(measured.inside.values()) + measured.waited + measured.idle
    # Clocks are read in different places: what was counted may be a little more than there was.
    scale = min(1.0, measured.total / known) if known else 1.0
    seconds: dict[str, float] = {}
    for backend, inside in measured.inside.items():
        for name, share in _shares(backend, looked).items():
            seconds[name] = seconds.get(name, 0.0) + scale * inside * share
    seconds[WAITING] = scale * (measured.waited + measured.idle)
    rest = measured.total - sum(seconds.values())
    order = [NAMES.get(a, a) for a in ACTIVITIES]
    order += [name for name in seconds if name not in (*order, WAITING)]
    parts = [TimePart(name, seconds[name]) for name in (*order, WAITING) if name in seconds]
    return Anatomy(unit, (*parts, TimePart(PYTHON, max(0.0, rest))))


def _shares(backend: str, looked: BackendSeconds) -> dict[str, float]:
    """Which parts of a backend's time its activities are; the rest of it is Python's."""
    spent, inside = looked.spent.get(backend), looked.inside.get(backend, 0.0)
    if spent is None or not spent.total:
        return {f"inside {backend}": 1.0}
    whole = max(inside - spent.looking, spent.total)
    return {NAMES.get(a, a): s / whole for a, s in spent.seconds.items()}


@dataclass(frozen=True, slots=True)
class Advice:
    """What limits the speed, and what would raise it."""

    limited_by: str
    faster_with: str

    @property
    def text(self) -> str:
        return f"{self.limited_by} limits it; faster with {self.faster_with}"


ADVICE = {
    "memory": Advice(
        "memory bandwidth", "fewer bytes for each token: a smaller type of weights or a smaller model"
    ),
    "products": Advice("arithmetic", "a smaller model, or a CPU with more or wider cores"),
    "attention": Advice("attention to earlier tokens", "less text in the context"),
    WAITING: Advice("waiting for the disk or for other threads", "more --ram, or no other programs"),
    PYTHON: Advice("work outside the model, in Python", "more requests at a time"),
}


def advice(anatomy: Anatomy, limit: Limit) -> Advice | None:
    """For people who do not want figures; None for parts whose inside is unknown."""
    return ADVICE.get(_against(anatomy, limit)) if anatomy.seconds else None


def _against(anatomy: Anatomy, limit: Limit) -> str:
    """What most of the time goes into: a part, or memory if that holds the products up."""
    against = max(anatomy.parts, key=lambda p: p.seconds).name
    held_up = _products_read(limit) and _reading_rate(anatomy, limit) >= FULL * (limit.bandwidth or 0)
    return "memory" if against == "products" and held_up else against


def verdict(anatomy: Anatomy, limit: Limit) -> str:
    """One sentence: what most of the time goes into, and how far that is from what is possible."""
    if not anatomy.seconds:
        return "nothing was measured"
    against, reads = _against(anatomy, limit), _products_read(limit)
    said = [_products(anatomy, limit, reads)] if anatomy.of("products") else []
    for name in ("attention", "norms", "other ops"):
        if anatomy.share(name) >= WORTH_SAYING:
            said.append(f"{name} {_is(name)} {anatomy.share(name):.0%}{_rate(anatomy, limit, name)}")
    said += [
        f"{p.name} is {anatomy.share(p.name):.0%}"
        for p in anatomy.parts
        if p.name not in ("products", "attention", "norms", "other ops") and anatomy.share(p.name) >= SMALL
    ]
    return f"up against {against}: {'; '.join(said)}" if said else f"up against {against}"


def _is(name: str) -> str:
    return "is" if name == "attention" else "are"


def _products_read(limit: Limit) -> bool:
    """Whether products wait for their weights rather than for the units that multiply."""
    demand = limit.demand
    if demand is None or not limit.bandwidth:
        return False
    if demand.products is None or limit.peak is None:
        return limit.bound == "memory"
    return demand.weight_bytes / limit.bandwidth >= demand.products / limit.peak.rate


def _reading_rate(anatomy: Anatomy, limit: Limit) -> float:
    """Bytes of weights per second while products are made."""
    seconds = anatomy.of("products")
    return limit.demand.weight_bytes / seconds if limit.demand and seconds else 0.0


def _products(anatomy: Anatomy, limit: Limit, reads: bool) -> str:
    seconds, demand = anatomy.of("products"), limit.demand
    share = f"products are {anatomy.share('products'):.0%}"
    if demand is None:
        return share
    if reads and limit.bandwidth:
        rate = _reading_rate(anatomy, limit)
        return (
            f"{share}, and read weights at {rate / limit.bandwidth:.0%} of what memory gives "
            f"({rate / 1e9:.1f} of {limit.bandwidth / 1e9:.1f} GB/s)"
        )
    if limit.peak and demand.products:
        rate = demand.products / seconds
        return (
            f"{share}, and run at {rate / limit.peak.rate:.0%} of the peak of {limit.peak.name} "
            f"({rate / 1e9:.0f} of {limit.peak.rate / 1e9:.0f} GFLOP/s)"
        )
    return share


def _rate(anatomy: Anatomy, limit: Limit, name: str) -> str:
    """How fast attention multiplies, or reads keys and values."""
    demand = limit.demand
    if name != "attention" or demand is None or not demand.attention:
        return ""
    seconds = anatomy.of(name)
    if anatomy.unit == "step":
        return f" ({demand.kv_bytes / seconds / 1e9:.1f} GB/s of keys and values)"
    return f" ({demand.attention / seconds / 1e9:.0f} GFLOP/s)"
