"""What to expect of passes whose weights come from disk in part, and how far ahead to read for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from hetrun.system.units import counted, format_bytes

LAYERS_AHEAD = 3  # of streamed bytes; more is never read ahead
ROOM_SHARE = 16  # the window takes at most 1 / ROOM_SHARE of the room, which could all be weights


@dataclass(frozen=True, slots=True)
class PassOutlook:
    """A pass as it should go."""

    compute_s: float
    disk_s: float
    tokens: int
    overlapped: bool

    @property
    def seconds(self) -> float:
        """The longer of the two, or one after the other where nothing is read ahead."""
        times = (self.compute_s, self.disk_s)
        return max(times) if self.overlapped else sum(times)

    @property
    def tokens_per_s(self) -> float:
        """No run can be faster: one that is had its weights from some cache."""
        return self.tokens / self.seconds if self.seconds else float("inf")

    @property
    def bound(self) -> Literal["compute", "disk"]:
        """What a pass waits for."""
        return "disk" if self.disk_s > self.compute_s else "compute"

    @property
    def times(self) -> str:
        """What both take, in words."""
        how = "meanwhile" if self.overlapped else "after that"
        return f"reading takes {1000 * self.disk_s:.0f} ms, computing {1000 * self.compute_s:.0f} ms {how}"

    def __str__(self) -> str:
        """In words, for a plan."""
        return f"at most {self.tokens_per_s:.3g} tokens/s, bound by {self.bound}: {self.times}"


def predict(
    compute_s: float, streamed_bytes: int, rate: float, tokens: int = 1, overlapped: bool = True
) -> PassOutlook:
    """A pass of `tokens` tokens, from a disk that gives `rate` bytes a second."""
    return PassOutlook(compute_s, streamed_bytes / rate if streamed_bytes else 0.0, tokens, overlapped)


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """What passes ask of the disk."""

    streamed_bytes: int  # in a pass
    pieces: int  # that these are
    largest: int  # bytes of a piece, as it lies in the window
    n_layers: int
    compute_s: float | None = None  # of a pass; None: not known yet


@dataclass(frozen=True, slots=True)
class Window:
    """How many pieces are in memory that were read ahead, are being read or computed with."""

    pieces: int
    nbytes: int
    why: str


def window(
    load: DiskLoad, readers: int, takers: int, rate: float, room: int, layers: int = LAYERS_AHEAD
) -> Window:
    """The smallest window that keeps the disk busy; `room` is what weights have, the window included.

    Every reader needs a piece to read into, every taker (a thread that computes) holds one, and one more is
    handed over. Beyond that, the disk must not rest while a pass computes with what stayed, nor a pass wait
    where many streamed pieces follow each other. Both even out within a layer, as every layer streams the
    same: it takes what a layer streams, or what the disk gives while a layer is computed if that is less.
    """
    if not load.pieces:
        return Window(0, 0, "nothing is streamed")
    least = readers + takers + 1
    a_layer = load.streamed_bytes / load.n_layers
    meanwhile = a_layer if load.compute_s is None else rate * load.compute_s / load.n_layers
    wanted = least + ceil(min(a_layer, meanwhile) / load.largest)
    limits = {
        f"{readers} reading and {takers} computing threads, and what a layer needs meanwhile": wanted,
        f"what {counted(layers, 'layer')} read": ceil(layers * a_layer / load.largest),
        f"a {ROOM_SHARE}th of the room for weights": room // ROOM_SHARE // load.largest,
    }
    why, pieces = min(limits.items(), key=lambda item: item[1])
    if pieces < least:
        why, pieces = f"the fewest for {readers} reading and {takers} computing threads", least
    if pieces >= load.pieces:
        why, pieces = "all that is streamed", load.pieces
    size = pieces * load.largest
    return Window(pieces, size, f"{counted(pieces, 'piece')}, {format_bytes(size)}: {why}")
