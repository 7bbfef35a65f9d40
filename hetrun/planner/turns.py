"""What it costs that two backends take turns: caches and threads change hands between them.

Units are measured one by one, each behind itself. So neighbours are also run on two backends in turn, and
what that takes more than both on one backend is the price of the changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetrun.forms import Unit
from hetrun.planner.probe import SMALL, Prober

SIZES = (1, SMALL)  # tokens: with few of them threads wait for memory, with more they compute


def turn(tokens: int) -> str:
    """The fact: what one change to a backend costs, or back, in passes of about so many tokens."""
    return f"turn_{max(n for n in SIZES if n <= tokens)}_s"


def price_of_a_turn(
    prober: Prober,
    units: Sequence[Unit],
    able: Sequence[Collection[str]],
    home: str,
    other: str,
    threads: int,
    tokens: int,
) -> float | None:
    """Seconds that one change of backend costs; None where no two neighbours run on both."""
    both = [
        home in some and other in some and units[i].scope.startswith("blk.") for i, some in enumerate(able)
    ]
    at = next((i for i in range(len(units) // 2, len(units) - 1) if both[i] and both[i + 1]), None)
    if at is None:
        return None
    ways = ((home, home), (other, other), (home, other), (other, home))
    here, there, out, back = prober.in_turn(units[at : at + 2], ways, threads, tokens)
    return max(0.0, out + back - here - there) / 4  # each of the mixed ones changes and comes back
