"""Device memory: taken in one piece or, as it is needed, in a few, and given out in parts. Nothing of ours
lies anywhere else."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable

from hetrun.errors import BudgetError
from hetrun.system.units import format_bytes

ALIGNMENT = 256  # bytes: what the widest loads and cuBLAS like


def in_arena(nbytes: int) -> int:
    """Bytes of an arena that `nbytes` bytes take."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class DeviceArena:
    """Parts of a piece of memory: each in the first gap that has room; free neighbours are one gap."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.used = 0  # bytes that are given out
        self.most_used = 0
        self.reached = 0  # bytes up to the end of the last part that there ever was
        self._address = address
        self._gaps: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []  # (offset, size)
        self._taken: dict[int, int] = {}  # offset -> size

    @property
    def left(self) -> int:
        """Bytes that are not, maybe in several gaps."""
        return self.nbytes - self.used

    def take(self, nbytes: int, what: str) -> int:
        """The address of `nbytes` bytes; BudgetError where no gap is large enough."""
        found = self.find(nbytes)
        if found is None:
            raise no_room(what, in_arena(nbytes), self.left, self.nbytes)
        return found

    def find(self, nbytes: int) -> int | None:
        """The same; None where no gap is so large."""
        size = in_arena(nbytes)
        for i, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self._taken[offset] = size
                self.used += size
                self.most_used = max(self.most_used, self.used)
                self.reached = max(self.reached, offset + size)
                return self._address + offset
        return None

    def give(self, address: int) -> None:
        """Take a part back."""
        offset = address - self._address
        size = self._taken.pop(offset)
        self.used -= size
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            offset, before = self._gaps.pop(at - 1)
            size += before
        insort(self._gaps, (offset, size))


Allocate = Callable[[int], int]  # takes the number of bytes and gives their address, or raises MemoryError


class GrowingArena:
    """Arenas that are taken one after the other, when a part needs more than there is: up to a number of
    bytes in all, which are not promised to it. What is not needed here is left to others."""

    def __init__(self, allocate: Allocate, nbytes: int, step: int) -> None:
        """At least `step` bytes are taken at once, as far as that many are left."""
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.most_used = 0
        self._allocate, self._step = allocate, step
        self._arenas: list[DeviceArena] = []  # by address
        self.addresses: list[int] = []  # where they begin
        self.grow(min(step, self.nbytes))

    @property
    def taken(self) -> int:
        """Bytes that no other part of the program can have."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def used(self) -> int:
        """Bytes that are given out."""
        return sum(arena.used for arena in self._arenas)

    @property
    def left(self) -> int:
        """Bytes that are not, maybe in several gaps, and maybe not taken yet."""
        return self.nbytes - self.used

    def grow(self, nbytes: int) -> None:
        """Take `nbytes` bytes more; MemoryError where others have them."""
        address = self._allocate(nbytes)
        at = bisect_left(self.addresses, address)
        self.addresses.insert(at, address)
        self._arenas.insert(at, DeviceArena(address, nbytes))

    def take(self, nbytes: int, what: str) -> int:
        """The address of `nbytes` bytes; BudgetError if no gap is large enough and no more can be taken."""
        found = self._find(nbytes)
        if found is None and self._has_grown(in_arena(nbytes)):
            found = self._find(nbytes)
        if found is None:
            raise no_room(what, in_arena(nbytes), self.left, self.nbytes)
        self.most_used = max(self.most_used, self.used)
        return found

    def _find(self, nbytes: int) -> int | None:
        return next((found for arena in self._arenas if (found := arena.find(nbytes)) is not None), None)

    def _has_grown(self, size: int) -> bool:
        """Take more, for a part of this size. Where others have taken that, it ends here for good."""
        room = self.nbytes - self.taken
        if size > room:
            return False
        for wished in (min(room, max(size, self._step)), size):
            try:
                self.grow(wished)
            except MemoryError:
                continue
            return True
        self.nbytes = self.taken
        return False

    def give(self, address: int) -> None:
        """Take a part back."""
        self._arenas[bisect_right(self.addresses, address) - 1].give(address)


def no_room(what: str, size: int, left: int, nbytes: int) -> BudgetError:
    """Something does not fit."""
    return BudgetError(
        f"no room in GPU memory for {what}: {format_bytes(size)} are needed, "
        f"{format_bytes(left)} of {format_bytes(nbytes)} are left; grant more with --vram"
    )
