"""Numbers as people read them."""

from __future__ import annotations


def size_in_words(nbytes: float) -> str:
    """Bytes for people: 2.0 GiB, 300 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.{1 if unit == 'GiB' else 0}f} {unit}"
    return f"{nbytes:.0f} bytes"


def counted(n: float, what: str, form: str = "") -> str:
    """A number of things: 1 token, 2 tokens; with the form ".1f" 0.5 tokens, with "," 1,024 tokens."""
    number = format(n, form)
    return f"{number} {what}" if number == "1" else f"{number} {what}s"
