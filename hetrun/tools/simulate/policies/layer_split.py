"""llama.cpp's way: as many whole layers on the GPU as fit, the others on the processor, one by one."""

from __future__ import annotations

from hetrun.tools.simulate.costs import StepCase
from hetrun.tools.simulate.evaluator import StepCosts, predict
from hetrun.tools.simulate.policies.common import every, most_layers, with_output
from hetrun.tools.simulate.types import Band, ComputeShares, PolicyPlacement, Prediction, Shares

PASS = 512  # llama.cpp's ubatch: weights that are copied come again for each
# From this many tokens on, llama.cpp copies a product's weights to the GPU and computes there.
COPIED_FROM = 32


def layer_split(clock: StepCosts) -> Prediction | None:
    """The processor has the first layers, as `-ngl` has it."""
    placing = with_output(clock, lambda after: most_layers(clock, lambda n: _split(clock, n, after)))
    return predict(clock, placing) if placing else None


def _split(clock: StepCosts, n: int, after: bool) -> PolicyPlacement:
    all_of, none_of = every(clock, 1.0), every(clock, 0.0)
    s = clock.setting

    def way(case: StepCase) -> ComputeShares:
        copied: Shares = {**all_of, "score": 0.0} if case.rows >= COPIED_FROM else none_of
        return ComputeShares((copied, all_of), float(after))

    layers = len(clock.model.layers)
    return PolicyPlacement(
        "layer split",
        (Band(layers - n, none_of), Band(n, all_of)),
        after,
        way(s.prefill),
        way(s.decode),
        serial=True,
        pass_tokens=PASS,
        rereads=True,
        notes=(f"{n} of {layers} layers on the GPU",),
    )


def processor_only(clock: StepCosts) -> Prediction | None:
    """No GPU at all."""
    found = predict(clock, on_processor(clock))
    return None if found.bill.problem else found


def on_processor(clock: StepCosts) -> PolicyPlacement:
    """Everything where it is; weights that no memory holds come from disk while others compute."""
    none_of = every(clock, 0.0)
    way = ComputeShares((none_of,))
    band = Band(len(clock.model.layers), none_of)
    return PolicyPlacement("processor only", (band,), False, way, way, notes=("everything in memory",))
