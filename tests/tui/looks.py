"""What a picture of the screen shows, cell by cell: text and colours, however it was cut into pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from xml.etree import ElementTree

from rich.cells import cell_len

WIDTH, HEIGHT = 12.2, 24.4  # of a cell, as Rich draws it
SVG = "{http://www.w3.org/2000/svg}"
# What no two drawings have alike: the time, and how long a scripted engine took.
ELSE = ((re.compile(r"\d\d:\d\d:\d\d"), "12:00:00"), (re.compile(r"after \d\.\d\d s"), "after 0.12 s"))


def looks(svg: str) -> list[str]:
    """A line for each line of the screen: its text, then which cells have which ink and which paper."""
    root = ElementTree.fromstring(svg)
    inks = dict(re.findall(r"\.\S+-(r\d+) \{ (.*?) \}", svg))
    chars: dict[int, dict[int, tuple[str, str]]] = {}
    papers: dict[int, dict[int, str]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("shape-rendering"):
            at, first = _place(rect, 1.5)
            for column in range(first, first + round(float(rect.get("width", 0)) / WIDTH)):
                papers.setdefault(at, {})[column] = rect.get("fill", "")
    for text in root.iter(f"{SVG}text"):
        if (style := inks.get((text.get("class") or "").rpartition("-")[2])) is not None:
            at, column = _place(text, 20.0)
            for char in text.text or "":
                if char not in (" ", "\xa0"):
                    chars.setdefault(at, {})[column] = char, style
                column += cell_len(char)
    return [_line(chars.get(at, {}), papers.get(at, {})) for at in range(max([*chars, *papers]) + 1)]


def _place(element: ElementTree.Element, above: float) -> tuple[int, int]:
    return (
        round((float(element.get("y", 0)) - above) / HEIGHT),
        round(float(element.get("x", 0)) / WIDTH),
    )


def _line(chars: dict[int, tuple[str, str]], papers: dict[int, str]) -> str:
    text = "".join(chars.get(column, (" ",))[0] for column in range(max(chars, default=-1) + 1))
    ink = " ".join(_runs({column: style for column, (_, style) in chars.items()}))
    for what, instead in ELSE:
        text = what.sub(instead, text)
    return f"{text} | {ink} | {' '.join(_runs(papers))}"


def _runs(styles: dict[int, str]) -> Iterator[str]:
    """Styles by the cells they begin and end at; what is between two words of one style is of it."""
    for style, some in groupby(sorted(styles), key=lambda column: styles[column]):
        columns = list(some)
        yield f"{columns[0]}-{columns[-1]}:{style.replace(' ', '')}"
