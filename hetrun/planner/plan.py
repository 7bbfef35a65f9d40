"""Plans: which backend runs what, in which order, and why. A plan can be printed, saved and loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from textwrap import wrap
from typing import Any

from hetrun.backend import Backend, Precision, Segment
from hetrun.errors import OptionError
from hetrun.graph import Graph, Op, Value
from hetrun.graph.sharding import Share, divide
from hetrun.memory.breakdown import settled, table
from hetrun.planner.rates import Residence, TokenRates
from hetrun.system.terminal_text import align_columns

# The last are passes of prompts: as many tokens as a host computes at once, and more, as devices take them.
BUCKETS: tuple[str, ...] = (
    *("1", "2-4", "5-8", "9-16", "17-32", "33-64", "65-256"),
    *("257-512", "513+"),
)
_ENDS = (1, 4, 8, 16, 32, 64, 256, 512)
FORMAT = 1
CROSSINGS = 4  # values of the usual width that plans of long passes leave on the host
BY_ORDER = "first in the fixed order"
MEASURED = "nothing else that was measured is faster"


def bucket_of(tokens: int) -> str:
    """The bucket of a pass of this many tokens: the best backend for one token is not the best for 512."""
    for bucket, end in zip(BUCKETS, _ENDS, strict=False):
        if tokens <= end:
            return bucket
    return BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class Placement:
    """Everything in a scope runs on a backend. Later placements of a list overrule earlier ones."""

    scope: str
    backend: str
    why: str
    share: Share | None = None  # only this part of the scope; others place the rest


Buckets = Mapping[str, tuple[int, tuple[Placement, ...]]]  # bucket -> threads and placements
Stages = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """For one token bucket: stages one after the other; the segments of a stage run side by side."""

    bucket: str
    threads: int
    placements: tuple[Placement, ...]
    stages: Stages
    on_devices: bool = False  # devices do all that grows with the tokens of a pass

    @property
    def segments(self) -> list[Segment]:
        """All segments in order."""
        return [s for stage in self.stages for s in stage]

    @property
    def places(self) -> list[tuple[str, str]]:
        """Which backend runs which segment."""
        return [(s.name, s.backend) for s in self.segments]

    @property
    def backends(self) -> frozenset[str]:
        """The backends in use."""
        return frozenset(s.backend for s in self.segments)


IN_FORCE: Mapping[Precision, str] = {
    "exact": "activations are rounded to 16 bits, or to bf16",
    "fast": "activations are rounded to 8 bits; with --precision exact prompts take about twice as long",
}
Times = Mapping[str, tuple[float, float | None]]  # segment -> seconds predicted, and measured if it ran


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """What a typical pass of a bucket takes, and each segment of it from when it is given to its end."""

    tokens: int
    depth: float  # tokens that one of them sees
    segments: Times


@dataclass(frozen=True, slots=True)
class PlanSet:
    """A plan for each bucket, how a step is cut into passes, and what it all costs in memory."""

    plans: Mapping[str, Plan]
    ubatch: int
    ubatch_why: str
    memory: Mapping[str, int] = field(default_factory=dict)
    promises_off: tuple[str, ...] = ()
    expected: Mapping[str, ExpectedTimes] = field(
        default_factory=dict
    )  # by bucket; empty: nothing was measured
    reason: str = ""  # why this set took the place of another
    precision: Precision | None = None  # of products; None: of a library that runs models as a whole
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # bills of their own memory
    notes: tuple[str, ...] = ()  # what else was decided and why: of weights that come from disk
    context: int = 0  # tokens of the longest text; 0: unknown
    context_why: str = ""  # by which rule
    weights: Residence | None = None
    rates: TokenRates | None = None  # of a plan that does not run yet
    host_ubatch: int = 0  # the most tokens of passes in which the host computes; 0: as many as in others

    def most_of(self, plan: Plan) -> int:
        """The most tokens of a pass by this plan."""
        return min(self.ubatch, most_on_host(plan, self.host_ubatch) or self.ubatch)

    def plan(self, tokens: int) -> Plan:
        """The plan for a pass of this many tokens."""
        return self.plans[bucket_of(tokens)]

    def most_alike(self, backends: Mapping[str, Backend]) -> int:
        """The most rows that may share a pass so that none of a row's bits tell who was beside it.

        They must run where a single one does."""
        single, places = self.plan(1).segments, self.plan(1).places
        rows = min(backends[s.backend].alike(s.ops) for s in single)
        begins = (1, *(end + 1 for end in _ENDS))  # of buckets: backends may take a million rows
        return rows if all(self.plan(n).places == places for n in begins if n <= rows) else 1

    def alike(self, backends: Mapping[str, Backend]) -> int:
        """The most rows of a pass that have the bits that each has in a pass of its own: in plans for more,
        other backends may run."""
        single, places = self.plan(1).segments, self.plan(1).places
        rows = min(backends[s.backend].alike(s.ops) for s in single)
        ends = [end for end in (*_ENDS, rows) if end <= rows]
        return max((end for end in takewhile(lambda end: self.plan(end).places == places, ends)), default=1)

    @property
    def backends(self) -> list[str]:
        """The backends in use."""
        return list(dict.fromkeys(s.backend for p in self.plans.values() for s in p.segments))

    def to_json(self) -> dict[str, Any]:
        """Everything, for `plan --json` and for saving."""
        return {
            "format": FORMAT,
            "ubatch": self.ubatch,
            "ubatch_why": self.ubatch_why,
            **({"host_ubatch": self.host_ubatch} if self.host_ubatch else {}),
            "context": self.context,
            "context_why": self.context_why,
            "weights": self.weights and asdict(self.weights),
            "rates": self.rates and asdict(self.rates),
            "memory": settled(self.memory),
            "device_memory": {name: settled(bill) for name, bill in self.devices.items()},
            "promises_off": list(self.promises_off),
            "reason": self.reason,
            "precision": self.precision,
            "notes": list(self.notes),
            "plans": [self._plan_json(p) for p in self.plans.values()],
        }

    def _plan_json(self, p: Plan) -> dict[str, Any]:
        e = self.expected.get(p.bucket)
        times = e.segments if e else {}
        facts: dict[str, Any] = {"bucket": p.bucket, "threads": p.threads}
        if e:
            facts["expected"] = {"tokens": e.tokens, "depth": e.depth} | _sums(p.stages, times)
        facts["placements"] = [_placement_json(x) for x in p.placements]
        facts["stages"] = [
            [_segment_json(replace(s, why=self._why(p, s)), times.get(s.name)) for s in stage]
            for stage in p.stages
        ]
        return facts

    def _why(self, p: Plan, s: Segment) -> str:
        """A plan by a fixed order that stays once times are known has a better reason than the order."""
        measured = p.bucket in self.expected and self.expected[p.bucket].segments
        return MEASURED if measured and s.why.startswith(BY_ORDER) else s.why

    def to_text(self) -> str:
        """For people."""
        lines: list[str] = []
        for promise in self._promises():
            lines += wrap(promise, 80, subsequent_indent="  ", break_on_hyphens=False)
        rows = [("tokens", "segment", "backend", "threads", "why")]
        for names, p in _grouped(self.plans):
            alike = _alike([replace(s, why=self._why(p, s)) for s in p.segments])
            rows += [(names, name, backend, str(p.threads), why) for name, backend, why in alike]
        lines += align_columns(rows, left={1, 2, 4}, least=(7, 21, 9))
        if self.reason:
            lines.append(f"last change: {self.reason}")
        if self.precision:
            lines.append(f"precision {self.precision}: {IN_FORCE[self.precision]}")
        lines += [f"passes have at most {self.ubatch} tokens: {self.ubatch_why}", *table(self.memory)]
        for name, bill in self.devices.items():
            lines += table(bill, name)
        for x in (*self.notes, *[f"not promised: {x}" for x in self.promises_off]):
            lines += wrap(x, 80, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)

    def _promises(self) -> Iterator[str]:
        """What people want to know first."""
        if self.context:
            yield f"context: {self.context:,} tokens, {self.context_why}"
        if self.weights:
            yield f"weights: {self.weights.words}"
        if self.rates:
            yield f"speed: {self.rates.words}"


def _placement_json(p: Placement) -> dict[str, Any]:
    facts = asdict(p)
    if p.share is None:
        del facts["share"]
    else:
        usual = {"order": (), "whole": False, "moving": False}
        named = (p.share.order or p.share.whole) and ("order", "whole")
        facts["share"] = {
            name: value
            for name, value in facts["share"].items()
            if name not in usual or value or (named and name in named)
        }
    return facts


def _segment_json(s: Segment, times: tuple[float, float | None] | None) -> dict[str, Any]:
    facts = {"name": s.name, "backend": s.backend, "ops": len(s.ops), "why": s.why}
    predicted, measured = times or (None, None)
    return facts | {"predicted_s": predicted, "measured_s": measured}


def _sums(stages: Sequence[Sequence[Segment]], times: Times) -> dict[str, float | None]:
    """Seconds of a pass: its stages one after the other, each as long as its longest segment. Measured only
    if every segment was; nothing is said of segments of which nothing is known."""
    found = [[times[s.name] for s in stage if s.name in times] for stage in stages] if times else []
    if not any(found):
        return {"predicted_s": None, "measured_s": None}
    predicted = sum(max((p for p, _ in stage), default=0.0) for stage in found)
    known = all(m is not None for stage in found for _, m in stage)
    measured = sum(max((m or 0.0 for _, m in stage), default=0.0) for stage in found) if known else None
    return {"predicted_s": predicted, "measured_s": measured}


def _grouped(plans: Mapping[str, Plan]) -> list[tuple[str, Plan]]:
    """Neighbouring buckets with the same stages and threads, as one range of tokens."""
    groups: list[tuple[list[str], Plan]] = []
    for bucket, plan in plans.items():
        if groups and (groups[-1][1].stages, groups[-1][1].threads) == (plan.stages, plan.threads):
            groups[-1][0].append(bucket)
        else:
            groups.append(([bucket], plan))
    return [("all" if len(names) == len(BUCKETS) else _range(names), plan) for names, plan in groups]


def _alike(segments: Sequence[Segment]) -> list[tuple[str, str, str]]:
    """Name, backend and reason of each segment; layers that differ only by number are one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for s in segments:
        found.setdefault((re.sub(r"blk\.\d+", "blk.*", s.name), s.backend, s.why), []).append(s.name)
    return [
        (f"{pattern} x{len(names)}" if len(names) > 1 else names[0], backend, why)
        for (pattern, backend, why), names in found.items()
    ]


def _range(buckets: Sequence[str]) -> str:
    """5-8 and 9-16 are 5-16; 257-512 and 513+ are 257+."""
    first, last = buckets[0].split("-")[0], buckets[-1].split("-")[-1]
    if first == last:
        return first
    return f"{first.rstrip('+')}+" if last.endswith("+") else f"{first}-{last}"


def make_plans(graph: Graph, buckets: Buckets, alone: Collection[str] = ()) -> dict[str, Plan]:
    """A plan for each bucket; what `alone` means stands at `cut`.

    Buckets with the same placements share their stages: what is compiled for one is found by the others.
    """
    cuts: dict[tuple[Placement, ...], Stages] = {}
    for _, placements in buckets.values():
        if placements not in cuts:
            cuts[placements] = cut(graph, placements, alone)
    there = {placed: on_devices(graph, stages, alone) for placed, stages in cuts.items()}
    return {b: Plan(b, n, placed, cuts[placed], there[placed]) for b, (n, placed) in buckets.items()}


def most_on_host(plan: Plan, host_ubatch: int) -> int:
    """The most tokens of a pass by a plan, because the host computes; 0: nothing says so."""
    return 0 if plan.on_devices else host_ubatch


def on_devices(graph: Graph, stages: Stages, alone: Collection[str]) -> bool:
    """Whether the host does no more in a pass of many tokens than to look rows up and to judge the last ones,
    and few values cross."""
    segments = [s for stage in stages for s in stage]
    mine = (op for s in segments if s.backend not in alone for op in s.ops)
    if not alone or any(op.out.rows == "tokens" and op.kind != "embed" for op in mine):
        return False
    return sum(v.width for s in segments for v in s.writes if v.rows == "tokens") <= crossing_width(graph)


def crossing_width(graph: Graph) -> int:
    """Of each token, how many numbers that one segment makes and another reads lie on the host at once."""
    return CROSSINGS * next(op.out.width for op in graph.ops if op.kind == "embed")


def share_out(graph: Graph, placements: Sequence[Placement]) -> tuple[Graph, tuple[Placement, ...]]:
    """The graph in which shares are scopes, and the placements of those in their places.

    What a share places is placed by nothing else, so they come last.
    """
    shares: dict[str, list[Share]] = {}
    whole, parts = [], []
    for p in placements:
        if p.share is None:
            whole.append(p)
        else:
            shares.setdefault(p.scope, []).append(p.share)
            parts.append(replace(p, scope=p.share.scope(p.scope), share=None))
    return (divide(graph, shares) if shares else graph), (*whole, *parts)


def place(ops: Iterable[Op], placements: Sequence[Placement]) -> list[Placement]:
    """For each op, the last placement whose scope holds it."""
    last = {p.scope: i for i, p in enumerate(placements)}
    found: dict[str, int | None] = {}
    chosen = []
    for op in ops:
        if op.scope not in found:
            found[op.scope] = max((last[s] for s in _enclosing(op.scope) if s in last), default=None)
        if (i := found[op.scope]) is None:
            raise OptionError(
                f"the plan has no placement for {op.scope}; add one for it or for the empty scope"
            )
        chosen.append(placements[i])
    return chosen


def _enclosing(scope: str) -> Iterator[str]:
    """A scope, those above it, and the empty one."""
    while scope:
        yield scope
        scope = scope.rpartition(".")[0]
    yield ""


def cut(graph: Graph, placements: Sequence[Placement], alone: Collection[str] = ()) -> Stages:
    """Stages of segments: ops of one backend that follow each other are one segment.

    `alone` names the backends that work by themselves, while the thread that gave them work goes on. What can
    run beside such work is put into its stage; anything else runs as late as its readers allow.
    """
    graph, placements = share_out(graph, placements)
    chosen = place(graph.ops, placements)
    backends = [p.backend for p in chosen]
    groups = list(zip(_Stages(graph, backends, alone).choose(), backends, strict=True))
    made = {op.out: group for op, group in zip(graph.ops, groups, strict=True)}
    read = [(v, group) for op, group in zip(graph.ops, groups, strict=True) for v in op.inputs]
    leaving = {v for v, group in read if v in made and made[v] != group}
    leaving.update(graph.outputs)
    members: dict[tuple[int, str], list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    stages: dict[int, list[Segment]] = {}
    names: dict[str, int] = {}
    for group in sorted(members, key=lambda g: g[0]):
        ops = tuple(graph.ops[i] for i in members[group])
        why = "; ".join(dict.fromkeys(chosen[i].why for i in members[group]))
        # Measurements are kept by name, so pieces of one scope must not share it.
        name = _name(ops, graph)
        names[name] = names.get(name, 0) + 1
        name += f"#{names[name]}" if names[name] > 1 else ""
        stages.setdefault(group[0], []).append(segment_of(name, group[1], ops, leaving, why))
    return tuple(tuple(segments) for segments in stages.values())


def segment_of(name: str, backend: str, ops: tuple[Op, ...], leaving: Collection[Value], why: str) -> Segment:
    """Ops as one segment: it reads what they do not make, and gives what of theirs is `leaving`."""
    inside = {op.out for op in ops}
    reads = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in inside))
    writes = tuple(op.out for op in ops if op.out in leaving)
    return Segment(name, backend, ops, reads, writes, why)


def up_to(stages: Stages, value: Value) -> Stages:
    """What a value needs of these stages; nothing else comes of them."""
    return _only(stages, _needed(stages, value), "hidden")


def after(stages: Stages, value: Value, what: str) -> Stages:
    """What is left of these stages where a value is there already; what that is called."""
    made = {op.out for stage in stages for segment in stage for op in segment.ops}
    return _only(stages, made - _needed(stages, value), what)


def between(stages: Stages, values: Sequence[Value], number: int) -> Stages:
    """Of these stages, cut where each of some values is there, which come one after the other, the part of a
    number."""
    before = _needed(stages, values[number - 1]) if number else set[Value]()
    made = {op.out for stage in stages for segment in stage for op in segment.ops}
    mine = (_needed(stages, values[number]) if number < len(values) else made) - before
    later = [op for stage in stages for segment in stage for op in segment.ops if op.out not in mine | before]
    crossing = {v for op in later for v in op.inputs}
    if number < len(values):
        crossing.add(values[number])
    return _only(stages, mine, f"rows {number}", crossing)


def _needed(stages: Stages, value: Value) -> set[Value]:
    needed = {value}
    for op in reversed([op for stage in stages for segment in stage for op in segment.ops]):
        if op.out in needed:
            needed.update(op.inputs)
    return needed


def _only(stages: Stages, values: Collection[Value], what: str, crossing: Collection[Value] = ()) -> Stages:
    shorter = [[_part(segment, values, what, crossing) for segment in stage] for stage in stages]
    return tuple(kept for stage in shorter if (kept := tuple(s for s in stage if s.ops)))


def _part(segment: Segment, values: Collection[Value], what: str, crossing: Collection[Value]) -> Segment:
    """The part of a segment that makes some values, of which others than the segment's own may be `crossing`
    to what is left. It is measured by itself, so it has a name."""
    ops = tuple(op for op in segment.ops if op.out in values)
    if len(ops) == len(segment.ops):
        return segment
    leaving = [v for v in (*segment.writes, *crossing) if v in values]
    return segment_of(f"{segment.name} ({what})", segment.backend, ops, leaving, segment.why)


class _Stages:
    """In which stage each op of a graph runs."""

    def __init__(self, graph: Graph, backends: Sequence[str], alone: Collection[str]) -> None:
        self._ops = graph.ops
        self._backends = backends
        self._alone = alone
        made = {op.out: i for i, op in enumerate(graph.ops)}
        self._makers = [[made[v] for v in op.inputs if v in made] for op in graph.ops]
        self._readers: list[list[int]] = [[] for _ in graph.ops]
        for i, makers in enumerate(self._makers):
            for maker in makers:
                self._readers[maker].append(i)

    def choose(self) -> list[int]:
        """Every op after its makers; if the backend changes, in a later stage."""
        earliest: list[int] = []
        for i in range(len(self._ops)):
            earliest.append(self._after_makers(i, earliest))
        latest = list(earliest)
        for i in reversed(range(len(self._ops))):
            before = [latest[r] - self._changes(i, r) for r in self._readers[i]]
            latest[i] = min(before, default=earliest[i])
        if self._alone and len(set(self._backends)) > 1:
            return self._beside(earliest, latest)
        return latest

    def _beside(self, earliest: Sequence[int], latest: Sequence[int]) -> list[int]:
        """Work with time to spare goes where another device is busy and its own is not."""
        busy: dict[int, set[str]] = {}
        for i, backend in enumerate(self._backends):
            if earliest[i] == latest[i]:
                busy.setdefault(earliest[i], set()).add(backend)
        stages: list[int] = []
        for i, backend in enumerate(self._backends):
            possible = range(self._after_makers(i, stages), latest[i])
            found = (s for s in possible if self._runs_beside(backend, busy.get(s, set())))
            stages.append(next(found, latest[i]))
        return stages

    def _runs_beside(self, backend: str, busy: set[str]) -> bool:
        return backend not in busy and any(backend in self._alone or b in self._alone for b in busy)

    def _after_makers(self, i: int, stages: Sequence[int]) -> int:
        return max((stages[m] + self._changes(m, i) for m in self._makers[i]), default=0)

    def _changes(self, maker: int, reader: int) -> int:
        return int(self._backends[maker] != self._backends[reader])


def _name(ops: Sequence[Op], graph: Graph) -> str:
    """What a segment holds, in scopes: `blk.3.attn`, `embed..blk.3.attn.norm`."""
    if len(ops) == len(graph.ops):
        return "model"
    scopes = list(dict.fromkeys(op.scope for op in ops))
    parts = [s.split(".") for s in scopes]
    common = [a for a, *rest in zip(*parts, strict=False) if all(a == r for r in rest)]
    numbers = all(p[len(common) : len(common) + 1] and p[len(common)].isdigit() for p in parts)
    return ".".join(common) if common and not numbers else f"{scopes[0]}..{scopes[-1]}"
