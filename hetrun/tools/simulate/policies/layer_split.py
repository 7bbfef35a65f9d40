"""llama.cpp's way: as many whole layers on the GPU as fit, the others on the processor, one by one."""

from __future__ import annotations

from hetrun.tools.simulate.costs import Case
from hetrun.tools.simulate.evaluator import Clock, predict
from hetrun.tools.simulate.policies.common import every, most_layers, with_output
from hetrun.tools.simulate.types import Band, Placing, Prediction, Shares, Way

PASS = 512  # llama.cpp's ubatch: weights that are copied come again for each
# From this many tokens on, llama.cpp copies a product's weights to the GPU and computes there.
COPIED_FROM = 32


def layer_split(clock: Clock) -> Prediction | None:
    """The processor has the first layers, as `-ngl` has it."""
    placing = with_output(clock, lambda after: most_layers(clock, lambda n: _split(clock, n, after)))
    return predict(clock, placing) if placing else None


def _split(clock: Clock, n: int, after: bool) -> Placing:
    all_of, none_of = every(clock, 1.0), every(clock, 0.0)
    s = clock.setting

    def way(case: Case) -> Way:
        copied: Shares = {**all_of, "score": 0.0} if case.rows >= COPIED_FROM else none_of
        return Way((copied, all_of), float(after))

    layers = len(clock.model.layers)
    return Placing(
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


def processor_only(clock: Clock) -> Prediction | None:
    """No GPU at all."""
    found = predict(clock, on_processor(clock))
    return None if found.bill.problem else found


def on_processor(clock: Clock) -> Placing:
    """Everything where it is; weights that no memory holds come from disk while others compute."""
    none_of = every(clock, 0.0)
    way = Way((none_of,))
    band = Band(len(clock.model.layers), none_of)
    return Placing("processor only", (band,), False, way, way, notes=("everything in memory",))
