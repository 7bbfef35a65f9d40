"""The README's figures: measured cells, in a file for each kind of machine, and the tables made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.release.machine import Place
from tests.support.pages import read_section, write_section
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
HEAD = ("model", "", "hetrun", "of limit", "llama.cpp", "of limit", "ratio")


@dataclass(frozen=True, slots=True)
class SpeedCell:
    """One row of the table: a case on a model, in turn with llama.cpp."""

    model: str
    what: str
    samples: tuple[float, ...]
    of_limit: float | None
    peer: str
    peer_samples: tuple[float, ...]
    peer_of_limit: float | None
    ratio: float | None  # the median of the pairs' ratios

    def to_row(self) -> tuple[str, ...]:
        """As a row of Markdown; the faster one is bold."""
        ours, theirs = _spread(self.samples), _spread(self.peer_samples)
        if self.ratio is not None:
            ours, theirs = (f"**{ours}**", theirs) if self.ratio >= 1 else (ours, f"**{theirs}**")
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (self.model, self.what, ours, _share(self.of_limit), theirs, _share(self.peer_of_limit), ratio)


@dataclass(frozen=True, slots=True)
class BudgetCell:
    """The speed within a limit of memory that the model does not fit into."""

    gib: float
    samples: tuple[float, ...]
    bound: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured on one machine."""

    place: Place
    cells: tuple[SpeedCell, ...]
    streamed_model: str = ""
    streamed: tuple[BudgetCell, ...] = ()

    def write(self, folder: Path = FOLDER) -> Path:
        """Keep them beside those of other machines, in place of older ones of this kind."""
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.place.key}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        return path

    def to_markdown(self) -> str:
        """The tables of this machine."""
        rows = [HEAD, ("---",) * len(HEAD), *(cell.to_row() for cell in self.cells)]
        text = f"*{self.place.to_text()}*\n\n{_table(rows)}"
        if self.streamed:
            text += f"\nTokens per second of answers within less memory than {self.streamed_model} needs,\n"
            text += f"and the most that disk and CPU allow:\n\n{_table(_streamed(self.streamed))}"
        return text


def read(folder: Path = FOLDER) -> list[Figures]:
    """Those of all machines, the newest first."""
    found = [_parsed(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda figures: figures.place.date, reverse=True)


def write_readme(figures: Iterable[Figures], page: Path = README) -> None:
    """Put the tables into the README."""
    tables = "\n".join(one.to_markdown() for one in figures)
    write_section(page, BEGIN, END, f"\n{tables}\n")


def in_readme(page: Path = README) -> str:
    """The tables that the README has."""
    return read_section(page, BEGIN, END).strip()


def _parsed(facts: dict[str, Any]) -> Figures:
    cells = tuple(
        SpeedCell(**{**cell, "samples": tuple(cell["samples"]), "peer_samples": tuple(cell["peer_samples"])})
        for cell in facts["cells"]
    )
    streamed = tuple(BudgetCell(**{**cell, "samples": tuple(cell["samples"])}) for cell in facts["streamed"])
    return Figures(Place(**facts["place"]), cells, facts["streamed_model"], streamed)


def _spread(samples: Sequence[float]) -> str:
    """The median and half the range."""
    if not samples:
        return ""
    middle, half = median(samples), (max(samples) - min(samples)) / 2
    digits = 0 if middle >= 100 else 1
    return f"{middle:.{digits}f} ± {half:.{digits}f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _streamed(cells: Sequence[BudgetCell]) -> list[tuple[str, ...]]:
    heads = ("memory for everything", *(f"{cell.gib:.2f} GiB" for cell in cells))
    speeds = ("hetrun", *(_spread(cell.samples) for cell in cells))
    bounds = ("bound", *("" if cell.bound is None else f"{cell.bound:.1f}" for cell in cells))
    return [heads, ("---",) * len(heads), speeds, bounds]


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
