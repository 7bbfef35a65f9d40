"""The frequencies of rotary embeddings: what positions are multiplied by, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetrun.backends.cuda.driver import Address
from hetrun.backends.cuda.memory import CudaMemory
from hetrun.backends.cuda.weights import DeviceWeight
from hetrun.graph.ops import Rope

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """Frequencies in the device's memory."""

    address: Address
    magnitude: float


class Rotations:
    """The frequencies of all kinds of ropes that there were."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._known: dict[tuple[Rope, DeviceWeight | None], RopeFrequencies] = {}

    def of(self, a: Rope, factors: DeviceWeight | None) -> RopeFrequencies:
        """Those of a rope, whose angles may be divided by some factors."""
        key = replace(a, n_heads=1), factors
        if key not in self._known:
            assert factors is None or factors.numbers is not None
            numbers, magnitude = frequencies(a, factors.numbers if factors else None)
            address = self._memory.take(numbers.nbytes, "frequencies")
            self._memory.send(address, numbers.view(np.uint8))
            self._known[key] = RopeFrequencies(address, magnitude)
        return self._known[key]


def frequencies(a: Rope, factors: NDArray[np.float32] | None) -> tuple[Doubles, float]:
    """For each pair of columns that turns its angle at position 1; and what cos and sin are multiplied by."""
    pairs = np.arange(a.n_rot // 2, dtype=np.float64)
    found: Doubles = a.base ** (-2 * pairs / a.n_rot)
    if factors is not None:
        found = found / factors
    if not a.ext_factor:
        return found * a.freq_scale, a.attn_factor
    own = _unscaled(a, pairs) * a.ext_factor
    scaled = found * (a.freq_scale * (1 - own) + own)
    return scaled, a.attn_factor * (1 + 0.1 * math.log(1 / a.freq_scale))


def _unscaled(a: Rope, pairs: Doubles) -> Doubles:
    """YaRN: 1 for pairs that turn often enough to keep their frequency, 0 for those that are scaled."""

    def pair_with(turns: float) -> float:
        return a.n_rot * math.log(a.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(a.base))

    low = max(0.0, math.floor(pair_with(a.beta_fast)))
    high = min(a.n_rot - 1.0, math.ceil(pair_with(a.beta_slow)))
    scaled: Doubles = np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return 1 - scaled
