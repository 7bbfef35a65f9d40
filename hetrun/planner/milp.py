"""A mixed integer programme, written down row by row and solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Row = Mapping[int, float]  # variable -> coefficient


class Programme:
    """Minimise the sum of costs; every variable lies between 0 and 1."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._whole: list[int] = []
        self._rows: list[Row] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def binary(self, cost: float) -> int:
        """A variable that is 0 or 1."""
        return self._variable(cost, 1)

    def share(self, cost: float) -> int:
        """A variable between 0 and 1, which comes out whole where whole ones decide."""
        return self._variable(cost, 0)

    def _variable(self, cost: float, whole: int) -> int:
        self._costs.append(cost)
        self._whole.append(whole)
        return len(self._costs) - 1

    def at_most(self, row: Row, limit: float) -> None:
        """The row's sum is no more than the limit."""
        self._add(row, -np.inf, limit)

    def equal(self, row: Row, value: float) -> None:
        """The row's sum is the value."""
        self._add(row, value, value)

    def _add(self, row: Row, low: float, high: float) -> None:
        self._rows.append(row)
        self._low.append(low)
        self._high.append(high)

    def solve(self, gap: float, seconds: float) -> list[bool] | None:
        """Which variables are 1: at most `gap` worse than the best, or what was found in time; or None."""
        places = [(i, v, c) for i, row in enumerate(self._rows) for v, c in row.items()]
        rows, columns, values = (np.array(part) for part in zip(*places, strict=True))
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._costs)))
        found = milp(
            np.array(self._costs),
            integrality=np.array(self._whole),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, self._low, self._high),
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
        return None if found.x is None else [bool(x > 0.5) for x in found.x]
