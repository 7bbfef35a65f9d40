"""What was measured of servers as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hetrun.system.terminal_text import align_columns
from hetrun.tools.bench.report import with_spread
from hetrun.tools.bench.serving.benchmark import ServingReport, ServingRow, ServingSide, percentile, quotient
from hetrun.tools.bench.serving.cases import ArrivalCase, LoadCase, PrefixCase

Number = Callable[[ServingSide], float]


def _middle(spans: str) -> Number:
    return lambda side: median(side.spans(spans))


def _slow(spans: str) -> Number:
    return lambda side: percentile(side.spans(spans), 99)


def _count(name: str) -> Number:
    return lambda side: side.count(name)


def _quotient(above: Number, below: Number) -> Number:
    return lambda side: quotient(above(side), below(side))


# What is told of each kind of case besides the number it is about. Names end with their unit.
NUMBERS: Mapping[type, Mapping[str, Number]] = {
    LoadCase: {
        "first_median_s": _middle("first"),
        "first_p99_s": _slow("first"),
        "gap_median_s": _middle("gaps"),
        "gap_p99_s": _slow("gaps"),
        "prompt_tokens": _count("prompt_tokens"),
        "cached_tokens": _count("cached_tokens"),
        "clients_cpu": _count("clients_cpu"),
        "front_cpu": _count("front_cpu"),
        "others_cpu": _count("others_cpu"),
    },
    PrefixCase: {
        "first_request_s": _middle("first request"),
        "second_request_s": _middle("second request"),
        "prompt_tokens": _count("prompt_tokens"),
        "cached_tokens": _count("cached_tokens"),
    },
    ArrivalCase: {
        "quiet_median_s": _middle("quiet"),
        "quiet_p99_s": _slow("quiet"),
        "during_median_s": _middle("during"),
        "during_p99_s": _slow("during"),
        "median_ratio": _quotient(_middle("during"), _middle("quiet")),
        "newcomer_alone_s": _middle("newcomer alone"),
        "newcomer_beside_s": _middle("newcomer beside"),
        "newcomer_ratio": _quotient(_middle("newcomer beside"), _middle("newcomer alone")),
    },
}
# What a case is about.
ABOUT: Mapping[type, str] = {LoadCase: "tok_s", PrefixCase: "times_faster", ArrivalCase: "p99_ratio"}
UNTABLED = ("prompt_tokens",)  # it is what was asked for, mostly
HEADS = {"clients_cpu": "clients' CPU", "front_cpu": "front's CPU", "others_cpu": "other CPU"}


def to_json(report: ServingReport) -> str:
    """A list of rows."""
    return json.dumps([_as_json(row, report) for row in report.rows], indent=2)


def _as_json(row: ServingRow, report: ServingReport) -> dict[str, Any]:
    peer = None
    if row.theirs and report.peer:
        build = {"version": report.peer.version, "features": report.peer.features}
        peer = {"name": row.theirs.name} | build | _numbers(row, row.theirs)
    head = {"model": row.model, "test": row.case.name, "clients": row.case.clients}
    load = {"start": row.load[0], "end": row.load[1]}
    return head | _numbers(row, row.ours) | {"peer": peer, "ratio": row.ratio, "load_average": load}


def _numbers(row: ServingRow, side: ServingSide) -> dict[str, Any]:
    main = {ABOUT[type(row.case)]: side.value, "samples": [s.value for s in side.samples]}
    return main | {"threads": side.threads} | {n: f(side) for n, f in NUMBERS[type(row.case)].items()}


COLUMNS = ("model", "test", "clients", "server", "number", "value")


def to_csv(report: ServingReport) -> str:
    """A line for each number of each server."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in report.rows:
        for side in _sides(row):
            numbers = _numbers(row, side)
            samples = " ".join(f"{value:.6g}" for value in numbers.pop("samples"))
            for name, value in (numbers | {"samples": samples}).items():
                writer.writerow([row.model, row.case.name, row.case.clients, side.name, name, value])
        if row.ratio is not None:
            writer.writerow([row.model, row.case.name, row.case.clients, "", "ratio", row.ratio])
    return text.getvalue().rstrip("\n")


def to_table(report: ServingReport) -> str:
    """For people: one table for each kind of case."""
    tables = []
    for kind in NUMBERS:
        rows = [row for row in report.rows if isinstance(row.case, kind)]
        if rows:
            tables.append(_table(kind, rows))
    return "\n\n".join([*tables, "\n".join(_footer(report))])


def _table(kind: type, rows: Sequence[ServingRow]) -> str:
    names = [name for name in NUMBERS[kind] if name not in UNTABLED]
    lines = [["test", "server", _head(ABOUT[kind]), *map(_head, names), "ratio"]]
    for row in rows:
        for side in _sides(row):
            values = (_cell(name, NUMBERS[kind][name](side)) for name in names)
            ratio = f"{row.ratio:.3f}" if row.ratio is not None and side is row.ours else ""
            lines.append([row.case.name, side.name, _spread(side), *values, ratio])
    if all(row.ratio is None for row in rows):
        lines = [line[:-1] for line in lines]
    return "\n".join(align_columns(lines, left={0, 1}))


def _sides(row: ServingRow) -> Iterable[ServingSide]:
    return (row.ours,) if row.theirs is None else (row.ours, row.theirs)


def _head(name: str) -> str:
    """A number's name as a column's head: times are in milliseconds there."""
    if name in HEADS:
        return HEADS[name]
    return (f"{name[:-2]} ms" if _is_time(name) else name).replace("_", " ").replace("tok s", "tokens/s")


def _is_time(name: str) -> bool:
    return name.endswith("_s") and name != "tok_s"


def _cell(name: str, value: float) -> str:
    if name.endswith("_cpu"):
        return f"{value:.0%}"
    if _is_time(name):
        return f"{1000 * value:.1f}"
    return f"{value:.2f}" if name.endswith("_ratio") else f"{value:.0f}"


def _spread(side: ServingSide) -> str:
    return with_spread([s.value for s in side.samples])


def _footer(report: ServingReport) -> list[str]:
    rows = report.rows
    load = f"load average: {rows[0].load[0]:.2f} at the start, {rows[-1].load[1]:.2f} at the end"
    lines = [f"model: {rows[0].model}; {load}"]
    lines.append("each side: median over its runs ± half the range; times: over all requests of all runs")
    if any(isinstance(row.case, LoadCase) for row in rows):
        lines.append(
            "CPU: of one core; clients: this program, front: the process that listens, other: its children"
        )
    if report.peer:
        features = ", ".join(report.peer.features) or "unknown"
        threads = ", ".join(f"{r.theirs.threads} for {r.case.name}" for r in rows if r.theirs)
        lines.append(f"llama-server: {report.peer.version}; its CPU code: {features}; threads: {threads}")
        lines.append("flash attention, repacking and continuous batching on, a slot for each conversation;")
        lines.append(
            "both in turn, A B B A, with the same prompts and sampling; ratio: median over the pairs"
        )
    return lines
