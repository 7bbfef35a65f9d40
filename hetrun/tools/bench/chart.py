"""A few series of points as a picture made of letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MARKS = "●", "○", "▲"  # of the series, in their order
HEIGHT = 14  # lines
LEAST_WIDTH, MOST_WIDTH = 40, 100
TICKS = 5


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A point, and what it is called on the horizontal axis."""

    x: float
    y: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, from left to right."""

    name: str
    marks: Sequence[ChartMark]


def steps(most: float, ticks: int = TICKS) -> list[float]:
    """Round numbers from 0 to at least `most`, about `ticks` of them."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / ticks
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 2.5, 5, 10) if unit * n >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def drawn(series: Sequence[Series], width: int, unit: str, x_unit: str) -> str:
    """All of them, both axes from 0; nothing where there is nothing to draw."""
    points = [m for s in series for m in s.marks]
    if not points:
        return ""
    rows = steps(max(m.y for m in points))
    margin = max(len(f"{y:g}") for y in rows) + 1
    columns = max(LEAST_WIDTH, min(width, MOST_WIDTH)) - margin - 2
    most_x = steps(max(m.x for m in points))[-1]
    field = [[" "] * (columns + 1) for _ in range(HEIGHT + 1)]
    for line, letter in zip(series, MARKS, strict=False):
        for m in line.marks:
            cells, at = field[round(HEIGHT * (1 - m.y / rows[-1]))], round(columns * m.x / most_x)
            cells[_free(cells, at)] = letter
    labels = {round(HEIGHT * (1 - y / rows[-1])): f"{y:g}" for y in rows}
    lines = [
        f"{unit:<{margin}}   "
        + "   ".join(f"{mark} {s.name}" for s, mark in zip(series, MARKS, strict=False))
    ]
    for i, cells in enumerate(field):
        edge = "┤" if i in labels else "│"
        lines.append(f"{labels.get(i, ''):>{margin}} {edge}{''.join(cells)}".rstrip())
    lines.append(f"{'':>{margin}} └{'─' * (columns + 1)}")
    lines.append(f"{'':>{margin}}  {_under(steps(most_x), most_x, columns, x_unit)}")
    return "\n".join(lines)


def _free(cells: Sequence[str], wanted: int) -> int:
    """Where nothing is yet, as near as can be, to the right rather; else in front of what is there."""
    places = [(abs(at - wanted), -at) for at, cell in enumerate(cells) if cell == " "]
    return -min(places, default=(0, -wanted))[1]


def _under(ticks: Sequence[float], most: float, columns: int, unit: str) -> str:
    """Numbers below the axis, each where it belongs, and the unit behind the last one."""
    text = ""
    for x in ticks:
        label = f"{x:g} {unit}" if x == ticks[-1] else f"{x:g}"
        at = min(round(columns * x / most), columns + 1 - len(label))
        if at > len(text) or not text:
            text = text.ljust(at) + label
        elif x == ticks[-1]:
            text += f" {label}"
    return text
