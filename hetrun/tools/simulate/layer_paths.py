"""The ways through one layer: which side computes each part, and how long chain and copies get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetrun.tools.simulate.costs import PartWork
from hetrun.tools.simulate.machine import SimulatedLink, SimulatedMachine

CPU, GPU = 0, 1


@dataclass(frozen=True, slots=True)
class PartCost:
    """A part in one case: seconds on either side, bytes that must come, go in and go out."""

    cpu: float
    gpu: float
    launches: tuple[float, float]
    stream: float  # bytes of weights and past KV
    takes: float
    gives: float
    fresh: float  # bytes of keys and values that it makes
    fresh_home: float  # the share of these that belongs on the GPU
    there: float  # the share of `stream` that lies on the GPU


class Path(NamedTuple):
    """One way through some parts: a tuple, because a search makes very many."""

    chain: float
    copies: float
    shares: tuple[float, ...] = ()


def cost(
    w: PartWork, machine: SimulatedMachine, there: float, fresh: float, fresh_home: float, batches: int
) -> PartCost:
    """A part of which the GPU holds a share; `fresh` are the bytes of KV that it makes."""
    cpu, gpu = machine.cpu, machine.gpu
    return PartCost(
        cpu=batches * w.seconds(cpu),
        gpu=batches * w.seconds(gpu) if gpu else 0.0,
        launches=(batches * w.ops * cpu.launch, batches * w.ops * gpu.launch if gpu else 0.0),
        stream=w.weights + batches * w.past,
        takes=batches * w.takes,
        gives=batches * w.gives,
        fresh=batches * fresh,
        fresh_home=fresh_home,
        there=there,
    )


def paths(
    costs: Sequence[PartCost],
    choices: Sequence[Sequence[float]],
    link: SimulatedLink | None,
    most: float = math.inf,
) -> list[Path]:
    """The ways through a layer that nothing beats in both chain and copies; it ends on the side it began on.

    Exact over the given choices: prefixes that are worse in both cannot become better, and those that must
    take longer than `most` seconds in either are of no use.
    """
    options_of = [
        {side: [(x, *move) for x in shares for move in moves(c, x, side, link)] for side in (CPU, GPU)}
        for c, shares in zip(costs, choices, strict=True)
    ]
    ends = _least_ahead(options_of)
    found: list[Path] = []
    for start in (CPU, GPU):
        sides: dict[int, list[Path]] = {start: [Path(0.0, 0.0)]}
        for options, (chain_ahead, copies_ahead) in zip(options_of, ends, strict=True):
            reached: dict[int, list[Path]] = {CPU: [], GPU: []}
            for side, before in sides.items():
                for share, end, chain, copies in options[side]:
                    room, width = most - chain - chain_ahead, most - copies - copies_ahead
                    reached[end] += [
                        Path(a + chain, b + copies, (*done, share))
                        for a, b, done in before
                        if a <= room and b <= width
                    ]
            sides = {side: best(reaching) for side, reaching in reached.items()}
        found += sides.get(start, [])
    return best(found)


Moves = Mapping[int, Sequence[tuple[float, int, float, float]]]  # by side: share, end, chain, copies


def _least_ahead(all_moves: Sequence[Moves]) -> list[tuple[float, float]]:
    """For each part the least chain, and the least copies, of all parts behind it."""
    ahead = [(0.0, 0.0)]
    for options in reversed(all_moves[1:]):
        every = [move for side in options.values() for move in side]
        chain, copies = ahead[-1]
        ahead.append((chain + min(m[2] for m in every), copies + min(m[3] for m in every)))
    return ahead[::-1]


def moves(c: PartCost, share: float, side: int, link: SimulatedLink | None) -> list[tuple[int, float, float]]:
    """Where the result may lie, and seconds of the chain and of copies; the input lies on `side`."""
    if link is None:
        return [(CPU, c.cpu + c.launches[CPU], 0.0)]
    comes = max(0.0, share - c.there) * c.stream + abs(share - c.fresh_home) * c.fresh
    copies = comes / link.bandwidth
    on_cpu = (1 - share) * c.cpu + c.launches[CPU] if share < 1 else 0.0
    on_gpu = share * c.gpu + c.launches[GPU] if share > 0 else 0.0
    busy = max(on_cpu, on_gpu)
    if share in (0.0, 1.0):
        end = GPU if share else CPU
        return [(end, busy + (link.seconds(c.takes) if end != side else 0.0), copies)]
    both = busy + link.seconds(c.takes)
    return [
        (CPU, both + link.seconds(share * c.gives), copies),
        (GPU, both + link.seconds((1 - share) * c.gives), copies),
    ]


def best(found: Sequence[Path]) -> list[Path]:
    """Those that no other beats in both."""
    kept: list[Path] = []
    least = math.inf
    for path in sorted(found):
        if path.copies < least:
            kept.append(path)
            least = path.copies
    return kept
