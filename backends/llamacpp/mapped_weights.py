"""Weights as they lie in their file, mapped: for what does not fit into memory and is not cut into pieces,
above all the experts of a mixture, of which a token needs few.

Which pages are in memory is decided here and in kernels/pages.c, not by the system: nodes in front of the
products bring what these are about to read (page_in.py), and what was not needed for longest goes, so that
all mappings together keep within `room`. Without that library the system brings pages, and `trim` takes them
back now and then. A file that is cut meanwhile is an error of the pass (kernels/sigbus.c); without that
library it ends the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from ctypes import addressof
from dataclasses import dataclass

import numpy as np

from hetrun.backend import WeightUse
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.file_runs import MatrixRun, find_run
from hetrun.backends.llamacpp.ggml_api import GgmlLibrary
from hetrun.backends.llamacpp.kernels.paging import NONE, Pager, PagingUnit, Pool, Range
from hetrun.backends.llamacpp.kernels.sigbus_guard import SigbusGuard
from hetrun.backends.llamacpp.tensor_contexts import TensorContexts
from hetrun.backends.llamacpp.weight_memory import WEIGHTS_USAGE, GgmlBuffer
from hetrun.errors import BackendError, ModelFileError
from hetrun.system.file_identity import Stamp

MAPPED = "mapped"  # the layout of these weights
PAGE = mmap.PAGESIZE


class MappedFile:
    """A file that weights lie in, as memory of ours and as a buffer of ggml's."""

    def __init__(self, lib: GgmlLibrary, guard: SigbusGuard | None, path: str, stamp: Stamp | None) -> None:
        self.path, self.stamp = path, stamp
        self._lib, self._guard, self._region = lib, guard, NONE
        try:
            # O_NONBLOCK: a pipe that took the file's place must not be waited for.
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise ModelFileError(path, f"was changed while in use: {e.strerror}; open it again") from e
        try:
            self.check()
            self.memory = mmap.mmap(self.file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except (OSError, ValueError) as e:
            os.close(self.file)
            raise ModelFileError(path, f"cannot be mapped: {e}; copy it to a local disk") from e
        except ModelFileError:
            os.close(self.file)
            raise
        self._view = np.frombuffer(self.memory, np.uint8)
        self.address, self.size = self._view.ctypes.data, self._view.nbytes
        self.buffer: int = lib.ggml_backend_cpu_buffer_from_ptr(self.address, self.size)
        lib.ggml_backend_buffer_set_usage(self.buffer, WEIGHTS_USAGE)
        if guard:
            self._region = guard.register(self.address, -(-self.size // PAGE) * PAGE)

    def check(self) -> None:
        """Refuse a file that is not, or no longer, the one whose header was read."""
        if self.stamp:
            self.stamp.check(self.path, os.fstat(self.file))

    def fault(self) -> int | None:
        """Where reading it failed since this was asked last."""
        address = self._guard.fault(self._region) if self._guard else 0
        return address - self.address if address else None

    def mend(self) -> None:
        """Show the file again where zeros took its place."""
        if self._guard and not self._guard.mend(self._region, self.file):
            raise BackendError(f"{self.path} could not be mapped again")

    def drop(self, start: int, nbytes: int) -> None:
        """Take whole pages of these bytes out of memory."""
        first, end = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
        if first < end:
            self.memory.madvise(mmap.MADV_DONTNEED, first, end - first)
            os.posix_fadvise(self.file, first, end - first, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give everything back; nothing that was compiled with it runs any more."""
        if self._guard:
            self._guard.unregister(self._region)
        self._lib.ggml_backend_buffer_free(self.buffer)
        del self._view
        self.memory.close()
        os.close(self.file)


@dataclass(frozen=True, slots=True)
class MappedBuffer(GgmlBuffer):
    """A weight as a tensor in its file; it takes no memory of its own."""

    mapped: MappedPages


class MappedPages:
    """The weights that are mapped, and which of their pages are in memory."""

    def __init__(self, lib: GgmlLibrary, pager: Pager | None, guard: SigbusGuard | None) -> None:
        self._lib, self.pager, self._guard = lib, pager, guard
        self._files: dict[str, MappedFile] = {}
        self._held: dict[WeightUse, MappedBuffer] = {}
        self._runs: dict[WeightUse, MatrixRun] = {}
        self._contexts = TensorContexts(lib)
        self._first_units: dict[tuple[WeightUse, ...], int] = {}
        self._units, self._ranges = (PagingUnit * 0)(), (Range * 0)()
        self._lists = [np.empty(0, np.int64) for _ in range(2)]
        self._room = 0
        self._hand = 0  # of the clock by which pages go where there is no pager
        self._others = file_pages()
        self.pool = Pool(page=PAGE, first=NONE, last=NONE)

    # --- which weights

    @staticmethod
    def refusal(use: WeightUse) -> str | None:
        """Why a weight cannot be mapped; None if it can."""
        found = find_run(use)
        return found if isinstance(found, str) else None

    @staticmethod
    def least(ops: Iterable[Sequence[WeightUse]]) -> int:
        """The least room in which ops can run that read these: a prompt needs all experts of one of them."""
        found = [[run for use in uses if isinstance(run := find_run(use), MatrixRun)] for uses in ops]
        most = max((sum(map(pages, runs)) for runs in found), default=0)
        return PAGE * (most + sum(run.matrices for runs in found for run in runs))

    def hold(self, use: WeightUse) -> MappedBuffer:
        """Map a weight; nothing of it is in memory yet."""
        if use not in self._held:
            run = find_run(use)
            if isinstance(run, str):
                raise BackendError(f"{use.weight.name} cannot be mapped: {run}")
            if run.path not in self._files:
                self._files[run.path] = MappedFile(self._lib, self._guard, run.path, run.stamp)
            # What others left in the cache counts as ours once a fault maps it beside what we asked for.
            self._files[run.path].drop(run.offset, run.span)
            self._runs[use] = run
            self._held[use] = MappedBuffer(self._tensor(use, run), 0, MAPPED, self)
        return self._held[use]

    def _tensor(self, use: WeightUse, run: MatrixRun) -> int:
        lib, file = self._lib, self._files[run.path]
        context = self._contexts.lasting()
        cols = use.weight.shape[1]
        tensor: int = lib.ggml_new_tensor_3d(context, use.weight.quant.ggml_id, cols, run.rows, run.matrices)
        fields = ggml_api.tensor_at(tensor)
        fields.nb[2] = run.distance
        fields.nb[3] = run.distance * run.matrices
        if lib.ggml_backend_tensor_alloc(file.buffer, tensor, file.address + run.offset) != ggml_api.SUCCESS:
            raise BackendError(f"ggml refused {use.weight.name} where it lies in its file")
        return tensor

    # --- which pages

    @property
    def room(self) -> int:
        """Bytes that mapped pages may take in memory."""
        return self._room

    @room.setter
    def room(self, nbytes: int) -> None:
        """Between passes: what is over the limit goes at once."""
        self._room = nbytes
        # Where two matrices share a page it stays when one of them goes.
        self.pool.room = max(0, nbytes - PAGE * len(self._ranges))
        self.trim()

    @property
    def resident_bytes(self) -> int:
        """What mapped pages take in memory, at most."""
        if self.pager:
            return int(self.pool.resident) + PAGE * len(self._ranges)
        return max(0, file_pages() - self._others) * PAGE

    @property
    def bytes_read(self) -> int:
        """What came from the files so far, as far as nodes brought it."""
        return int(self.pool.read_bytes)

    @property
    def bytes_used(self) -> int:
        """What products read so far, from memory or from the files."""
        return int(self.pool.asked_bytes)

    def units(self, uses: tuple[WeightUse, ...]) -> int:
        """The number of the first unit of what one op reads: an expert's matrices come and go together."""
        if uses not in self._first_units:
            runs = [self._runs[use] for use in uses]
            first = len(self._units)
            units: list[PagingUnit] = []
            ranges: list[Range] = []
            for matrix in range(runs[0].matrices):
                mine = [self._range(run, matrix) for run in runs]
                size = PAGE * sum(pages_of(r.offset, r.bytes) for r in mine)
                start = len(self._ranges) + len(ranges)
                every = int(runs[0].matrices == 1)
                units.append(PagingUnit(start, len(mine), size, every, NONE, NONE, 0, 0))
                ranges += mine
            self._add(units, ranges)
            self._first_units[uses] = first
        return self._first_units[uses]

    def _range(self, run: MatrixRun, matrix: int) -> Range:
        file, offset = self._files[run.path], run.offset + matrix * run.distance
        return Range(file.address + offset, run.matrix_bytes, file.file, offset)

    def _add(self, units: Sequence[PagingUnit], ranges: Sequence[Range]) -> None:
        """Longer tables; nodes know only the pool, which knows where they are."""
        self._units = (PagingUnit * (len(self._units) + len(units)))(*self._units, *units)
        self._ranges = (Range * (len(self._ranges) + len(ranges)))(*self._ranges, *ranges)
        self._lists = [np.empty(len(self._units), np.int64) for _ in range(2)]
        pool = self.pool
        pool.n_coming = pool.n_going = 0
        pool.units, pool.ranges = addressof(self._units), addressof(self._ranges)
        pool.coming, pool.going = (a.ctypes.data for a in self._lists)
        pool.room = max(0, self._room - PAGE * len(self._ranges))

    def trim(self) -> None:
        """Give back what is over the limit: between passes, or in pauses of a pass where nodes do not."""
        if self.pager:
            self.pager.trim(self.pool)
            return
        runs = list(self._runs.values())
        for _ in runs:
            if self.resident_bytes <= self._room:
                break
            run = runs[self._hand % len(runs)]
            self._hand += 1
            self._files[run.path].drop(run.offset, run.span)

    # --- around a run

    def arm(self) -> None:
        """Before a run: the files are what they were, and a file that is cut now will be noticed."""
        if self._guard and self._files:
            self._guard.arm()
        for file in self._files.values():
            file.check()

    def check(self) -> None:
        """After a run: its results count only if every file gave what was read of it."""
        faults = [(file, at) for file in self._files.values() if (at := file.fault()) is not None]
        if faults:
            self._forget()
        for file, _ in faults:
            file.mend()
        for file in self._files.values():
            file.check()
        for file, at in faults:
            raise ModelFileError(
                file.path, f"reading it at byte {at} failed while it was in use: try again, or get it again"
            )

    def _forget(self) -> None:
        """No page is known to be there."""
        room, self.pool.room = self.pool.room, 0
        self.trim()
        self.pool.room = room

    def close(self) -> None:
        """Give everything back."""
        self._contexts.close()
        for file in self._files.values():
            file.close()
        self._files, self._held, self._runs = {}, {}, {}


def pages(run: MatrixRun) -> int:
    """Pages that the matrices of a weight take; those that two of them share count for each."""
    return sum(pages_of(run.offset + m * run.distance, run.matrix_bytes) for m in range(run.matrices))


def pages_of(offset: int, nbytes: int) -> int:
    """Pages that some bytes of a file lie in."""
    return (offset + nbytes - 1) // PAGE - offset // PAGE + 1


def file_pages() -> int:
    """Pages of files that this process has in memory."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[2])
