"""The rows of a KV cache as they go to files: table after table, of each what the next token would see."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hetrun.memory.kv.cache import KvCache


class SavedRows:
    """Blocks of rows, out of a cache and into one with the same layout."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._tables = [  # in the order in which the cache gives them
            (table, group.window)
            for i, group in enumerate(kv.groups)
            for layer, kept in kv.kept.items()
            for table in kept
            if kv.group(layer) == i
        ]

    @property
    def shares(self) -> bool:
        """A window is copied by each fork, and states are not to be had at any length: then every sequence is
        saved as a whole."""
        return not self._kv.states and not any(window for _, window in self._tables)

    def sizes(self, begin: int, end: int) -> list[int]:
        """Bytes of each table's rows for the tokens from `begin` to `end`."""
        states = [self._kv.states.size] if self._kv.states else []
        return [
            table.row_bytes * (min(end, window - 1) if window else end - begin)
            for table, window in self._tables
        ] + states

    def export(self, seq: int, begin: int, end: int) -> Iterator[memoryview]:
        """The rows, good until the sequence changes."""
        for size, block in zip(self.sizes(begin, end), self._kv.export(seq, end), strict=True):
            yield block[len(block) - size :]

    def restore(self, parent: int | None, begin: int, end: int, fill: Callable[[memoryview], object]) -> int:
        """A new sequence: its beginning shared with its parent, the rest as `fill` writes it."""
        if parent is None:
            return self._kv.import_(end, fill)
        seq = self._kv.fork(parent, begin)
        try:
            self._kv.extend(seq, end - begin)
            for block in self.export(seq, begin, end):
                fill(block)
        except BaseException:
            self._kv.free(seq)
            raise
        return seq

    def free(self, seq: int) -> None:
        """Give a sequence back."""
        self._kv.free(seq)
