"""A text that goes on when its GPU is lost: on the host alone, from what is at home of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetrun.errors import BackendError
from tests.cuda.emulated.driver import EmulatedDriver
from tests.cuda.test_backend import tokens
from tests.support.rig import Rig, plan_set

Compare = Callable[[np.ndarray, np.ndarray], None]


def goes_on(
    mine: Rig,
    right: Rig,
    driver: EmulatedDriver,
    passes: Sequence[int],
    compare: Compare,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Passes of one text on both, which are closed after the last one."""
    a, b, text, failures = mine.kv.alloc(), right.kv.alloc(), list[int](), 0
    for i, n in enumerate(passes):
        new = tokens(n, i)
        expected = right.logits(b, new)
        while mine.kv.length(a) < len(text) + n:
            again = text[mine.kv.length(a) :] + new
            try:
                found = mine.logits(a, again)
            except BackendError:
                failures += 1
                assert driver.loss
                assert failures <= 2, "one for the device, and one for rows that it took along"
                mine.executor.adopt(plan_set(mine.graph, {"": "reference"}, 64))
            between()
        compare(found[-n:], expected)
        text += new
    mine.close()
    right.close()
    assert driver.breaks_at
    assert driver.loss or driver.calls < driver.breaks_at
    assert driver.closed
