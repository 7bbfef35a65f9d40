"""What it costs that two backends take turns: caches and threads change hands between them.

Units are measured one by one, each after itself. So neighbours are also run on two backends in turn, and
what that takes more than both on one backend is the price of the changes.
"""

from __future__ import annotations

from hetrun.planner.trials import SMALL

SIZES = (1, SMALL)  # tokens: with few of them threads wait for memory, with more they compute


def turn(tokens: int) -> str:
    """The fact: what one change to a backend costs, or back, in passes of about this many tokens."""
    return f"turn_{max(n for n in SIZES if n <= tokens)}_s"
