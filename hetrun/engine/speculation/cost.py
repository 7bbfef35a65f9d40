"""What steps with drafts take: what such steps take, and what it takes to compile them.

The first step of a shape compiles it, which says nothing of the next ones. So that has a price of its own,
which is shared out over the steps that the shape is thought to be good for.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.engine.step_time import UNKNOWN_S, StepShape, StepTimes, longer
from hetrun.system.estimate import TrackedEstimate

COMPILING_S = 0.02  # that the first step of a shape takes longer, before one was seen
USES = 16  # steps that a shape of one sequence is thought to be good for; with several there are more shapes
MOST_SHAPES = 48  # as many as are kept compiled, about

Compiled = tuple[int, int, int]  # sequences, those with a draft, its tokens


class DraftCosts:
    """Seconds of a step of answers, of which some carry drafts of equal length."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._shapes: dict[Compiled, None] = {}  # those that were compiled, the last used last
        self._compiling = TrackedEstimate(COMPILING_S)

    def seconds(self, depths: Sequence[int], drafting: int, length: int) -> float:
        """A step of sequences of these lengths; `drafting` of them carry a draft of `length` tokens."""
        n, drafted = len(depths), drafting * length
        found = self._expect(depths, drafted)
        if drafted and (n, drafting, length) not in self._shapes:
            found += self._compiling.value * n / USES
        return found

    def compiled(self, depths: Sequence[int], drafting: int, length: int, seconds: float) -> bool:
        """Whether a step that took so long was the first one of its shape."""
        if not drafting:
            return False
        shape = len(depths), drafting, length
        new = shape not in self._shapes
        self._shapes.pop(shape, None)
        self._shapes[shape] = None
        if len(self._shapes) > MOST_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        if new:
            self._compiling.observe(max(0.0, seconds - self._expect(depths, drafting * length)))
        return new

    def _expect(self, depths: Sequence[int], drafted: int) -> float:
        n = len(depths)
        found = self._times.seconds(StepShape(n, n + drafted, 0, drafted, sum(depths) // n))
        return UNKNOWN_S * longer(n, drafted) if found is None else found
