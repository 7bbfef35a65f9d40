"""What operations take on two sides: the engine's thread, and a backend that works by itself; and what a pass
takes in which both are busy at once.

Operations are measured one by one. The other side brings the weights that do not stay with it over a link,
ahead of time; what a pass of one token takes there besides a call is that. The rest of an operation's time is
computing, with the small values that cross the link for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrun.backend import FLOAT_BYTES, Backend, Floats, Segment
from hetrun.errors import OptionError
from hetrun.graph import Graph, Op
from hetrun.graph.identity_cache import IdentityCache
from hetrun.graph.ops import MIXTURE, Attention, Moe
from hetrun.graph.signature import coarse
from hetrun.planner.costmodel import OpWork, WorkTimes
from hetrun.planner.online import Likely
from hetrun.planner.plan import Plan
from hetrun.planner.segment_cost import MOST_SAVED, NEAR, SegmentCosts, distance, size_of
from hetrun.planner.trials import BESIDE, DEEP, LINK, SAMPLES, SMALL, TOKENS, Trial, alone
from hetrun.planner.two_device.balance import PARTS, OpGroup, operations
from hetrun.planner.two_device.expert_cost import (
    ExpertRates,
    OperationCost,
    computed,
    heat_of,
    is_share,
    mixture_of,
    rates_of,
    unknown,
)

PRODUCTS = ("linear", "head")
MOST_ASKED = 4096  # costs that are kept until the forecast is asked again
ENOUGH = 3  # runs of a segment, for its time to be believed
SHALLOW = 512  # tokens in the past of each of several sequences


@dataclass(frozen=True, slots=True)
class PassSetting:
    """A size of pass, and with how many threads it is computed."""

    tokens: int
    depth: float
    threads: int

    @property
    def several(self) -> bool:
        """Whether it is taken for a pass of as many sequences: who else has passes of a few tokens? The last
        layer works for each sequence, not for each token."""
        return 1 < self.tokens <= SMALL


@dataclass(frozen=True, slots=True)
class ClockedPass:
    """A pass: what it takes, and each of its segments from the moment it is given to its end."""

    seconds: float
    segments: Mapping[str, float]


class DeviceTimes:
    """Times of a graph's operations on either side."""

    def __init__(
        self, graph: Graph, backends: Mapping[str, Backend], forecast: WorkTimes, costs: SegmentCosts
    ) -> None:
        self._backends, self._forecast, self._costs = backends, forecast, costs
        found: dict[str, tuple[OpGroup, ...]] = {}
        for name in dict.fromkeys(coarse(op.scope).rpartition(".")[0] for op in graph.ops):
            try:
                found[name] = operations(graph, int(name.partition(".")[2]))
            except (OptionError, ValueError):
                continue  # not a layer of these operations: it stays on the host
        self._inside = frozenset(found)
        self.layers = tuple(found.values())
        self.outside = tuple(
            OpGroup(u.scope, (u.scope,), u.ops, u.form) for u in costs.units if not self._is_inside(u.scope)
        )
        layers = {f"{name}.{o.name}": o for name, layer in found.items() for o in layer}
        self._operations = layers | {o.name: o for o in self.outside}
        self._sizes = {key: sum(map(_size, o.ops)) for key, o in self._operations.items()}
        self._asked: dict[tuple[str, str, PassSetting], OperationCost | None] = {}
        self._parts = IdentityCache[Sequence[Op], Mapping[str, float]]()
        self._mixtures = IdentityCache[Sequence[Op], Mapping[str, Op]]()
        self.likely: Likely = unknown

    def fresh(self) -> None:
        """Ask the forecast again."""
        self._asked.clear()

    def _is_inside(self, scope: str) -> bool:
        return ".".join(scope.split(".")[:2]) in self._inside

    def _key(self, op: Op) -> str:
        """Whose op it is; that of a share lies deeper in the same scope."""
        parts = op.scope.split(".")
        if not self._is_inside(op.scope):
            return coarse(op.scope)
        return ".".join([*parts[:2], next((PARTS[p] for p in parts if p in PARTS), "")])

    # --- one operation

    def work(self, o: OpGroup, backend: str, at: PassSetting) -> OpWork:
        """Where its times are kept."""
        device = alone(backend) if self._backends[backend].asynchronous else backend
        return OpWork(o.form, device, at.threads, at.several)

    def able(self, o: OpGroup, backend: str) -> bool:
        """Whether a backend can run it."""
        return all(self._backends[backend].supports(op) for op in o.ops)

    def cost(self, o: OpGroup, backend: str, at: PassSetting) -> OperationCost | None:
        """What it takes there; None if it was never measured."""
        key = o.form, backend, at
        if key not in self._asked:
            if len(self._asked) >= MOST_ASKED:  # each length of a text is asked for anew
                self._asked.clear()
            self._asked[key] = self._cost(o, backend, at) if self.able(o, backend) else None
        return self._asked[key]

    def _cost(self, o: OpGroup, backend: str, at: PassSetting) -> OperationCost | None:
        work = self.work(o, backend, at)
        seconds = self._forecast.seconds(work, at.tokens, at.depth)
        if seconds is None:
            return None
        call = min(self._costs.call(backend), MOST_SAVED * seconds)
        if not self._backends[backend].asynchronous:
            return OperationCost(seconds, call)
        load = 0.0
        if self._is_streamed(o, backend):
            least = self._forecast.seconds(replace(work, several=False), 1, at.depth) or seconds
            load = max(0.0, min(least, seconds) - call)
        seconds -= load
        crossing = self.crossing(backend, FLOAT_BYTES * at.tokens * _read(o))
        return OperationCost(seconds, min(seconds, call + crossing), load)

    def _is_streamed(self, o: OpGroup, backend: str) -> bool:
        device = self._backends[backend]
        return any(device.streams(use) for use in device.wants(o.ops))

    def crossing(self, backend: str, nbytes: float) -> float:
        """Seconds that `nbytes` bytes take over a backend's link."""
        rate = self._forecast.fact(LINK, backend)
        return nbytes / rate if rate else 0.0

    def trials(self, backend: str, threads: int, context: int, ubatch: int) -> list[Trial]:
        """What to measure of a backend before operations can be placed one by one."""
        forms: dict[str, list[OpGroup]] = {}
        by_itself = self._backends[backend].asynchronous
        # What is outside of layers is measured on the host as it is.
        for o in (o for part in (*self.layers, self.outside if by_itself else ()) for o in part):
            if self.able(o, backend):
                forms.setdefault(o.form, []).append(o)
        sizes = [n for n in TOKENS if n <= min(ubatch, context)]
        deep = min(DEEP, context - max(sizes)) // 32 * 32
        found = []
        for behind in (0, deep) if deep >= 64 else (0,):
            for tokens in sizes:
                few = tokens <= SMALL
                seen = min(behind, SHALLOW) if few else behind
                for form, same in forms.items():
                    if seen and not any(isinstance(op.attrs, Attention) for op in same[0].ops):
                        continue
                    # One after the other over the link; from memory a few take turns, or a cache holds them.
                    ops = tuple(o.ops for o in same[: SAMPLES if few and not by_itself else 1])
                    each, sequences = (1, tokens) if few else (tokens, 1)
                    found.append(
                        Trial(same[0].name, form, ops, backend, threads, each, seen, sequences, by_itself)
                    )
        return found

    def works(self, plan: Plan, tokens: int) -> dict[OpWork, bool]:
        """Every operation on every backend of a plan, and whether the plan runs it there."""
        at = PassSetting(tokens, 0.0, plan.threads)
        used = {(self._operations[k].form, s.backend) for s in plan.segments for k in self._parts_of(s)}
        return {
            self.work(o, b, at): (o.form, b) in used
            for layer in self.layers
            for o in layer
            for b in {s.backend for s in plan.segments}
            if self.able(o, b)
        }

    def elsewhere(self, plan: Plan, depth: float) -> list[Trial]:
        """Operations on the backends of a plan where it does not run them. One token is enough: it says how
        fast weights come now, and a request may be waiting."""
        found: dict[OpWork, Trial] = {}
        for work, used in self.works(plan, 1).items():
            if not used:
                b = next(b for b in self._backends if work.backend in (b, alone(b)))
                o = next(o for layer in self.layers for o in layer if o.form == work.form)
                by_itself = self._backends[b].asynchronous
                seen = max(0, int(depth) - 1)
                found[work] = Trial(o.name, o.form, (o.ops,), b, work.threads, 1, seen, alone=by_itself)
        return list(found.values())

    # --- passes

    def clock(self, plan: Plan, at: PassSetting) -> ClockedPass | None:
        """What a pass takes: its stages one after the other, or the link's copies if those take longer."""
        chain, loads, found = 0.0, dict[str, float](), list[tuple[Segment, float, float, float]]()
        for stage in plan.stages:
            costs = [self._segment(s, at) for s in stage]
            known = [c for c in costs if c]
            if len(known) < len(costs):
                return None
            longest = max(c.seconds for c in known)
            chain += longest
            for s, c in zip(stage, known, strict=True):
                loads[s.backend] = loads.get(s.backend, 0.0) + c.load
                found.append((s, c.seconds, c.load, longest))
        slowest = max(loads, key=lambda b: loads[b], default="")
        wait = max(0.0, loads.get(slowest, 0.0) - chain)
        busy = sum(seconds for s, seconds, _, _ in found if not self._backends[s.backend].asynchronous)
        longer = self._beside(slowest, at) * min(busy, loads.get(slowest, 0.0))
        spans = {}
        for s, seconds, load, longest in found:
            waits = wait > 0 and load > 0 and s.backend == slowest
            spans[s.name] = longest + wait * load / loads[slowest] if waits else seconds
        slower = 1 + longer / (chain + wait) if longer else 1.0
        return ClockedPass(chain + wait + longer, {name: slower * seconds for name, seconds in spans.items()})

    def _beside(self, backend: str, at: PassSetting) -> float:
        """How much longer, relative, the host's work and what crosses take at once, as both read the same
        memory: in passes so small that the host waits for that and not for its cores."""
        return (self._forecast.fact(BESIDE, backend) or 1.0) - 1 if at.tokens <= SMALL and backend else 0.0

    def _segment(self, s: Segment, at: PassSetting) -> OperationCost | None:
        """A segment as the sum of its operations, or parts of them, which share one call."""
        times, load = list[float](), 0.0
        mixtures = self._mixtures_of(s)
        for key, some in self._parts_of(s).items():
            cost = self.cost(self._operations[key], s.backend, at)
            if cost is None:
                return None
            if op := mixtures.get(key):
                some = self._part_of_mixture(op, self._operations[key], s.backend, at)
            times.append(cost.part(some))
            load += some * cost.load
        call = self._costs.call(s.backend)
        if not times:
            return OperationCost(call, call)  # results are put together
        saved = min(call, MOST_SAVED * min(times))
        return OperationCost(sum(times) - (len(times) - 1) * saved, call, load)

    def _parts_of(self, s: Segment) -> Mapping[str, float]:
        """How much of which operation a segment has."""
        return self._parts.get(s.ops, self._divide)

    def _divide(self, ops: Sequence[Op]) -> Mapping[str, float]:
        sizes: dict[str, float] = {}
        for op in ops:
            if size := _size(op):
                name = self._key(op)
                sizes[name] = sizes.get(name, 0.0) + size / self._sizes[name]
        return sizes

    def _mixtures_of(self, s: Segment) -> Mapping[str, Op]:
        """The shares of mixtures in a segment, by operation."""
        return self._mixtures.get(s.ops, self._shares_of_mixtures)

    def _shares_of_mixtures(self, ops: Sequence[Op]) -> Mapping[str, Op]:
        return {self._key(op): op for op in ops if isinstance(op.attrs, Moe) and is_share(op.attrs)}

    def _part_of_mixture(self, op: Op, o: OpGroup, backend: str, at: PassSetting) -> float:
        """How much of a mixture's work its share has: its experts are chosen by more or fewer tokens."""
        assert isinstance(op.attrs, Moe)
        heat = heat_of(mixture_of(o), self.likely)
        rates = self.rates(o, backend, at, heat)
        return rates.part(heat, computed(op.attrs, heat), at.tokens) if rates else 0.0

    def rates(self, o: OpGroup, backend: str, at: PassSetting, heat: Floats) -> ExpertRates | None:
        """What experts of a mixture take on a backend; None if that was never measured."""
        one, many = self.cost(o, backend, replace(at, tokens=1)), self.cost(o, backend, at)
        return rates_of(one, many, heat, at.tokens) if one and many else None

    def measured(self, s: Segment, at: PassSetting) -> float | None:
        """A segment, from the moment it is given to its end, if runs of about this size were measured."""
        work = OpWork(self._costs.form(s), s.backend, at.threads)
        size = size_of(s.ops, at.tokens, at.depth)
        for one in (work, work.other):
            cells = self._forecast.measured(one).cells.values()
            if any(c.runs >= ENOUGH and distance(c, *size) < NEAR for c in cells):
                return self._forecast.seconds(one, *size)
        return None


def _size(op: Op) -> int:
    """What parts of an operation are counted by: numbers in its matrices, or heads."""
    if isinstance(op.attrs, Attention):
        return op.attrs.n_heads
    matrices = op.weights[1:MIXTURE] if op.kind == "moe" else op.weights[: op.kind in (*PRODUCTS, "embed")]
    return sum(w.shape[0] * w.shape[1] for w in matrices)


def _read(o: OpGroup) -> int:
    """Width of all that an operation reads."""
    made = {op.out for op in o.ops}
    return sum(v.width for v in {v for op in o.ops for v in op.inputs} - made)
