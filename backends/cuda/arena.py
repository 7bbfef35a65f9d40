"""Device memory: taken once, in one piece, and given out in parts. Nothing of ours lies anywhere else."""

from __future__ import annotations

from bisect import bisect_left, insort

from hetrun.errors import BudgetError

ALIGNMENT = 256  # bytes: what the widest loads and cuBLAS like


def in_arena(nbytes: int) -> int:
    """What so many bytes take."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class Arena:
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
        """The address of so many bytes; BudgetError where no gap is so large."""
        size = in_arena(nbytes)
        for i, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self._taken[offset] = size
                self.used += size
                self.most_used = max(self.most_used, self.used)
                self.reached = max(self.reached, offset + size)
                return self._address + offset
        raise BudgetError(
            f"no room in GPU memory for {what}: {size / 2**20:.1f} MiB are needed, "
            f"{self.left / 2**20:.1f} of {self.nbytes / 2**20:.1f} MiB are left; grant more with --vram"
        )

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
