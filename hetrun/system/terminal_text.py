"""Text for a terminal: columns, and text from a model made safe."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest

# A terminal obeys these: a model that writes escape sequences could set the clipboard or the window's title.
_CONTROL = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with control characters shown instead of obeyed; line ends and tabs stay."""
    # Almost always there is nothing to replace, and isprintable is much faster than translate.
    return text if text.isprintable() else text.translate(_CONTROL)


def align_columns(
    rows: Iterable[Sequence[str]], left: Container[int] | None = None, least: Sequence[int] = ()
) -> list[str]:
    """Rows of cells as lines of text. Columns stand two blanks apart, as wide as their longest cell and as
    `least` says. `left`: the columns that are aligned left, if not all are. A row may end before the last
    column; its last cell may be wider than its column."""
    rows = list(rows)
    full = max(map(len, rows), default=0)
    cells = [[" " * width for width in least], *(row if len(row) == full else row[:-1] for row in rows)]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return [
        "  ".join(
            cell.ljust(width) if left is None or i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
