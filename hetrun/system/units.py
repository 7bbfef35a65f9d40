"""Numbers as people read them."""

from __future__ import annotations

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(nbytes: float) -> str:
    """Bytes for people: 2.0 GiB, 300 MiB, 1.5 MiB, 1 MiB, 12 bytes."""
    for unit, size in UNITS:
        if abs(nbytes) >= size:
            n = nbytes / size
            if unit == "GiB":
                return f"{n:,.1f} GiB"
            return f"{n:.1f}".removesuffix(".0") + f" {unit}" if abs(n) < 10 else f"{n:.0f} {unit}"
    return counted(round(nbytes), "byte")


def format_minimum(nbytes: int) -> str:
    """What at least is needed: whole MiB, rounded up, so that a limit of just that is enough."""
    return f"{-(-nbytes >> 20)} MiB"


def counted(n: float, what: str, form: str = "") -> str:
    """A number of things: 1 token, 2 tokens; with the form ".1f" 0.5 tokens, with "," 1,024 tokens."""
    number = format(n, form)
    return f"{number} {what}" if number == "1" else f"{number} {what}s"
