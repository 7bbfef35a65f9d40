"""How many examples Hypothesis tries: all of them in `make test-all`, half of them otherwise."""

from __future__ import annotations

import os

ALL = os.environ.get("TESTS_TIER") == "all"


def examples(n: int) -> int:
    """For `max_examples`. The same ones in every run, as they are not drawn at random."""
    return n if ALL else (n + 1) // 2
