"""TwinPilots' way: seven operations of a layer, each on the processor or on the GPU, both done together.

Layers that fit are pinned on the GPU. For the others the two totals are balanced exactly: what the processor
computes in place against what the GPU loads and computes. That programme knows no order of the operations:
its makespan stands in the notes, and the clock, which knows the order, says what the assignment takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetrun.planner.two_device.balance import balance
from hetrun.system.units import counted
from hetrun.tools.simulate.costs import LayerPart, StepCase, parts_of
from hetrun.tools.simulate.evaluator import StepCosts, predict
from hetrun.tools.simulate.machine import sides
from hetrun.tools.simulate.policies.common import every, most_layers, two_bands, with_output
from hetrun.tools.simulate.types import ComputeShares, PolicyPlacement, Prediction, Shares

SEVEN: Mapping[str, str] = {
    **{"attn.norm": "q", "attn.q": "q", "attn.k": "k", "attn.v": "v", "attn.score": "score"},
    **{"attn.out": "out", "ffn.norm": "mlp1", "ffn.gate": "mlp1", "ffn.up": "mlp1"},
    **{"ffn.down": "mlp2", "ffn.exp": "mlp2"},
}
PART_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "mlp1": "up", "mlp2": "down"}


def balanced(cpu: Mapping[str, float], gpu: Mapping[str, float]) -> tuple[dict[str, bool], float]:
    """Which operations the GPU gets, and the makespan: the larger of the two totals, as small as can be."""
    found = balance(list(cpu.values()), [gpu[name] for name in cpu])
    return {name: not here for name, here in zip(cpu, found.on_host, strict=True)}, found.seconds


def twinpilots(clock: StepCosts) -> Prediction | None:
    """The first layers pinned, as many as fit; the others balanced for prefill and for decode."""
    s = clock.setting
    layer = clock.model.layers[0]
    ways = [assigned(clock, layer, case) for case in (s.prefill, s.decode)]

    def make(n: int, after: bool) -> PolicyPlacement:
        first, then = (ComputeShares((every(clock, 1.0), shares), float(after)) for shares, _ in ways)
        return PolicyPlacement(
            "TwinPilots",
            two_bands(clock, n, every(clock, 1.0)),
            after,
            first,
            then,
            notes=(
                f"{counted(n, 'layer')} pinned; makespan of another {1000 * ways[1][1]:.1f} ms in decode",
            ),
        )

    placing = with_output(clock, lambda after: most_layers(clock, lambda n: make(n, after)))
    return predict(clock, placing) if placing else None


def assigned(clock: StepCosts, layer: tuple[LayerPart, ...], case: StepCase) -> tuple[Shares, float]:
    """The GPU's share of each part of a layer that is not pinned, and the makespan."""
    seven = parts_of([op for part in layer for op in part.ops], SEVEN)
    cpu, gpu = table(clock, seven, case)
    on_gpu, makespan = balanced(cpu, gpu)
    sizes: dict[str, list[float]] = {}
    for op in seven:
        size = op.weight_bytes or 1
        found = sizes.setdefault(PART_OF.get(op.name, op.name), [0.0, 0.0])
        found[0] += size * on_gpu[op.name]
        found[1] += size
    shares = {name: part / whole for name, (part, whole) in sizes.items()}
    if "experts" in {p.name for p in layer}:
        shares["experts"] = shares["down"]
    return shares, makespan


def table(
    clock: StepCosts, ops: tuple[LayerPart, ...], case: StepCase
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each operation on the processor, and on the GPU with what must be loaded first."""
    cpu, gpu, link = sides(clock.machine)
    here, there = {}, {}
    for op in ops:
        w = clock.work(op, case)
        here[op.name] = w.seconds(cpu) + w.ops * cpu.launch
        there[op.name] = w.seconds(gpu) + w.ops * gpu.launch + (w.weights + w.past) / link.bandwidth
    return here, there
