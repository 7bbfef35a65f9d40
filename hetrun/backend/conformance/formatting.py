"""A conformance report for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetrun.backend.conformance.cases import MATRICES
from hetrun.backend.conformance.report import ConformanceReport, ReportCell, ReportColumn
from hetrun.errors import printable
from hetrun.graph.ops import OPS
from hetrun.graph.quant import QUANTS
from hetrun.system.terminal_text import align_columns

MOST_NAMED = 6  # types in a sentence
IN_COLUMNS = ("tried", "broken", "oracle")
LEGEND = (
    "ok: matches the reference, except for rounding",
    "some: supported in some cases; other backends run the rest",
    "names of ops: only these are supported; with a * only some cases",
    "-: not supported; other backends run it",
    "?: not tried",
)
MARKS = {"ok", "some", "-", "?", "WRONG", "fails", "oracle"}


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Lines of the table: a name, and a mark for each column."""

    what: str
    columns: tuple[ReportColumn, ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]


def blocks(report: ConformanceReport) -> Sequence[TableBlock]:
    """The table twice: by kind of op, and by type of weights for those ops that have matrices."""
    columns = tuple([c for c in report.columns if c.standing in IN_COLUMNS])
    weights = [cell for cell in report.cells if cell.kind in MATRICES]
    return [
        _block("op", columns, [(kind, [c for c in report.cells if c.kind == kind]) for kind in OPS], _mark),
        _block("weights", columns, [(t, [c for c in weights if c.type == t]) for t in QUANTS], _mark_of_type),
    ]


Mark = Callable[[ReportColumn, Sequence[ReportCell]], str]


def _block(
    what: str, columns: tuple[ReportColumn, ...], rows: Iterable[tuple[str, Sequence[ReportCell]]], mark: Mark
) -> TableBlock:
    lines = [(name, tuple([mark(c, cells) for c in columns])) for name, cells in rows if cells]
    return TableBlock(what, columns, tuple(lines))


def _mark_of_type(column: ReportColumn, row: Sequence[ReportCell]) -> str:
    """The same of a type of weights: where only some of the ops take it, which."""
    if (mark := _mark(column, row)) != "some":
        return mark
    of_kinds = {cell.kind: _mark(column, [c for c in row if c.kind == cell.kind]) for cell in row}
    stars = {"ok": "", "some": "*"}
    return " ".join([f"{kind}{stars[m]}" for kind, m in of_kinds.items() if m in stars])


def _mark(column: ReportColumn, row: Sequence[ReportCell]) -> str:
    """One word for a backend's cells in a row."""
    cells = [cell for cell in row if cell.backend == column.backend]
    if column.standing != "tried":
        return "oracle" if column.standing == "oracle" else "fails"
    states = {cell.state for cell in cells}
    if states & {"wrong", "fails"}:
        return "WRONG" if "wrong" in states else "fails"
    if states == {"unsupported"}:
        return "-"
    if "ok" not in states:
        return "?"
    return "some" if "unsupported" in states or any(cell.unsupported for cell in cells) else "ok"


def to_text(report: ConformanceReport) -> str:
    """The table, and a sentence for whatever is not as it should be."""
    lines: list[str] = []
    for block in blocks(report):
        names = [printable(column.backend) for column in block.columns]
        lines += [
            *align_columns([(block.what, *names), *((name, *marks) for name, marks in block.lines)]),
            "",
        ]
    used = {mark for block in blocks(report) for _, marks in block.lines for mark in marks}
    used |= {"names of ops"} if used - MARKS else set()
    lines += [line for line in LEGEND if line.split(":")[0] in used]
    said = [*_sentences(report)]
    return "\n".join([*lines, *([""] if said else []), *said])


def _sentences(report: ConformanceReport) -> Iterator[str]:
    for column in report.columns:
        if column.standing in ("away", "whole"):
            word = "not here" if column.standing == "away" else "not in the table"
            yield printable(f"{column.backend}: {word}: {column.detail}")
    tried = {column.backend for column in report.columns if column.standing == "tried"}
    untried = [cell for cell in report.cells if cell.state == "untried" and cell.backend in tried]
    if untried:
        types = dict.fromkeys(cell.type for cell in untried)
        yield printable(f"not tried with weights of {', '.join(types)}: {untried[0].said}")
    yield from _faults(report)


def _faults(report: ConformanceReport) -> Iterator[str]:
    """What is wrong, and what to do about it."""
    bad: dict[str, None] = {}
    for column in report.columns:
        if column.standing == "broken":
            bad[column.backend] = None
            yield printable(f"{column.backend} fails: {column.detail}")
    alike: dict[tuple[str, str, str], list[ReportCell]] = {}
    for cell in report.faults:
        # Of errors the numbers differ; what fails, fails in the same way.
        said = cell.said if cell.state == "fails" else cell.kind
        alike.setdefault((cell.backend, cell.state, said), []).append(cell)
    for cells in alike.values():
        first = cells[0]
        bad[first.backend] = None
        kinds = ", ".join(dict.fromkeys(cell.kind for cell in cells))
        word = "is WRONG" if first.state == "wrong" else "fails"
        yield printable(
            f"{first.backend}: {kinds}{_of_types(cells)} {word}: {first.said} (case {first.case})"
        )
    for name in bad:
        yield printable(
            f"What to do: do not use {name} (name others with --backend) until that is fixed, and report "
            f"it to its authors; hetrun devices --conformance --backend {name} --json has every number."
        )


def _of_types(cells: Sequence[ReportCell]) -> str:
    types = [t for t in dict.fromkeys(cell.type for cell in cells) if t]
    more = f" and {len(types) - MOST_NAMED} more" if len(types) > MOST_NAMED else ""
    return f" with {', '.join(types[:MOST_NAMED])}{more}" if types else ""


def to_json(report: ConformanceReport) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "ok": report.ok,
        "seconds": round(report.seconds, 3),
        "backends": [
            {"backend": c.backend, "standing": c.standing, "detail": c.detail} for c in report.columns
        ],
        "cells": [_cell(cell) for cell in report.cells],
    }


def _cell(cell: ReportCell) -> dict[str, Any]:
    finite = cell.part is not None and math.isfinite(cell.part)
    return {
        "op": cell.kind,
        "type": cell.type or None,
        "backend": cell.backend,
        "state": cell.state,
        "cases": cell.cases,
        "unsupported": cell.unsupported,
        "error_of_allowed": cell.part if finite else None,
        "case": cell.case or None,
        "said": cell.said or None,
    }
