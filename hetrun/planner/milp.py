"""A mixed integer programme, written down row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping

import highspy
import numpy as np
from highspy._core import _Highs  # `highspy.Highs` prints a banner when it is made

Row = Mapping[int, float]  # variable -> coefficient


class Programme:
    """Minimise the sum of costs; every variable lies between 0 and 1."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._types: list[highspy.HighsVarType] = []
        self._rows: list[Row] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def binary(self, cost: float) -> int:
        """A variable that is 0 or 1."""
        return self._variable(cost, highspy.HighsVarType.kInteger)

    def share(self, cost: float) -> int:
        """A variable between 0 and 1, which comes out whole where whole ones decide."""
        return self._variable(cost, highspy.HighsVarType.kContinuous)

    def _variable(self, cost: float, kind: highspy.HighsVarType) -> int:
        self._costs.append(cost)
        self._types.append(kind)
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
        solver = _Highs()
        options = {"output_flag": False, "mip_rel_gap": gap, "time_limit": seconds}
        options["threads"] = 1  # more would be a pool of threads that stays
        for name, value in options.items():
            solver.setOptionValue(name, value)
        if solver.passModel(self._written_down()) == highspy.HighsStatus.kError:
            return None
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return [x > 0.5 for x in solver.getSolution().col_value]

    def _written_down(self) -> highspy.HighsLp:
        """The programme as HiGHS reads it: the matrix is sparse, row after row."""
        lp, count = highspy.HighsLp(), len(self._costs)
        lp.num_col_, lp.num_row_ = count, len(self._rows)
        lp.col_cost_, lp.integrality_ = np.array(self._costs), self._types
        lp.col_lower_, lp.col_upper_ = np.zeros(count), np.ones(count)
        lp.row_lower_, lp.row_upper_ = np.array(self._low), np.array(self._high)
        matrix = lp.a_matrix_
        matrix.format_, matrix.num_col_, matrix.num_row_ = (
            highspy.MatrixFormat.kRowwise,
            count,
            len(self._rows),
        )
        matrix.start_ = np.cumsum([0, *map(len, self._rows)])
        matrix.index_ = np.array([variable for row in self._rows for variable in row])
        matrix.value_ = np.array([factor for row in self._rows for factor in row.values()])
        return lp
