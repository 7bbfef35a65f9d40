"""Parts of pages that programs write, between two marks."""

from __future__ import annotations

from pathlib import Path


def read_section(page: Path, begin: str, end: str) -> str:
    """What stands between the marks; nothing where they are not."""
    return page.read_text("utf-8").partition(begin)[2].partition(end)[0]


def write_section(page: Path, begin: str, end: str, text: str) -> None:
    """Put a text between the marks. ValueError: the page does not have them."""
    head, found, rest = page.read_text("utf-8").partition(begin)
    if not found or end not in rest:
        raise ValueError(f"{page.name} has no place for it: {begin.strip()} ... {end.strip()}")
    page.write_text(f"{head}{begin}{text}{end}{rest.partition(end)[2]}", "utf-8")
