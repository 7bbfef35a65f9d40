"""Brings the pieces of a model that do not stay in memory from disk, pass for pass, ahead of who takes them.

The reading is done by ring_reader.c; here is what it reads, and what is said when it cannot. Every pass
checks that the files are still those whose headers were read: weights of another would be silent nonsense.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from hetrun.backend.weight_streaming import Cut, Piece, PieceOffsets
from hetrun.errors import BackendError, Cancelled, HetrunError
from hetrun.graph import Constant, Extent, Remade, Weight
from hetrun.prefetch.extents import can_stream, extents, lay_out, table
from hetrun.prefetch.native import ReadFunction
from hetrun.prefetch.open_files import OpenFiles
from hetrun.prefetch.ring_buffer import MISTAKE, PAGE, ReadFault, RingBuffer, RingCounts, RingShape, library

__all__ = ["StreamStats", "Streamer", "can_stream", "library"]


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What was read, and how long computation stood still for it."""

    bytes_read: int = 0  # since the beginning, what is not used yet included
    reads: int = 0  # that the system was asked for
    waited: float = 0.0  # seconds in which some thread waited for a piece
    thread_waited: float = 0.0  # the same for each thread, added up
    pass_bytes: int = 0  # what the last pass took
    pass_waited: float = 0.0
    pass_thread_waited: float = 0.0


class Streamer:
    """What a backend with a part of its weights takes the others from (`weight_streaming.Supply`).

    All but `stop` belongs to the engine's thread. Nothing is read ahead of the first `follow`.
    """

    def __init__(
        self,
        cut: Cut,
        window_bytes: int,
        threads: int,
        direct: bool = True,
        synchronous: bool = False,
        read: ReadFunction | None = None,
    ) -> None:
        """At most about `window_bytes` are read ahead. `synchronous` reads nothing ahead, for comparisons;
        `read` takes the place of pread, for tests."""
        self._cut = cut
        laid = [lay_out(piece) for piece in cut.pieces]
        self.places: Mapping[Piece, PieceOffsets] = {
            piece: each.place for piece, each in zip(cut.pieces, laid, strict=True) if each
        }
        self._numbers = {id(piece): i for i, piece in enumerate(cut.pieces)}  # as hashing them takes long
        self._opened = OpenFiles(_weights(cut), direct)
        self._table = table(laid, self.files)
        slot = max((each.nbytes for each in laid if each), default=PAGE)
        slots = min(max(1, window_bytes // slot), max(1, len(self.places)))
        self._last = RingCounts()  # when the last pass ended
        self._of_head = 0  # pieces of the head that come from disk
        try:
            shape = RingShape(slots, slot, 0 if synchronous else threads, synchronous)
            self._ring = RingBuffer(self._opened.files, shape, read)
        except BaseException:
            self._opened.close()
            raise

    # --- what there is

    @property
    def address(self) -> int:
        """Of the `struct supply`, good until `close`."""
        return self._ring.address

    @property
    def files(self) -> Mapping[str, int]:
        """The number of each file, for rows that are read by themselves."""
        return self._opened.numbers

    @property
    def nbytes(self) -> int:
        """Memory that is held for reading."""
        return self._ring.shape.nbytes

    @property
    def shape(self) -> RingShape:
        """How many slots there are, how large they are, and who fills them."""
        return self._ring.shape

    @property
    def direct(self) -> bool:
        """Whether reads pass by the system's cache."""
        return all(file.direct for file in self._opened.files)

    @property
    def stats(self) -> StreamStats:
        """What was read so far, and by the last pass that ended."""
        counts, last = self._ring.counts(), self._last
        return StreamStats(
            bytes_read=counts.bytes,
            reads=counts.reads,
            waited=counts.stalled / 1e9,
            thread_waited=counts.waited / 1e9,
            pass_bytes=last.lap_bytes,
            pass_waited=last.lap_stalled / 1e9,
            pass_thread_waited=last.lap_waited / 1e9,
        )

    # --- passes

    def follow(self, streamed: Sequence[Piece]) -> None:
        """These pieces come from disk from the next pass on, each by its rank here; in the order of the cut.

        What was read ahead is kept as far as the pieces are the same.
        """
        numbers = [self._numbers[id(piece)] for piece in streamed]
        if any(a >= b for a, b in pairwise(numbers)):
            raise ValueError("pieces come from disk in the order in which a pass takes them")
        schedule = self._table[numbers]
        if not schedule["count"].all():
            raise ValueError("there are pieces among these that cannot come from disk")
        self._ring.follow(schedule, sum(number < self._cut.always for number in numbers))
        of_head = range(len(self._cut.pieces) - self._cut.head, len(self._cut.pieces))
        self._of_head = sum(number in of_head for number in numbers)

    def begin(self, wanted: bool, head: bool = True) -> None:
        """A pass begins; `wanted`: it takes the pieces after `Cut.always` as well, `head`: those of
        the head, too."""
        self._opened.check()
        self._ring.begin(wanted, 0 if head else self._of_head)

    def end(self) -> None:
        """The pass has taken all of its pieces. Raises what went wrong, if some did not come or if a file was
        changed meanwhile."""
        counts = self._ring.counts()
        if counts.missing:
            raise self.error() or BackendError(f"a pass ended without {counts.missing} of its pieces")
        self._opened.check()
        self._last = counts

    def restart(self) -> None:
        """A pass has ended in the middle, and no runner is at work: the next begins with the first piece."""
        self._ring.restart()

    def stop(self) -> None:
        """From any thread: threads that wait for a piece get none any more, until `restart`."""
        self._ring.stop()

    def error(self) -> HetrunError | None:
        """Why pieces do not come; None after a `stop` that had no other reason."""
        fault = self._ring.fault()
        return None if fault is None else self._explained(fault)

    # --- pieces that are going to stay

    def each(self, pieces: Sequence[Piece]) -> Generator[tuple[Piece, NDArray[np.uint8]], None, None]:
        """Pieces in the order of the cut and their stored bytes, run after run, good until the next is asked
        for. All readers read ahead, as for a pass, so another `follow` must come after it."""
        if not pieces:
            return  # and keep what was read ahead
        self.follow([piece for piece in pieces if self._streams(piece)])
        self.begin(True)
        rank = 0
        try:
            for piece in pieces:
                if self._streams(piece):
                    yield piece, self._taken(piece, rank)
                    self._ring.release(rank)
                    rank += 1
                else:
                    out = np.empty(piece.nbytes, np.uint8)
                    self.read(piece, out)
                    yield piece, out
            self._opened.check()
        except BaseException:  # also if the others are not wanted
            self._ring.restart()
            raise

    def _streams(self, piece: Piece) -> bool:
        return bool(self._table["count"][self._numbers[id(piece)]])

    def _taken(self, piece: Piece, rank: int) -> NDArray[np.uint8]:
        address = self._ring.wait(rank)
        if address is None:
            raise self.error() or Cancelled("reading was stopped")
        row, runs = piece.weight.quant.row_bytes(piece.weight.shape[1]), []
        for (a, b), start in zip(piece.runs, self.places[piece].starts, strict=True):
            memory = (c_uint8 * ((b - a) * row)).from_address(address + start)
            runs.append(np.ctypeslib.as_array(memory))
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def read(self, piece: Piece, out: NDArray[np.uint8]) -> None:
        """The stored bytes of one piece, run after run, now."""
        if out.shape != (piece.nbytes,):
            raise ValueError(f"a piece of {piece.nbytes} bytes cannot be read into {out.shape}")
        for part, at, end in extents(piece):
            if isinstance(part, Constant):
                out[at:end] = np.frombuffer(part.data, np.uint8)
            elif isinstance(part, Remade):
                out[at:end] = part.make(self._extent).reshape(-1)
            else:
                self._fetch(part, out[at:end])

    def _extent(self, extent: Extent) -> NDArray[np.uint8]:
        found = np.empty(extent.rows * extent.row_bytes, np.uint8)
        self._fetch(extent, found)
        return found

    def _fetch(self, part: Extent, out: NDArray[np.uint8]) -> None:
        file = self.files[part.path]
        together = part.rows == 1 or part.stride == part.row_bytes
        rows = [out] if together else np.split(out, part.rows)
        for i, row in enumerate(rows):
            fault = self._ring.fetch(file, part.offset + i * part.stride, row)
            if fault:
                raise self._explained(fault)

    # --- what went wrong

    def _explained(self, fault: ReadFault) -> HetrunError:
        if fault.error == MISTAKE:
            return BackendError(f"piece {fault.offset} was taken twice, or by a pass that does not have it")
        return self._opened.explained(fault, self._name_at)

    def _name_at(self, path: str, at: int) -> str:
        return next((w.name for w in _weights(self._cut) if _covers(w, path, at)), "the model")

    def close(self) -> None:
        """Give memory, threads and files back; no runner is at work any more."""
        self._ring.close()
        self._opened.close()


def _weights(cut: Cut) -> tuple[Weight, ...]:
    """Each weight once."""
    everything = chain((piece.weight for piece in cut.pieces), cut.lookups)
    return tuple({id(weight): weight for weight in everything}.values())


def _covers(weight: Weight, path: str, at: int) -> bool:
    parts = (part for part in weight.parts if isinstance(part, Extent))
    return any(part.path == path and part.offset <= at < part.end for part in parts)
