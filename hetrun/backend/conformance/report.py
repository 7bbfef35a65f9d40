"""The conformance table of backends as plain data: what each computes as the reference does, and what not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from hetrun.backend.conformance.cases import CASES, OpCase
from hetrun.backend.conformance.runner import (
    REFERENCE,
    CaseTrial,
    build,
    outcome,
    reference,
    threads_for,
    tried,
)
from hetrun.backend.interface import Available, Backend, Descriptor
from hetrun.errors import BackendUnavailable
from hetrun.system.entry_points import FAILURES, in_words

# Of a backend: it was tried; it is what the others are compared with; it cannot work here, or says so; it
# should work and cannot be used; it takes no single ops.
Standing = Literal["tried", "oracle", "away", "broken", "whole"]
# Of a row of the table on a backend: as the reference; not as the reference; an exception; none of its cases
# is supported; nothing was tried.
State = Literal["ok", "wrong", "fails", "unsupported", "untried"]
Told = Callable[[int, int, str], None]  # cases done, cases in all, the kind of op


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A backend."""

    backend: str
    standing: Standing
    detail: str


@dataclass(frozen=True, slots=True)
class ReportCell:
    """One kind of op with weights (or KV rows) of one type, on one backend."""

    kind: str
    type: str  # empty where an op has no matrix
    backend: str
    state: State
    cases: int = 0  # that were computed
    unsupported: int = 0  # that the backend does not take
    part: float | None = None  # the largest error of a case, in parts of what is allowed
    case: str = ""  # the first that is wrong or fails
    said: str = ""  # what is wrong with it, or why nothing was tried


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The table."""

    columns: tuple[ReportColumn, ...]
    cells: tuple[ReportCell, ...]
    seconds: float

    @property
    def faults(self) -> Sequence[ReportCell]:
        """Cells in which something is wrong."""
        return [cell for cell in self.cells if cell.state in ("wrong", "fails")]

    @property
    def ok(self) -> bool:
        """Whether every backend computes what it says that it can."""
        return not self.faults and all(column.standing != "broken" for column in self.columns)


@dataclass(slots=True)
class _Tally:
    """What was found of one row of the table on one backend."""

    trials: list[tuple[OpCase, CaseTrial]] = field(default_factory=list)
    untried: str = ""

    def cell(self, kind: str, type_: str, backend: str) -> ReportCell:
        if not self.trials:
            return ReportCell(kind, type_, backend, "untried", said=self.untried)
        computed = [(case, trial) for case, trial in self.trials if trial.state != "unsupported"]
        away = len(self.trials) - len(computed)
        if not computed:
            return ReportCell(kind, type_, backend, "unsupported", 0, away)
        worst = max(trial.part for _, trial in computed)
        for state in ("wrong", "fails"):
            for case, trial in computed:
                if trial.state == state:
                    found = len(computed), away, worst, str(case), trial.said
                    return ReportCell(kind, type_, backend, trial.state, *found)
        return ReportCell(kind, type_, backend, "ok", len(computed), away, worst)


def conformance(
    descriptors: Iterable[Descriptor], told: Told | None = None, cases: Sequence[OpCase] = ()
) -> ConformanceReport:
    """Try all cases, or these, on every one of the backends that can work here."""
    start = perf_counter()
    cases = cases or CASES
    made: dict[str, Backend] = {}
    try:
        columns = [_column(d, made) for d in descriptors]
        tallies = _tried(columns, made, cases, told)
    finally:
        for backend in made.values():
            _close(backend)
    rows = list(dict.fromkeys((case.kind, case.quant) for case in cases))
    cells = [tallies[*row, column.backend].cell(*row, column.backend) for row in rows for column in columns]
    return ConformanceReport(tuple(columns), tuple(cells), perf_counter() - start)


def standing(d: Descriptor) -> ReportColumn:
    """Whether a backend can be tried, without creating it."""
    if d.name == REFERENCE:
        return ReportColumn(d.name, "oracle", "the others are compared with it")
    if d.whole:
        return ReportColumn(d.name, "whole", "it runs models as a whole, no single ops")
    try:
        probe = d.probe()
        if isinstance(probe, Available):
            return ReportColumn(d.name, "tried", probe.detail)
        return ReportColumn(d.name, "away", probe.reason)
    except FAILURES as e:
        return ReportColumn(d.name, "broken", f"to ask whether it works here fails: {in_words(e)}")


def _column(d: Descriptor, made: dict[str, Backend]) -> ReportColumn:
    """The same; one that can be tried is started, and put into `made`."""
    column = standing(d)
    if column.standing != "tried":
        return column
    try:
        made[d.name] = d.create()
        made[d.name].start()
    except FAILURES as e:
        if backend := made.pop(d.name, None):
            _close(backend)
        return ReportColumn(d.name, "broken", f"it should work here, and does not start: {in_words(e)}")
    return column


def _tried(
    columns: Sequence[ReportColumn], made: Mapping[str, Backend], cases: Sequence[OpCase], told: Told | None
) -> Mapping[tuple[str, str, str], _Tally]:
    """By kind, type and backend."""
    found: defaultdict[tuple[str, str, str], _Tally] = defaultdict(_Tally)
    for column in columns:
        for case in cases:
            found[case.kind, case.quant, column.backend].untried = column.detail
    oracle = reference()
    for at, case in enumerate(cases):
        if told:
            told(at, len(cases), case.kind)
        try:
            op = build(case)
            expected = outcome(case, op, oracle)
        except BackendUnavailable as e:
            for name in made:
                found[case.kind, case.quant, name].untried = f"no weights of this type can be made here: {e}"
            continue
        for name, backend in made.items():
            trial = tried(case, op, expected, backend, threads_for(case))
            found[case.kind, case.quant, name].trials.append((case, trial))
    return found


def _close(backend: Backend) -> None:
    try:
        backend.close()
    except FAILURES:  # its results are in the table, and it is not used any more
        return
