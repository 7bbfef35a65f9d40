"""A sweep over budgets as a table with a chart, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from hetrun.system.terminal_text import align_columns
from hetrun.system.units import format_bytes
from hetrun.tools.bench.chart import ChartMark, Series, drawn
from hetrun.tools.bench.report import with_spread
from hetrun.tools.bench.sweep.results import BudgetPoint, Sweep

OURS, BOUND = "hetrun", "bound"
Cell = Callable[[BudgetPoint, float | None], object]


def _found_by(rule: str) -> Cell:
    """The share of chosen experts that a rule would have found in memory."""

    def of(p: BudgetPoint, compute: float | None) -> float | None:
        experts = p.state.experts if p.state else None
        return getattr(experts, rule) if experts else None

    return of


# What is told of a point to programs: JSON and CSV have the same names.
FACTS: Mapping[str, Cell] = {
    "budget": lambda p, c: p.name,
    "budget_bytes": lambda p, c: p.nbytes,
    "tok_s": lambda p, c: p.tok_s,
    "samples": lambda p, c: [t.sample.tok_s for t in p.turns],
    "sample_tokens": lambda p, c: [t.sample.steps * p.batch for t in p.turns],
    "bound_tok_s": lambda p, c: p.bound(c),
    "of_bound": lambda p, c: p.of_bound(c),
    "from_cache": lambda p, c: p.cached,
    "above_bound": lambda p, c: p.above(c),
    "bytes_per_token": lambda p, c: p.middle(lambda s: s.per_step) / p.batch if p.turns else None,
    "kernel_bytes_per_token": lambda p, c: (
        p.middle(lambda s: s.read / s.steps) / p.batch if p.turns else None
    ),
    "disk_bytes_s": lambda p, c: p.middle(lambda s: s.disk_rate) if p.turns else None,
    "ceiling_bytes_s": lambda p, c: p.ceiling,
    "ceilings": lambda p, c: [c.rate for t in p.turns for c in t.ceilings],
    "waiting": lambda p, c: p.state.held.waiting if p.state else None,
    "locked_bytes": lambda p, c: p.state.held.locked if p.state else None,
    "streamed_bytes": lambda p, c: p.state.held.streamed if p.state else None,
    **{f"experts_{rule}": _found_by(rule) for rule in ("ours", "lru", "best")},
    "least_bytes": lambda p, c: p.state.held.least if p.state else None,
    "memory_bytes": lambda p, c: p.state.held.memory if p.state else None,
    "peak_bytes": lambda p, c: p.state.held.peak if p.state else None,
    "group_peak_bytes": lambda p, c: p.group_peak,
    "threads": lambda p, c: p.state.threads if p.state else None,
    "plan": lambda p, c: p.state.plan if p.state else None,
    "context": lambda p, c: p.context or None,
    "failed": lambda p, c: p.failed,
    "ratio": lambda p, c: p.ratio,
}
PEER_FACTS: Mapping[str, Cell] = {
    "name": lambda p, c: p.peer and p.peer.name,
    "version": lambda p, c: p.peer and p.peer.version,
    "threads": lambda p, c: p.peer and p.peer.threads,
    "tok_s": lambda p, c: p.peer and p.peer.tok_s,
    "samples": lambda p, c: list(p.peer.samples) if p.peer else None,
    "kernel_bytes_per_token": lambda p, c: p.peer and p.peer.per_step / p.batch,
    "group_peak_bytes": lambda p, c: p.peer and p.peer.peak,
    "failed": lambda p, c: p.peer and p.peer.failed,
    "load_mode": lambda p, c: p.peer and p.peer.load,
}


# How the peer has its weights.
HELD: Mapping[str, str] = {"mmap": "mapped and not repacked", "none": "all copied into memory"}


def to_json(sweep: Sweep) -> str:
    """What is the same for all budgets, and a row for each."""
    found = sweep.compute
    compute = found[0] if found else None
    facts: dict[str, Any] = {
        "model": sweep.model,
        "model_bytes": sweep.model_bytes,
        "test": sweep.case.name,
        "batch": sweep.case.batch,
        "kv_type": sweep.kv_type,
        "compute_s": compute,
        "compute_from": found[1] if found else None,
        "text": sweep.text.to_json() if sweep.text else None,
        "load_average": {"start": sweep.load[0], "end": sweep.load[1]},
        "rows": [],
    }
    for point in sweep.points:
        row = {name: of(point, compute) for name, of in FACTS.items()}
        peer = {name: of(point, compute) for name, of in PEER_FACTS.items()} if point.peer else None
        facts["rows"].append(row | {"peer": peer})
    return json.dumps(facts, indent=2)


def to_csv(sweep: Sweep) -> str:
    """A line for each budget; several numbers in a cell are separated by blanks."""
    compute = sweep.compute[0] if sweep.compute else None
    cells: dict[str, Cell] = {"model": lambda p, c: sweep.model, "test": lambda p, c: sweep.case.name}
    cells |= {"batch": lambda p, c: p.batch, **FACTS}
    cells |= {f"peer_{name}": of for name, of in PEER_FACTS.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(cells)
    for point in sweep.points:
        writer.writerow([_flat(of(point, compute)) for of in cells.values()])
    return text.getvalue().rstrip("\n")


def _flat(value: object) -> object:
    if isinstance(value, list):
        return " ".join("-" if v is None else f"{v:.6g}" for v in value)
    return value


def to_table(sweep: Sweep, width: int) -> str:
    """For people: a line for each budget, and all of them as a picture of that width."""
    compute = sweep.compute[0] if sweep.compute else None
    peers = [p.peer.name for p in sweep.points if p.peer]
    heads = ["budget", "GiB", "tokens/s", "of bound", "GB/token", "kernel's", "GB/s", "disk's"]
    heads += ["waiting", "locked", "peak", "group's"]
    lines = [heads + ([peers[0], "GB/token", "ratio"] if peers else [])]
    lines += [_cells(p, compute, bool(peers)) for p in sweep.points]
    chart = drawn(series(sweep), width, "tokens/s", "GiB")
    picture = [chart, ""] if chart else []
    return "\n".join([*align_columns(lines, left={0}), "", *picture, *_footer(sweep, peers)])


def _cells(p: BudgetPoint, compute: float | None, peers: bool) -> list[str]:
    speed = with_spread([t.sample.tok_s for t in p.turns], 2) if p.turns else "-"
    cells = [p.name, _gib(p.nbytes), speed]
    share = p.of_bound(compute)
    cells.append("-" if share is None else f"{share:.0%}" + (" !" if p.above(compute) else ""))
    if p.turns:
        cells += [_gb(p.middle(lambda s: s.per_step) / p.batch)]
        cells += [_gb(p.middle(lambda s: s.read / s.steps) / p.batch) + (" c" if p.cached else "")]
        cells += [_gb(p.middle(lambda s: s.disk_rate)), _gb(p.ceiling)]
    else:
        cells += ["-"] * 4
    if p.state:
        held = p.state.held
        cells += [f"{held.waiting:.0%}", _gib(held.locked), _gib(held.peak), _gib(p.group_peak)]
    else:
        cells += ["-"] * 3 + [_gib(p.group_peak)]
    if peers:
        theirs = p.peer
        cells.append(with_spread(theirs.samples, 2) if theirs and theirs.samples else "-")
        cells.append(_gb(theirs.per_step / p.batch) if theirs and theirs.samples else "-")
        cells.append("-" if p.ratio is None else f"{p.ratio:.2f}")
    return cells


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


def _gb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.3f}" if nbytes else "0"


def _footer(sweep: Sweep, peers: list[str]) -> list[str]:
    case = sweep.case
    lines = [
        f"{sweep.model}, {format_bytes(sweep.model_bytes)}: answers after {case.prompt} tokens"
        + (f", {case.batch} at once" if case.batch > 1 else "")
        + f", keys and values in {sweep.kv_type.upper()}; numbers: median ± half the range"
    ]
    if sweep.text:
        lines.append(sweep.text.told)
    if sweep.compute:
        lines.append(
            "of bound: of 1 / max(computing, bytes read / ceiling); a step computes for "
            f"{1000 * sweep.compute[0]:.1f} ms ({sweep.compute[1]}), and the ceiling is what the disk gave "
            "past the page cache right before and behind each sample (column disk's)"
        )
    lines.append(
        "GB/token: weights that our readers brought, beside all that the kernel fetched for the process; "
        "locked, peak, group's: GiB of weights in memory, and the most memory of the process and of its group"
    )
    ways = {c.text for p in sweep.points for t in p.turns for c in t.ceilings if not c.direct}
    lines += [f"ceiling: {way}" for way in sorted(ways)]
    if any(p.above(sweep.compute[0] if sweep.compute else None) for p in sweep.points):
        lines.append("!: faster than it can have been: a cache between the disk and us, or a mistake")
    if any(p.cached for p in sweep.points):
        lines.append("c: some of it came from the page cache, and not from the disk: speeds are too good")
    lines += [f"{p.name}: {p.state.experts.text}" for p in sweep.points if p.state and p.state.experts]
    if sweep.groupless:
        lines.append(f"group's: unknown, {sweep.groupless}")
    lines += [f"{p.name}: {p.failed}" for p in sweep.points if p.failed]
    for p in sweep.points:
        if p.peer and p.peer.failed:
            lines.append(f"{p.name}, {p.peer.name}: {p.peer.failed}")
    if peers:
        lines.append(_about(sweep, peers[0]))
    lines.append(f"load average: {sweep.load[0]:.2f} at the start, {sweep.load[1]:.2f} at the end")
    return lines


def _about(sweep: Sweep, name: str) -> str:
    versions = sorted({p.peer.version for p in sweep.points if p.peer and p.peer.version})
    threads = sorted({str(p.peer.threads) for p in sweep.points if p.peer and p.peer.threads})
    loads = sorted({HELD.get(p.peer.load, p.peer.load) for p in sweep.points if p.peer})
    return (
        f"{name}: {', '.join(versions) or 'never loaded'}, {' or '.join(loads)}, in a group of just the "
        f"budget, with {' or '.join(threads) or 'no'} threads and the context that the case needs; hetrun: "
        "in a group of twice the budget; both in turn, A B B A; ratio: median over the pairs"
    )


def series(sweep: Sweep) -> list[Series]:
    """What is drawn: tokens per second over GiB. Where all weights are in memory, at what that took."""
    compute = sweep.compute[0] if sweep.compute else None
    found = [
        Series(OURS, [ChartMark(at, p.tok_s, p.name) for p, at in _placed(sweep) if p.tok_s]),
        Series(BOUND, [ChartMark(at, b, p.name) for p, at in _placed(sweep) if (b := p.bound(compute))]),
    ]
    peers = [(p.peer, at, p.name) for p, at in _placed(sweep) if p.peer]
    if peers:
        marks = [ChartMark(at, peer.tok_s, name) for peer, at, name in peers if peer.tok_s]
        found.append(Series(peers[0][0].name, marks))
    return [s for s in found if s.marks]


def _placed(sweep: Sweep) -> list[tuple[BudgetPoint, float]]:
    """Each point, and the GiB that it stands at."""
    found = [(p, p.nbytes if p.nbytes is not None else _whole(p)) for p in sweep.points]
    return sorted(((p, n / 2**30) for p, n in found if n is not None), key=lambda pair: pair[1])


def _whole(point: BudgetPoint) -> int | None:
    return point.state.held.peak if point.state else None
