"""Weights in pieces: where not all of them fit into memory, some pieces stay there and the others come from
disk for every pass, one behind the other, in the order in which runners take them.

A backend cuts its weights and computes with what is there (`PartialCompute`); which pieces stay is decided by
`hetrun.prefetch`, which also reads the others and hands them over through a `Supply`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetrun.graph import Op, Value, Weight


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a weight that are brought in together."""

    scope: str  # of the op that they belong to: `blk.3.attn.q`
    weight: Weight  # as the backend multiplies by it; matrices of one input are stacked
    runs: tuple[tuple[int, int], ...]  # rows [a, b) of it: one run, or as far into each half of a gated one
    kept_bytes: int  # memory that it takes if it stays, in the backend's layout

    @property
    def nbytes(self) -> int:
        """Bytes as they are stored, which a pass reads if it does not stay."""
        row = self.weight.quant.row_bytes(self.weight.shape[1])
        return sum(b - a for a, b in self.runs) * row


@dataclass(frozen=True, slots=True)
class Cut:
    """The weights of some ops, cut into pieces."""

    pieces: tuple[Piece, ...]  # in the order in which every pass takes them
    always: int  # how many of them every pass takes; the later ones are taken only where rows are wanted
    lookups: tuple[Weight, ...]  # tables of which a pass reads single rows
    head: int = 0  # how many of the last ones only passes take whose logits are wanted


@dataclass(frozen=True, slots=True)
class PieceOffsets:
    """Where the stored bytes of a piece's runs begin in the memory that holds the whole piece."""

    starts: tuple[int, ...]


class Supply(Protocol):
    """What brings pieces from disk. All but `stop` belongs to the engine's thread."""

    @property
    def address(self) -> int:
        """Of a `struct supply` (supply.h), good as long as the owner lives. A piece's rank counts those of a
        pass that come from disk."""
        ...

    def begin(self, wanted: bool, head: bool = True) -> None:
        """A pass begins; `wanted`: it takes the pieces behind `Cut.always` as well, `head`: those of
        the head, too."""
        ...

    def end(self) -> None:
        """The pass has taken all of its pieces. Raises what went wrong, if some did not come."""
        ...

    def restart(self) -> None:
        """A pass has ended in the middle: the next one begins with the first piece."""
        ...

    def stop(self) -> None:
        """From any thread: those that wait for a piece get none any more, until `restart`."""
        ...


class PartialCompute(Protocol):
    """What a backend does that can compute with weights of which only a part is in memory."""

    def cut(self, ops: Sequence[Op], writes: Sequence[Value], most_bytes: int) -> Cut | None:
        """Pieces of at most about `most_bytes` stored bytes; None if no weight can be cut. Weights that are
        not among them have to be there as a whole."""
        ...

    def prepare(
        self, cut: Cut, supply: Supply, places: Mapping[Piece, PieceOffsets], files: Mapping[str, int]
    ) -> None:
        """Reserve addresses for all pieces, without memory. `files` numbers files that rows are read from."""
        ...

    def keep(self, piece: Piece, stored: NDArray[np.uint8]) -> None:
        """Hold a piece in memory from now on; its stored bytes, run behind run."""
        ...

    def settle(self, pieces: Sequence[Piece]) -> None:
        """These are in memory, and will stay there as far as can be told: how they lie may be improved."""
        ...

    def drop(self, piece: Piece) -> None:
        """Give the memory of a piece back."""
        ...

    def follow(self, streamed: Sequence[Piece]) -> None:
        """Take these pieces from the supply, each by its rank here; all others are in memory."""
        ...


MOST_HINTED = 4  # rows of a pass for which experts are read before they are chosen: more choose enough


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a mixture as records: the matrices of each beside each other."""

    scope: str
    weights: tuple[Weight, ...]  # gate, up and down, those of all experts on top of each other
    experts: int
    used: int
    starts: tuple[int, ...]  # where an expert's matrices begin in a slot, in the backend's layout
    slot_bytes: int


class ExpertSupply(Protocol):
    """What brings experts from disk and keeps some. All but `stop` belongs to the engine's thread."""

    @property
    def address(self) -> int:
        """Of a `struct expert_supply` (expert_supply.h), good as long as the owner lives. Mixtures have the
        numbers in which they were given."""
        ...

    def begin(self, rows: int) -> None:
        """A pass of `rows` rows begins."""
        ...

    def end(self) -> None:
        """The pass has ended. Raises what went wrong, if some experts did not come."""
        ...

    def restart(self) -> None:
        """A pass has ended in the middle."""
        ...

    def stop(self) -> None:
        """From any thread: who waits for an expert gets none any more, until `restart`."""
        ...


class Cacheable(Protocol):
    """What a backend does that can compute with experts that come when they are wanted."""

    def mixtures(self, ops: Sequence[Op]) -> tuple[Mixture, ...]:
        """All mixtures of some ops; none where it cannot take the experts of all of them so."""
        ...

    def prepare(self, mixtures: Sequence[Mixture], supply: ExpertSupply) -> None:
        """From now on the experts of these come from there."""
        ...


class Mappable(Protocol):
    """What a backend does that can compute with weights where they lie in their files.

    It is slower than pieces where every pass takes all weights, and better where a pass takes few of many:
    the experts of a mixture.
    """

    def choose(self, ops: Sequence[Op], room: int) -> tuple[Weight, ...]:
        """Which weights of these ops are to be mapped so that the others fit: none that cannot be; () if that
        does not help. Those of which a pass needs few go first."""
        ...

    def least(self, ops: Sequence[Op], weights: Sequence[Weight]) -> int:
        """Memory without which these cannot be used."""
        ...

    def map(self, weights: Sequence[Weight], room: int) -> None:
        """Map these when they are wanted, instead of reading them; their pages take at most so much."""
        ...

    @property
    def bytes_read(self) -> int:
        """What came from the files so far."""
        ...

    @property
    def resident_bytes(self) -> int:
        """What mapped pages take in memory, at most."""
        ...
