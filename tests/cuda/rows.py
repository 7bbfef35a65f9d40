"""Lines of a table: what was measured, and what it should be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Literal

from hetrun.tools.bench.memory_bandwidth import load_average


@dataclass(frozen=True, slots=True)
class Line:
    """One number: the median of some samples beside its bar, which it has to reach or (`most`) not to pass.
    Without a bar it is there to be read."""

    what: str
    unit: str
    samples: tuple[float, ...]
    bar: float | None = None
    way: Literal["least", "most"] = "least"
    note: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def reached(self) -> bool | None:
        """Whether the bar was reached; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.way == "least" else self.value <= self.bar


class Table:
    """Prints each line as it comes, and keeps it in a file where there is a folder for it."""

    def __init__(self, stage: str, folder: Path | None, budget_s: float = inf) -> None:
        """After `budget_s` seconds nothing new begins, and what was left out is told."""
        self.lines: list[Line] = []
        self.left_out: list[str] = []
        self._stage, self._file = stage, folder and folder / f"{stage}.jsonl"
        self._until = monotonic() + budget_s
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, line: Line) -> Line:
        """One more."""
        self.lines.append(line)
        load = load_average()
        print(f"{as_text(line)}; load average {load:.2f}", flush=True)
        if self._file:
            facts = {"stage": self._stage, "value": line.value, "reached": line.reached, "load": load}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts | asdict(line)) + "\n")
        return line

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return max(0.0, self._until - monotonic())

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something that takes about so long; else it is left out."""
        left = self.seconds_left
        if left > seconds:
            return True
        self.left_out.append(what)
        print(f"{what}: not run, {left:.0f} s of the budget are left", flush=True)
        if self._file:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"stage": self._stage, "what": what, "left_out": True}) + "\n")
        return False

    @property
    def missed(self) -> Sequence[Line]:
        """The lines whose bar was not reached."""
        return [line for line in self.lines if line.reached is False]


def as_text(line: Line) -> str:
    """`8b-Q4_K_M decode: 0.52 of the limit (0.50 to 0.53, 5 samples); bar 0.4: reached`."""
    spread = f"({min(line.samples):.4g} to {max(line.samples):.4g}, {len(line.samples)} samples)"
    text = f"{line.what}: {line.value:.4g} {line.unit} {spread}"
    if line.bar is not None:
        words = {"least": "at least", "most": "at most"}[line.way]
        text += f"; bar {words} {line.bar:g}: {'reached' if line.reached else 'MISSED'}"
    return text + (f"; {line.note}" if line.note else "")
