"""How many rows may share a pass so that none tells who was beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetrun.backend import Segment
from hetrun.graph import Op
from hetrun.planner.plan import BUCKETS, Plan, PlanSet
from tests.support.nulldevice import NullDevice


class Alike(NullDevice):
    """Rows are alike in passes of up to `most`."""

    def __init__(self, name: str, most: int) -> None:
        super().__init__(name)
        self.most = most

    def alike(self, ops: Sequence[Op]) -> int:
        return self.most


def plans(others_from: str = "") -> PlanSet:
    """All on `one`, and from a bucket on all on `two`."""
    found, backend = {}, "one"
    for bucket in BUCKETS:
        backend = "two" if bucket == others_from else backend
        segment = Segment("model", backend, (), (), (), "")
        found[bucket] = Plan(bucket, 1, (), ((segment,),))
    return PlanSet(found, 512, "")


@pytest.mark.parametrize("most", [1, 7, 1 << 40])
@pytest.mark.parametrize(
    ("others_from", "ends"),
    [("", 1 << 40), ("2-4", 1), ("5-8", 4), ("65-256", 64), ("257-512", 256), ("513+", 512)],
)
def test_rows_are_alike_where_the_plan_is_that_of_one(most: int, others_from: str, ends: int) -> None:
    backends = {"one": Alike("one", most), "two": Alike("two", 1 << 40)}
    found = plans(others_from).most_alike(backends)
    assert found == (most if most <= ends else 1)
