"""Which experts should lie in the slots of a device: by what tokens have chosen, later choices counting more.

A choice counts 1, and half as much after some tokens. An expert that has none takes the slot of the one in
its mixture that counts least, if it counts more by what its way there costs: the host reads an expert when it
computes it, and reads and writes it several times when it goes to the device. So an expert that is chosen
once takes no other's place. What was measured, and against which other rules: docs/adr/0062.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 128.0  # tokens
MARGIN = 4.0  # choices by which an expert must count more than the one whose slot it takes


@dataclass(frozen=True, slots=True)
class SlotChange:
    """An expert comes, another goes."""

    mixture: int
    comes: int
    goes: int


class SlotRule:
    """The counts of some mixtures."""

    def __init__(
        self, mixtures: int, experts: int, half_life: float = HALF_LIFE, margin: float = MARGIN
    ) -> None:
        """`experts`: of the mixture that has most."""
        self.counts = np.zeros((mixtures, experts))
        self._half_life, self._margin = half_life, margin

    def age(self, tokens: int) -> None:
        """This many more tokens have chosen."""
        self.counts *= 0.5 ** (tokens / self._half_life)

    def observe(self, mixtures: NDArray[np.integer] | int, chosen: NDArray[np.integer]) -> None:
        """Some of these tokens' choices, each of a mixture."""
        flat = (mixtures * self.counts.shape[1] + chosen).reshape(-1)
        self.counts += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)

    def changes(self, lies: NDArray[np.bool_], may_come: NDArray[np.bool_], most: int) -> list[SlotChange]:
        """What should change, what is worth most first: at most one expert of a mixture at a time. `lies`: in
        a slot from which it may go; `may_come`: in none, and not on its way there."""
        if not most:
            return []
        here = np.where(lies, self.counts, np.inf)
        there = np.where(may_come, self.counts, -np.inf)
        goes, comes = here.argmin(axis=1), there.argmax(axis=1)
        rows = np.arange(len(here))
        gain = there[rows, comes] - here[rows, goes]
        worth = np.flatnonzero(gain > self._margin)
        best = worth[np.argsort(-gain[worth], kind="stable")][:most]
        return [SlotChange(int(i), int(comes[i]), int(goes[i])) for i in best]
