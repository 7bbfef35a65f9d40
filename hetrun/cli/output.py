"""What the command says: results as JSON, remarks on stderr."""

from __future__ import annotations

import math
import sys

from hetrun.errors import printable


def say(text: str) -> None:
    """A remark or an error, on one line of stderr."""
    print(f"hetrun: {printable(text)}", file=sys.stderr)


def in_json(value: object, indent: int | None = None) -> str:
    """JSON that can be read: only what a terminal would obey, or not show, is escaped."""
    import json

    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def size(n: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" else f"{_three(n)} {unit}"
        n /= 1000
    return f"{_three(n)} GB"


def _three(n: float) -> str:
    """Three digits that count."""
    return f"{n:.{max(0, 2 - int(math.log10(n)))}f}" if n else "0"
