"""What it costs that keys and values change sides with the heads of attention that read them."""

from __future__ import annotations

from collections.abc import Collection

from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.online import PlanConditions
from hetrun.planner.plan import Plan
from hetrun.planner.trials import LINK
from hetrun.planner.two_device.balance import HostLink, Migration
from hetrun.planner.two_device.candidates import scoring_of

PAID_S = 2.0  # within this time keys and values that change sides must have paid for it


def steps_to_pay(seconds: float) -> float:
    """The steps, which take so long each, within which a move must pay."""
    return max(1.0, PAID_S / max(seconds, 1e-9))


class KvMigration:
    """The price of moving keys and values, as seconds of each step until the move has paid for itself."""

    def __init__(self, forecast: WorkTimes, num_layers: int, alone: Collection[str]) -> None:
        """`alone`: backends that work by themselves, over a link."""
        self._forecast, self._num_layers, self._alone = forecast, num_layers, alone

    def layer_seconds(self, backend: str, now: PlanConditions, steps: float) -> float:
        """Those of one layer, all of which come from or go to a backend."""
        rate, layers = self._forecast.fact(LINK, backend), self._num_layers
        return Migration(now.kv_bytes / layers, HostLink(rate), steps).seconds if rate and layers else 0.0

    def seconds(self, before: Plan, after: Plan, now: PlanConditions, steps: float) -> float:
        """Those of all heads that are on another side after a change of plan."""
        was, total = scoring_of(before), 0.0
        for layer, sides in scoring_of(after).items():
            old = was.get(layer, {})
            for b in sides:
                # Over the link of the one of the two that has one.
                other = next((x for x in (b, *old) if x in self._alone), "")
                total += max(0.0, sides[b] - old.get(b, 0.0)) * self.layer_seconds(other, now, steps)
        return total
