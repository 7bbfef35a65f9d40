"""A segment's work in portions: each begins when the weights are there that cross for it, and is recorded by
itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations

from hetrun.backend import Buffer, Buffers, WeightUse
from hetrun.backends.cuda import fusion
from hetrun.backends.cuda.driver import DeviceProduct, Driver, Graph, Launch, Stream, Work as Work
from hetrun.backends.cuda.fusion import FusedSegment
from hetrun.backends.cuda.streamed.weight_ring import RingBlock, WeightRing
from hetrun.backends.cuda.weights import Crossing
from hetrun.errors import BackendError


@dataclass(slots=True)
class Portion:
    """What is given to the device at once."""

    blocks: Sequence[RingBlock] = ()
    work: list[Work] = field(default_factory=list)
    runs: int = 0
    graph: Graph | None = None

    def run(self, driver: Driver, stream: Stream) -> None:
        """Give it to a stream, recorded from the second time on: a shape that comes once is not worth it."""
        self.runs += 1
        if self.graph is None and self.runs > 1 and self.work:
            self.graph = self._recorded(driver, stream)
        if self.graph is None:
            give(driver, stream, self.work)
        else:
            driver.replay(self.graph, stream)

    def _recorded(self, driver: Driver, stream: Stream) -> Graph:
        """Recording ends also where something fails in it: a stream that only notes takes no other work."""
        driver.capture(stream)
        try:
            give(driver, stream, self.work)
        except BaseException:
            with suppress(BackendError):
                driver.forget(driver.captured(stream))
            raise
        return driver.captured(stream)


def give(driver: Driver, stream: Stream, work: Sequence[Work]) -> None:
    """Work to a stream, one piece after the other."""
    for each in work:
        if isinstance(each, Launch):
            driver.launch(each, stream)
        elif isinstance(each, DeviceProduct):
            driver.multiply(each, stream)
        else:
            driver.copy(each.target, each.source, each.nbytes, stream)


Laid = tuple[Mapping[WeightUse, Buffer], Mapping[int, Sequence[RingBlock]]]


def laid_out(ring: WeightRing, fused: FusedSegment, buffers: Buffers) -> Laid:
    """Places in the ring for a segment's weights that cross; by the number of an item, the blocks
    that it needs. The other weights stay what they are."""
    segment = fused.segment
    wanted = {use for op in segment.ops for use in fused.uses[id(op)]}
    if not any(isinstance(buffers[use], Crossing) for use in wanted):
        return buffers, {}
    found, whose = {use: buffers[use] for use in wanted}, dict[WeightUse, RingBlock]()
    blocks: dict[int, Sequence[RingBlock]] = {}
    for i, item in enumerate(fused.items):
        mine = dict.fromkeys(use for op in fusion.members(item) for use in fused.uses[id(op)])
        new = {use: b for use in mine if isinstance(b := found[use], Crossing)}
        if new:
            block = ring.block(list(new.values()))
            whose |= dict.fromkeys(new, block)
            found |= {use: w.at(at) for (use, w), (at, _) in zip(new.items(), block.parts, strict=True)}
        if needed := dict.fromkeys(whose[use] for use in mine if use in whose):
            blocks[i] = tuple(needed)
            if any(one.meets(other) for one, other in combinations(needed, 2)):
                raise BackendError(f"{segment.name} uses a weight again beside others in its place")
    return found, blocks
