"""A model of which some weights lie mapped in their files, while it runs: what passes are like."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.backend.weight_streaming import Mappable
from hetrun.client.events import Streaming
from hetrun.prefetch.streamed_weights import PassDelays


@dataclass(frozen=True, slots=True)
class MappedPart:
    """What it takes to run a model of which some weights are used where they lie in their files."""

    mapping: Mappable
    nbytes: int  # of those weights
    left: int  # bytes of the others, which are in memory
    room: int  # that pages of those may take
    budget: int
    least: int  # the smallest that would do


class FromMaps:
    """What came from the files, pass for pass."""

    def __init__(self, part: MappedPart) -> None:
        self._part, self._mapping = part, part.mapping
        self._late = PassDelays()
        self._read = 0

    def observe(self, seconds: float, tokens: int, given: int, answering: bool, gap: float) -> None:
        """A pass has ended and gave `given` tokens; `answering`: all but one of each sequence were guesses.
        It began `gap` seconds after the last one of the same answer."""
        now = self._mapping.bytes_read
        self._late.add(seconds, 0.0, now - self._read, given, answering, gap)
        self._read = now

    def report(self) -> Streaming:
        """What passes are like. How long they wait is not known: threads that compute wait for pages."""
        late = self._late
        return Streaming(
            passes=late.passes,
            bytes_read=self._mapping.bytes_read,
            disk_bytes_s=late.bytes_read / late.seconds if late.seconds else 0.0,
            waiting=0.0,
            bytes_per_token=late.bytes_read / late.tokens if late.tokens else 0.0,
            locked_bytes=self._part.left + self._mapping.resident_bytes,
            streamed_bytes=self._part.nbytes,
            budget=self._part.budget,
            least=self._part.least,
        )
