"""What became of each check: on a quiet machine, and on a busy one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic

from hetrun.errors import HetrunError
from tests.busy.checks import CHECKS
from tests.busy.rig import Lost, Rig


@dataclass
class CheckRow:
    """One check."""

    check: str
    quiet_s: float = 0.0
    busy_s: float = 0.0  # the longest
    rounds: int = 0  # on the busy machine
    alarms: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    texts: list[str] | None = None  # on the quiet machine

    @property
    def faults(self) -> list[str]:
        return [f"{self.check}: {fault}" for fault in (*self.alarms, *self.lost)]

    def as_json(self) -> dict[str, object]:
        """For a line of JSON."""
        row = asdict(self)
        del row["texts"]
        return row | {"faults": self.faults}


def attempt(rig: Rig, row: CheckRow, *, busy: bool) -> None:
    """Do it once, and note what became of it."""
    workers = rig.worker() if rig.port else []
    began = monotonic()
    try:
        texts = CHECKS[row.check](rig)
    except (Lost, HetrunError, LookupError, OSError, ValueError) as lost:
        texts = None
        row.lost.append(f"{type(lost).__name__}: {lost}")
    seconds = monotonic() - began
    if rig.port:
        rig.heed_log()
        if row.check != "restart" and rig.worker() != workers:
            row.alarms.append("the worker is another process")
    row.alarms += rig.alarms
    rig.alarms.clear()
    if busy:
        row.busy_s, row.rounds = max(row.busy_s, seconds), row.rounds + 1
    else:
        row.quiet_s = seconds
    if texts is None:
        return
    if row.texts is None:
        row.texts = texts
    elif texts != row.texts:
        pairs = zip(row.texts, texts, strict=False)
        first = next(((a, b) for a, b in pairs if a != b), (f"{len(row.texts)}", f"{len(texts)} texts"))
        row.lost.append(f"other texts than before: {first[1][:120]!r} for {first[0][:120]!r}")


def table(rows: Sequence[CheckRow]) -> str:
    """For people."""
    lines = [f"{'check':<13} {'quiet s':>8} {'busy s':>8} {'rounds':>7} {'alarms':>7} {'lost':>5}"]
    lines += [
        f"{row.check:<13} {row.quiet_s:>8.1f} {row.busy_s:>8.1f} {row.rounds:>7} {len(row.alarms):>7} "
        f"{len(row.lost):>5}"
        for row in rows
    ]
    return "\n".join(lines)
