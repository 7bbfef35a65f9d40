"""How well experts were kept, on what passes really chose: beside what other rules would have kept in as many
slots, and the best that any rule could have that knows what comes (Belady's)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hetrun.prefetch.expert_records import Records

LEAST = 1000  # choices: of fewer no rule can be judged
WARM = 0.5  # of a trace: rules begin with nothing, so what comes before is not counted
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class HitShares:
    """Of the choices that were counted, the share that each rule would have found in its slots."""

    choices: int
    ours: float
    lru: float  # whatever was chosen last stays, in all layers together
    layers: float  # the same, each layer with equally many slots
    best: float
    equally: bool = True  # layers have equally many slots; else each as many as it has

    @property
    def text(self) -> str:
        """In words."""
        each = "with equally many for each layer" if self.equally else "in the slots of each layer"
        return (
            f"{self.ours:.1%} of {self.choices:,} chosen experts were there; {self.lru:.1%} by what was used "
            f"last, {self.layers:.1%} {each}, {self.best:.1%} at best"
        )


Rule = Callable[[Sequence[int], int], Iterable[bool]]


def judge(records: Records, slots: Sequence[int], trace: NDArray[np.int32]) -> HitShares | None:
    """The trace's rows are the number of a pass, of an expert and whether it was there; None: too short."""
    if len(trace) < LEAST:
        return None
    first = records.first
    mixture = np.searchsorted(first, trace[:, 1], "right") - 1
    kind = np.array(records.kinds)[mixture]
    layers = np.bincount(records.kinds)
    each = [slots[k] // int(layers[k]) for k in records.kinds]
    return HitShares(
        int(_counted(trace).sum()),
        float(trace[_counted(trace), 2].mean()),
        _share(trace, lru, kind, slots),
        _share(trace, lru, mixture, each),
        _share(trace, best, kind, slots),
    )


def judge_layers(slots: Sequence[int], trace: NDArray[np.int32]) -> HitShares | None:
    """The same where each mixture has slots of its own: the trace's rows are the number of a mixture, that of
    an expert of it, and whether that was there."""
    if len(trace) < LEAST:
        return None
    mixture = trace[:, 0].astype(np.int64)
    named = trace.copy()
    named[:, 1] += trace[:, 0] * (1 + trace[:, 1].max())  # no two mixtures share an expert
    together = np.zeros(len(trace), np.int64)
    return HitShares(
        int(_counted(trace).sum()),
        float(trace[_counted(trace), 2].mean()),
        _share(named, lru, together, [sum(slots)]),
        _share(named, lru, mixture, slots),
        _share(named, best, mixture, slots),
        equally=False,
    )


def _counted(trace: NDArray[np.int32]) -> NDArray[np.bool_]:
    return np.arange(len(trace)) >= WARM * len(trace)


def _share(trace: NDArray[np.int32], rule: Rule, groups: NDArray[np.int64], room: Sequence[int]) -> float:
    """What a rule would have found, with so much room for each group."""
    hits = np.zeros(len(trace), bool)
    for group in np.unique(groups):
        mine = groups == group
        hits[mine] = list(rule(trace[mine, 1].tolist(), room[group]))
    return float(hits[_counted(trace)].mean())


def lru(chosen: Sequence[int], room: int) -> Iterable[bool]:
    """Whatever was chosen last stays."""
    there: OrderedDict[int, None] = OrderedDict()
    for expert in chosen:
        hit = expert in there
        if hit:
            there.move_to_end(expert)
        elif room:
            if len(there) >= room:
                there.popitem(last=False)
            there[expert] = None
        yield hit


def best(chosen: Sequence[int], room: int) -> Iterable[bool]:
    """What is chosen soonest stays. What is chosen later than all others need not stay at all."""
    after = _next_uses(chosen)
    there: dict[int, int] = {}  # when each is chosen again
    latest: list[tuple[int, int]] = []  # the same, those first that are chosen last; some entries are old
    for i, expert in enumerate(chosen):
        hit = expert in there
        there[expert] = after[i]
        heappush(latest, (-after[i], expert))
        while len(there) > room:
            when, candidate = heappop(latest)
            if there.get(candidate) == -when:
                del there[candidate]
        yield hit


def _next_uses(chosen: Sequence[int]) -> list[int]:
    seen: dict[int, int] = {}
    after = [NEVER] * len(chosen)
    for i in range(len(chosen) - 1, -1, -1):
        after[i] = seen.get(chosen[i], NEVER)
        seen[chosen[i]] = i
    return after
