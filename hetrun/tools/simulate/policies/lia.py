"""LIA's way: six sublayers, each on the processor or on the GPU, by the sum of loads, products and stores.

All 64 policies are tried, for prefill and decode apart. Keys and values stay in memory; the GPU's own holds
whole layers' weights. The sum is the paper's objective; what overlaps is the clock's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hetrun.system.units import counted
from hetrun.tools.simulate.costs import HALF, LayerPart, StepCase
from hetrun.tools.simulate.evaluator import StepCosts, predict
from hetrun.tools.simulate.machine import SimulatedDevice, sides
from hetrun.tools.simulate.policies.common import every, most_layers, two_bands, with_output
from hetrun.tools.simulate.types import ComputeShares, PolicyPlacement, Prediction, Shares

Policy = tuple[bool, ...]  # True: the processor, as in the paper
SUBLAYERS = {"qkv": 1, "score": 2, "out": 1, "up": 1, "down": 1, "experts": 1}


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One of six: bytes that come in and that it owns, products; `loads` cross where the GPU computes."""

    name: str
    x: float
    y: float
    loads: float
    products: tuple[tuple[float, float, bool], ...]
    residual: float = 0.0

    def compute(self, device: SimulatedDevice) -> float:
        """The additive roofline."""
        return (self.x + self.y) / device.bandwidth + sum(c / device.rate(t, b) for c, t, b in self.products)


def sublayers(clock: StepCosts, layer: Sequence[LayerPart], case: StepCase) -> list[Sublayer]:
    """QKV, Q*K^T, S*V, output projection, FC1 (with a gate: both its products), FC2."""
    found = []
    stream = float(HALF * case.rows * clock.model.width)
    for part in layer:
        w = clock.work(part, case)
        if not part.kept:
            residual = stream if part.name in ("out", "down", "experts") else 0.0
            found.append(Sublayer(part.name, w.takes - residual, w.weights, w.weights, w.products, residual))
            continue
        owned, loads = (w.past + w.fresh) / 2, w.past / 2
        halves = tuple((c / 2, t, b) for c, t, b in w.products)
        heads = sum(getattr(op.attrs, "n_heads", 0) for op in part.ops)
        scores = HALF * case.rows * case.seen * heads
        found.append(Sublayer("qk", w.takes - w.fresh / 2, owned, loads, halves))
        found.append(Sublayer("sv", scores + w.fresh / 2, owned, loads, halves))
    return found


def seconds(
    clock: StepCosts, subs: Sequence[Sublayer], fresh: float, policy: Policy, pinned: bool = False
) -> float:
    """The paper's T(p) for one layer that follows an equal one; `fresh` are the bytes of its new KV."""
    cpu, gpu, link = sides(clock.machine)
    total, before = 0.0, policy[-1]
    origin: dict[str, bool] = {}  # where the residual stream lies that a later sublayer adds
    for sub, on_cpu in zip(subs, policy, strict=True):
        crossing = sub.x if on_cpu != before else 0.0
        if sub.name in ("qkv", "up"):
            origin["stream"] = on_cpu
        elif sub.residual and origin.get("stream", on_cpu) != on_cpu:
            crossing += sub.residual
        if not on_cpu:
            crossing += sub.loads if sub.name in ("qk", "sv") or not pinned else 0.0
        total += crossing / link.bandwidth + sub.compute(cpu if on_cpu else gpu)
        before = on_cpu
    if not policy[0]:
        total += fresh / link.bandwidth
    return total


def best_policy(clock: StepCosts, layer: Sequence[LayerPart], case: StepCase, pinned: bool = False) -> Policy:
    """The one of 64 with the least T."""
    subs = sublayers(clock, layer, case)
    fresh = sum(clock.work(part, case).fresh for part in layer)
    return min(all_policies(len(subs)), key=lambda policy: seconds(clock, subs, fresh, policy, pinned))


def all_policies(n: int) -> list[Policy]:
    """Full CPU first, which wins ties."""
    return list(product((True, False), repeat=n))


def lia(clock: StepCosts) -> Prediction | None:
    """The best policies of pinned and other layers, with as many pinned as fit."""
    s = clock.setting
    layer = clock.model.layers[0]
    found = [
        [best_policy(clock, layer, case, pinned) for pinned in (True, False)]
        for case in (s.prefill, s.decode)
    ]
    ways = [[as_shares(layer, policy) for policy in pair] for pair in found]
    there = {**every(clock, 1.0), "score": 0.0}

    def make(n: int, after: bool) -> PolicyPlacement:
        # A part whose weights lie on the GPU is computed there.
        pinned = [{**shares[0], **{k: 1.0 for k, v in there.items() if v}} for shares in ways]
        first, then = (
            ComputeShares((p, shares[1]), float(after)) for p, shares in zip(pinned, ways, strict=True)
        )
        said = ", ".join(shown(pair[1]) for pair in found)
        notes = (f"{counted(n, 'layer')} pinned; the others {said} in prefill and decode",)
        return PolicyPlacement("LIA", two_bands(clock, n, there), after, first, then, notes=notes)

    placing = with_output(clock, lambda after: most_layers(clock, lambda n: make(n, after)))
    return predict(clock, placing) if placing else None


def as_shares(layer: Sequence[LayerPart], policy: Policy) -> Shares:
    """The GPU's share of each part; the two sublayers of attention make one."""
    shares: dict[str, float] = {}
    rest = list(policy)
    for part in layer:
        n = SUBLAYERS[part.name]
        mine, rest = rest[:n], rest[n:]
        shares[part.name] = sum(not on_cpu for on_cpu in mine) / n
    return shares


def shown(policy: Policy) -> str:
    """As the paper writes it."""
    return f"({','.join(str(int(on_cpu)) for on_cpu in policy)})"


def borders(clock: StepCosts, cases: Mapping[int, StepCase]) -> dict[int, Policy]:
    """The best policy for each number of tokens."""
    layer = clock.model.layers[0]
    return {n: best_policy(clock, layer, case) for n, case in cases.items()}
