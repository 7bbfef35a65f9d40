"""Plans: which backend runs what, in which order, and why. A plan can be printed, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetrun.backend import Segment
from hetrun.errors import OptionError
from hetrun.graph import Graph, Op, Value, in_scope

BUCKETS = ("1", "2-4", "5-8", "9-16", "17-64", "65-256", "257+")
_ENDS = (1, 4, 8, 16, 64, 256)
FORMAT = 1


def bucket_of(tokens: int) -> str:
    """The bucket of a pass of so many tokens: the best backend for one token is not the best for 512."""
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


@dataclass(frozen=True, slots=True)
class Plan:
    """For one token bucket: stages one after the other; the segments of a stage run side by side."""

    bucket: str
    threads: int
    placements: tuple[Placement, ...]
    stages: tuple[tuple[Segment, ...], ...]

    @property
    def segments(self) -> list[Segment]:
        """All segments in order."""
        return [s for stage in self.stages for s in stage]


@dataclass(frozen=True, slots=True)
class PlanSet:
    """A plan for each bucket, how a step is cut into passes, and what it all costs in memory."""

    plans: Mapping[str, Plan]
    ubatch: int
    ubatch_why: str
    memory: Mapping[str, int] = field(default_factory=dict)
    promises_off: tuple[str, ...] = ()

    def plan(self, tokens: int) -> Plan:
        """The plan for a pass of so many tokens."""
        return self.plans[bucket_of(tokens)]

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
            "memory": dict(self.memory),
            "promises_off": list(self.promises_off),
            "plans": [
                {
                    "bucket": p.bucket,
                    "threads": p.threads,
                    "placements": [asdict(x) for x in p.placements],
                    "stages": [[_segment_json(s) for s in stage] for stage in p.stages],
                }
                for p in self.plans.values()
            ],
        }

    def to_text(self) -> str:
        """For people."""
        lines = [f"{'tokens':>7}  {'segment':<22} {'backend':<10} threads  why"]
        for names, p in _grouped(self.plans):
            lines += [f"{names:>7}  {s.name:<22} {s.backend:<10} {p.threads:>7}  {s.why}" for s in p.segments]
        lines.append(f"a step of more than {self.ubatch} tokens is cut: {self.ubatch_why}")
        lines += [f"{name:>22}: {size / 2**20:10.1f} MiB" for name, size in self.memory.items()]
        lines += [f"not promised: {x}" for x in self.promises_off]
        return "\n".join(lines)


def _segment_json(s: Segment) -> dict[str, Any]:
    return {"name": s.name, "backend": s.backend, "ops": len(s.ops), "why": s.why}


def _grouped(plans: Mapping[str, Plan]) -> list[tuple[str, Plan]]:
    """Buckets with the same stages and threads in one row."""
    groups: list[tuple[list[str], Plan]] = []
    for bucket, plan in plans.items():
        if groups and (groups[-1][1].stages, groups[-1][1].threads) == (plan.stages, plan.threads):
            groups[-1][0].append(bucket)
        else:
            groups.append(([bucket], plan))
    return [("all" if len(names) == len(BUCKETS) else ",".join(names), plan) for names, plan in groups]


def make_plan(graph: Graph, bucket: str, threads: int, placements: Sequence[Placement]) -> Plan:
    """Cut a graph by placements."""
    return Plan(bucket, threads, tuple(placements), cut(graph, placements))


def load_placements(path: Path, graph: Graph) -> dict[str, tuple[int, list[Placement]]]:
    """Bucket -> threads and placements, from a saved plan."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise OptionError(
                f"{path}: plan format {data['format']} is not known; this version reads {FORMAT}"
            )
        found = {
            str(p["bucket"]): (int(p["threads"]), [Placement(**placement) for placement in p["placements"]])
            for p in data["plans"]
        }
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise OptionError(f"{path} is not a plan as `hetrun plan --json` writes it: {e}") from e
    if missing := [b for b in BUCKETS if b not in found]:
        raise OptionError(f"{path} has no plan for steps of {', '.join(missing)} tokens")
    return found


def place(op: Op, placements: Sequence[Placement]) -> Placement:
    """The last placement whose scope holds the op."""
    for placement in reversed(placements):
        if in_scope(op.scope, placement.scope):
            return placement
    raise OptionError(f"the plan places {op.scope} nowhere; add a placement for it or for the empty scope")


def cut(graph: Graph, placements: Sequence[Placement]) -> tuple[tuple[Segment, ...], ...]:
    """Stages of segments. An op runs as late as it can without making anything wait, so that work of one device
    that nobody needs yet ends up beside the work of another."""
    chosen = [place(op, placements) for op in graph.ops]
    stage = _latest(graph, chosen, _earliest(graph, chosen))
    groups: dict[tuple[int, str], list[int]] = {}
    for i, op_stage in enumerate(stage):
        groups.setdefault((op_stage, chosen[i].backend), []).append(i)
    needed = {v for v in graph.outputs}
    segments: dict[int, list[Segment]] = {}
    for (s, backend), members in groups.items():
        inside = {graph.ops[i].out for i in members}
        elsewhere = {v for i, op in enumerate(graph.ops) if i not in set(members) for v in op.inputs}
        ops = tuple(graph.ops[i] for i in members)
        reads = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in inside))
        writes = tuple(op.out for op in ops if op.out in elsewhere or op.out in needed)
        why = "; ".join(dict.fromkeys(chosen[i].why for i in members))
        segments.setdefault(s, []).append(Segment(_name(ops, graph), backend, ops, reads, writes, why))
    return tuple(tuple(segments[s]) for s in sorted(segments))


def _earliest(graph: Graph, chosen: Sequence[Placement]) -> list[int]:
    """The first stage in which each op can run: that of its inputs, or the next where the backend changes."""
    made: dict[Value, int] = {}
    stage: list[int] = []
    for i, op in enumerate(graph.ops):
        before = [stage[made[v]] + (chosen[made[v]].backend != chosen[i].backend) for v in op.inputs]
        stage.append(max(before, default=0))
        made[op.out] = i
    return stage


def _latest(graph: Graph, chosen: Sequence[Placement], earliest: list[int]) -> list[int]:
    """Move each op as late as its readers allow; what nobody reads inside the graph stays at the end of its stage."""
    readers: dict[Value, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for v in op.inputs:
            readers.setdefault(v, []).append(i)
    stage = list(earliest)
    for i in reversed(range(len(graph.ops))):
        after = [
            stage[r] - (chosen[r].backend != chosen[i].backend) for r in readers.get(graph.ops[i].out, [])
        ]
        stage[i] = max(min(after), earliest[i]) if after else stage[i]
    return stage


def _name(ops: Sequence[Op], graph: Graph) -> str:
    """What a segment holds, in scopes: `blk.3.attn`, `embed..output.head`."""
    if len(ops) == len(graph.ops):
        return "model"
    scopes = list(dict.fromkeys(op.scope for op in ops))
    parts = [s.split(".") for s in scopes]
    common = [a for a, *rest in zip(*parts, strict=False) if all(a == r for r in rest)]
    return ".".join(common) if common else f"{scopes[0]}..{scopes[-1]}"
