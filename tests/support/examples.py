"""How many examples Hypothesis tries: all of them in `make test-all`, half of them otherwise."""

from __future__ import annotations

import os

TIER = "TESTS_TIER"  # the variable by which tests.run says which tier it runs
ALL = os.environ.get(TIER) == "all"


def examples(n: int) -> int:
    """For `max_examples`. The same ones in every run, as they are not drawn at random."""
    return n if ALL else (n + 1) // 2
