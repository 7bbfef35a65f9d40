"""hetrun's way, as far as a machine is known from its description: every choice that the clock can time.

Homes: none, some or all layers that fit whole; of the others, an even share of some parts' weights or KV. For
each home, in prefill and decode apart, each part runs on the processor, on the GPU, or split by rows; the
choices of a layer are searched together. The other policies' placements are candidates too, so none of them
is predicted to be faster.

Not modelled: thread counts, second copies of weights in another layout, what a switch costs, and which of
several kernels is best: hetrun measures those where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from hetrun.system.units import counted
from hetrun.tools.simulate.costs import ORDER, LayerPart, StepCase
from hetrun.tools.simulate.evaluator import StepCosts, fits, predict
from hetrun.tools.simulate.layer_paths import PartCost, Path, paths
from hetrun.tools.simulate.machine import SimulatedLink
from hetrun.tools.simulate.policies.common import every, most_layers
from hetrun.tools.simulate.types import (
    Band,
    ComputeShares,
    PolicyPlacement,
    Prediction,
    Shares,
    SimulatedStep,
)

GRID = 4  # a split part's share of the GPU: quarters, besides what balances it

# Which parts of a layer that is not pinned share the GPU's memory evenly.
EVEN: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"score"}),
    frozenset({"qkv", "out"}),
    frozenset({"up", "down", "experts"}),
    frozenset({"qkv", "out", "up", "down", "experts"}),
    frozenset({"qkv", "score", "out", "up", "down", "experts"}),
)


def ours(clock: StepCosts, others: Sequence[Prediction]) -> Prediction | None:
    """The least time of all homes with their best ways."""
    found = [p for other in others for p in _improved(clock, other)]
    if clock.machine.gpu:
        found += [predict(clock, placing) for placing in _candidates(clock)]
    best = min(found, key=lambda p: (p.seconds, p.decode.copied), default=None)
    return (
        replace(best, placing=replace(best.placing, policy="hetrun", notes=_notes(clock, best.placing)))
        if best
        else None
    )


def _notes(clock: StepCosts, found: PolicyPlacement) -> tuple[str, ...]:
    """The homes, for people."""
    names = {part.name for layer in clock.model.layers for part in layer}
    whole, said = 0, ""
    for band in found.bands:
        there = {name: band.there.get(name, 0.0) for name in ORDER if name in names}
        if all(there[name] == 1 for name in names):
            whole += band.layers
        elif band.layers and any(there.values()):
            kinds: dict[str, list[str]] = {}
            for name, share in there.items():
                kinds.setdefault(f"{share:.0%}", []).append("KV" if name == "score" else name)
            parts = [f"{share} of {', '.join(members)}" for share, members in kinds.items() if share != "0%"]
            said = "; of each other " + " and ".join(parts)
    return (f"{counted(whole, 'layer')} on the GPU{said}" if whole or said else "everything in memory",)


def _improved(clock: StepCosts, other: Prediction) -> Iterator[Prediction]:
    """Another policy's placement as we would run it, and the same homes with ways of our own."""
    as_is = replace(other.placing, serial=False, pass_tokens=0, rereads=False)
    yield predict(clock, as_is)
    if clock.machine.gpu:
        again = with_best_ways(clock, as_is, stream=True)
        if fits(clock, again):
            yield predict(clock, again)


def _candidates(clock: StepCosts) -> Iterator[PolicyPlacement]:
    """Homes with and without room for what is streamed."""
    for stream in (False, True):
        for after in (True, False):
            reserved = partial(_reserved, clock, even={}, stream=stream, after=after)
            most = most_layers(clock, reserved)
            if most is None:
                continue
            n = most.bands[0].layers
            for pinned in {n, n // 2, 0}:
                for parts in EVEN:
                    yield from _filled(clock, pinned, parts, stream, after)


def _filled(
    clock: StepCosts, pinned: int, parts: frozenset[str], stream: bool, after: bool
) -> Iterator[PolicyPlacement]:
    """`pinned` layers whole, and of the others as much of some parts as fits."""
    low, high = 0, 64  # sixty-fourths
    while low < high:
        middle = (low + high + 1) // 2
        if fits(clock, _reserved(clock, pinned, dict.fromkeys(parts, middle / 64), stream, after)):
            low = middle
        else:
            high = middle - 1
    if parts and not low:
        return
    placing = with_best_ways(
        clock, _reserved(clock, pinned, dict.fromkeys(parts, low / 64), stream, after), stream
    )
    if fits(clock, placing):
        yield placing


def _reserved(clock: StepCosts, pinned: int, even: Shares, stream: bool, after: bool) -> PolicyPlacement:
    """A home, with ways that need as much room as any may; without streaming only what lies there is used."""
    there = {**every(clock, 0.0), **even}
    rest = every(clock, 1.0) if stream else there
    way = ComputeShares((every(clock, 1.0), rest), float(after))
    bands = (Band(pinned, every(clock, 1.0)), Band(len(clock.model.layers) - pinned, there))
    return PolicyPlacement("hetrun", bands, after, way, way)


def with_best_ways(clock: StepCosts, placing: PolicyPlacement, stream: bool) -> PolicyPlacement:
    """The same homes, and the best shares for each kind of step."""
    s = clock.setting
    return replace(
        placing,
        prefill=best_way(clock, placing, s.prefill, placing.prefill, stream),
        decode=best_way(clock, placing, s.decode, placing.decode, stream),
    )


def best_way(
    clock: StepCosts, placing: PolicyPlacement, case: StepCase, known: ComputeShares, stream: bool
) -> ComputeShares:
    """For each band the shares with which its first layer's form takes least."""
    chosen, at = [], 0
    for band, shares in zip(placing.bands, known.bands, strict=True):
        if not band.layers:
            chosen.append(shares)
            continue
        layer = clock.model.layers[at]
        costs = clock.costs(layer, case, band.there, placing.batches)
        choices = [_choices(part, c, shares, stream) for part, c in zip(layer, costs, strict=True)]
        path = search(costs, choices, clock.machine.link)
        chosen.append({**shares, **{part.name: x for part, x in zip(layer, path.shares, strict=True)}})
        at += band.layers
    ends = {known.after, float(placing.after), 1.0} if stream else {known.after, float(placing.after)}
    ways = [ComputeShares(tuple(chosen), after) for after in ends if after >= placing.after]
    return min(ways, key=lambda way: clock.step(placing, case, way).seconds)


def search(costs: Sequence[PartCost], choices: Sequence[Sequence[float]], link: SimulatedLink | None) -> Path:
    """The best path. A few choices of each part first: what they take bounds the search in all of them."""
    few = [[shares[0], shares[len(shares) // 2], shares[-1]] for shares in choices]
    bound = shortest(paths(costs, few, link))
    return shortest(paths(costs, choices, link, most=max(bound.chain, bound.copies) * (1 + 1e-9)))


def shortest(found: Sequence[Path]) -> Path:
    """The path whose longer lane is shortest."""
    return min(found, key=lambda p: max(p.chain, p.copies))


def _choices(part: LayerPart, c: PartCost, known: Shares, stream: bool) -> list[float]:
    """Shares of the GPU: never less than it holds, which only it can compute."""
    if not stream:
        return [c.there]
    even = c.cpu / (c.cpu + c.gpu) if c.cpu + c.gpu else 0.0
    grid = {k / GRID for k in range(GRID + 1)} | {c.there, even, known.get(part.name, 0.0)}
    return sorted(x for x in grid if x >= c.there)


def for_case(
    clock: StepCosts, placing: PolicyPlacement, case: StepCase
) -> tuple[ComputeShares, SimulatedStep]:
    """Who computes what in another kind of step, with everything where it is, and what that takes."""
    for stream in (True, False):
        way = best_way(clock, placing, case, placing.decode, stream)
        if fits(clock, replace(placing, decode=way)):
            return way, clock.step(placing, case, way)
    return placing.decode, clock.step(placing, case, placing.decode)
