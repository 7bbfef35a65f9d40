"""A few series of points as a picture in SVG, readable on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from hetrun.tools.bench.chart import Series, steps

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 48, 76, 56
INSIDE_X, INSIDE_Y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
STYLE = """
  .ground { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
  .title { font-size: 16px; font-weight: 600 } .value { font-size: 12px; font-weight: 600 }
  .grid { stroke: #d8dee4; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  .s0 { stroke: #0969da } .m0 { fill: #0969da }
  .s1 { stroke: #6e7781; stroke-dasharray: 6 4 } .m1 { fill: #6e7781 }
  .s2 { stroke: #bc4c00 } .m2 { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } text { fill: #e6edf3 }
    .grid { stroke: #2a313c } .axis { stroke: #9198a1 }
    .s0 { stroke: #58a6ff } .m0 { fill: #58a6ff }
    .s1 { stroke: #9198a1 } .m1 { fill: #9198a1 }
    .s2 { stroke: #f0883e } .m2 { fill: #f0883e }
  }
"""
SIZE = 4.5  # of a mark


def drawn(series: Sequence[Series], title: str, unit: str = "tokens/s", x_unit: str = "memory, GiB") -> str:
    """All of them, both axes from 0: the first with the values at its points, the second as a broken line."""
    points = [m for s in series for m in s.marks]
    rows = steps(max((m.y for m in points), default=1.0))
    columns = steps(max((m.x for m in points), default=1.0), 8)
    parts = [*_axes(rows, columns, unit, x_unit)]
    # The first series is drawn last, and so in front.
    for i, line in reversed(list(enumerate(series))):
        parts += _line(i, line, columns[-1], rows[-1])
    parts += _legend(series)
    said = "; ".join(f"{s.name}: {', '.join(f'{m.y:.3g} at {m.x:.3g} GiB' for m in s.marks)}" for s in series)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(said)}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _axes(rows: Sequence[float], columns: Sequence[float], unit: str, x_unit: str) -> Iterator[str]:
    bottom, right = TOP + INSIDE_Y, LEFT + INSIDE_X
    for y in rows:
        at = _y(y, rows[-1])
        kind = "grid" if y else "axis"
        yield f'<line class="{kind}" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>'
    for x in columns:
        at = _x(x, columns[-1])
        yield f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 5}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{x:g}</text>'
    yield f'<text x="8" y="{TOP - 8}">{escape(unit)}</text>'
    yield f'<text x="{right}" y="{bottom + 40}" text-anchor="end">{escape(x_unit)}</text>'


def _line(i: int, line: Series, most_x: float, most_y: float) -> Iterator[str]:
    places = [(_x(m.x, most_x), _y(m.y, most_y), m) for m in line.marks]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    yield f'<polyline class="line s{i}" points="{path}"/>'
    for x, y, m in places:
        yield _mark(i, x, y, f"{line.name}, {m.name}: {m.y:.3g}")
        if i == 0:
            # Below to the right: the line comes from the left, and what bounds it lies above.
            yield f'<text class="value" x="{x + 8:.1f}" y="{y + 14:.1f}">{m.y:.3g}</text>'


def _mark(i: int, x: float, y: float, said: str = "") -> str:
    """A circle, a square, a triangle: colours are not all that tells them apart."""
    about = f"<title>{escape(said)}</title>" if said else ""
    if i == 0:
        return f'<circle class="m{i}" cx="{x:.1f}" cy="{y:.1f}" r="{SIZE}">{about}</circle>'
    if i == 1:
        corner, side = f'x="{x - SIZE + 1:.1f}" y="{y - SIZE + 1:.1f}"', 2 * SIZE - 2
        return f'<rect class="m{i}" {corner} width="{side}" height="{side}">{about}</rect>'
    corners = ((x, y - SIZE), (x - SIZE, y + SIZE), (x + SIZE, y + SIZE))
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return f'<polygon class="m{i}" points="{path}">{about}</polygon>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x, at = float(LEFT), 48
    for i, line in enumerate(series):
        yield f'<line class="line s{i}" x1="{x}" y1="{at}" x2="{x + 28}" y2="{at}"/>'
        yield _mark(i, x + 14, at)
        yield f'<text x="{x + 36}" y="{at + 4}">{escape(line.name)}</text>'
        x += 36 + 8 * len(line.name) + 28


def _x(value: float, most: float) -> float:
    return LEFT + INSIDE_X * value / most


def _y(value: float, most: float) -> float:
    return TOP + INSIDE_Y * (1 - value / most)
