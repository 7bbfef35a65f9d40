"""FlexGen's way: the GPU computes and weights come to it; the processor may attend to keys that it holds.

One set of percentages for all layers, chosen with the number of batches that go through a layer in turn. For
given percentages of keys and values the time only falls with the weights on the GPU, so these take what is
left; the rest is enumerated. FlexGen's own percentages of activations are not: they stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetrun.tools.simulate.evaluator import StepCosts, fits, predict
from hetrun.tools.simulate.policies.common import every
from hetrun.tools.simulate.types import Band, ComputeShares, PolicyPlacement, Prediction, Shares

KV_STEPS = 10
WEIGHT_STEPS = 100


def streaming(clock: StepCosts) -> Prediction | None:
    """The best of all percentages and numbers of batches."""
    found = [predict(clock, placing) for placing in candidates(clock)]
    return min(found, key=lambda p: p.seconds, default=None)


def candidates(clock: StepCosts) -> Iterator[PolicyPlacement]:
    """For each number of batches and share of KV: the most weights that fit."""
    for batches in turns(clock.setting.batch):
        for step in range(KV_STEPS + 1):
            for attend in (True, False) if step < KV_STEPS else (True,):
                placing = _most_weights(clock, batches, step / KV_STEPS, attend)
                if placing:
                    yield placing


def turns(batch: int) -> list[int]:
    """1, 2, 4, ... turns of a batch."""
    return [1 << k for k in range(batch.bit_length()) if 1 << k <= batch]


def _most_weights(clock: StepCosts, batches: int, kv: float, attend: bool) -> PolicyPlacement | None:
    low, high = -1, WEIGHT_STEPS
    while low < high:
        middle = (low + high + 1) // 2
        if fits(clock, streamed(clock, batches, middle / WEIGHT_STEPS, kv, attend)):
            low = middle
        else:
            high = middle - 1
    return streamed(clock, batches, low / WEIGHT_STEPS, kv, attend) if low >= 0 else None


def streamed(clock: StepCosts, batches: int, weights: float, kv: float, attend: bool) -> PolicyPlacement:
    """So much of each layer's weights and of the KV on the GPU; `attend`: it computes all attention."""
    there: Shares = {**every(clock, weights), "score": kv}
    shares = {**every(clock, 1.0), "score": 1.0 if attend else kv}
    way = ComputeShares((shares,), 1.0)
    who = "" if attend or kv == 1 else ", attention over the rest by the processor"
    in_turns = f"; the batch in {batches} turns" if batches > 1 else ""
    return PolicyPlacement(
        "streaming",
        (Band(len(clock.model.layers), there),),
        weights == 1,
        way,
        way,
        batches=batches,
        notes=(f"{weights:.0%} of weights and {kv:.0%} of KV on the GPU{who}{in_turns}",),
    )
