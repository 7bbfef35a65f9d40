"""The prefix cache from one process to the next: a file that is read at the start and written at the end; and
numbers of slots, by which clients save what one of them computed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from hetrun.errors import OptionError, UserError, printable
from hetrun.executor.planned_model import PlannedModel
from hetrun.loader.fingerprint import fingerprint
from hetrun.memory.kv import prefix_file
from hetrun.memory.kv.prefix_cache import PrefixEntry, Prefixes
from hetrun.memory.kv.prefix_file import MOST_BYTES, Unusable
from hetrun.memory.kv.radix_tree import Tokens
from hetrun.memory.kv.row_serializer import SavedRows
from hetrun.planner.options import Options
from hetrun.system.units import format_bytes

log = logging.getLogger(__name__)


class PrefixStore:
    """What is kept of a model's prompts, to and from files; on the engine's thread."""

    def __init__(self, model: PlannedModel, prefixes: Prefixes, options: Options) -> None:
        self._model = model
        self._prefixes = prefixes
        self._options = options
        self._rows = SavedRows(model.kv)
        self._identity: bytes | None = None

    def save(self, path: Path, most: int = MOST_BYTES) -> int:
        """Write what is kept, the last used first, and return how many prompts had room in `most` bytes.

        Where nothing is kept the file stays as it is. UserError says why nothing was written.
        """
        entries = self._prefixes.entries()
        return prefix_file.save(path, self.identity, entries, self._rows, most) if entries else 0

    def load(self, path: Path) -> int:
        """Keep what a file has, as far as there is room, and say how many prompts that were.

        UserError says why nothing was read. Without a file there is nothing to read, which is no error.
        """
        context, n_vocab = self._model.context, self._model.n_vocab
        try:
            entries = prefix_file.load(path, self.identity, self._rows, context, n_vocab)
        except Unusable as why:
            raise UserError(f"{printable(str(path))} {why}") from why
        for entry in reversed(entries):  # so that the last used becomes that again
            self._prefixes.keep(entry.seq, entry.tokens)
        return len(entries)

    def save_one(self, path: Path, tokens: Tokens, most: int = MOST_BYTES) -> int:
        """Write what is kept of these tokens' beginning, and say how many that are; 0: nothing is.

        UserError says why nothing was written. A symbolic link is never followed.
        """
        seq, n = self._prefixes.holding(tokens)
        if not n:
            return 0
        entry = PrefixEntry(seq, tokens[:n])
        if not prefix_file.save(path, self.identity, [entry], self._rows, most, follow=False):
            raise UserError(f"{n} tokens would take more than the {format_bytes(most)} that a file may have")
        return n

    def load_one(self, path: Path) -> Tokens:
        """Keep the prompt of a file, and return its tokens. UserError says why there is none."""
        context, n_vocab = self._model.context, self._model.n_vocab
        try:
            entries = prefix_file.load(path, self.identity, self._rows, context, n_vocab, follow=False)
        except Unusable as why:
            raise UserError(f"{printable(path.name)} {why}") from why
        if not entries:
            there = path.exists()
            said = "holds a prompt for which there is no room" if there else "does not exist"
            raise UserError(f"{printable(path.name)} {said}")
        for entry in reversed(entries):
            self._prefixes.keep(entry.seq, entry.tokens)
        return entries[0].tokens

    def begin(self, path: Path) -> None:
        """Read what an earlier process left; without it everything is computed again, and the log says so."""
        start = perf_counter()
        try:
            n = self.load(path)
        except UserError as error:
            log.warning("%s; prompts are computed again", error)
        else:
            log.info("%d prompts were read from %s in %.3f s", n, path, perf_counter() - start)

    def end(self, path: Path) -> None:
        """Leave what is kept to the next process."""
        start = perf_counter()
        try:
            n = self.save(path)
        except UserError as error:
            log.warning("%s", error)
        else:
            log.info("%d prompts were written to %s in %.3f s", n, path, perf_counter() - start)

    @property
    def identity(self) -> bytes:
        """Whose rows these are."""
        if self._identity is None:
            model, options = self._model, self._options
            self._identity = fingerprint(
                model.graph,
                model.kv.layout,
                sys.byteorder,
                options.precision,
                one_path(model) if options.wishes.deterministic else "",
            )
        return self._identity


def one_path(model: PlannedModel) -> str:
    """With --deterministic rows must be the very bits that this process would compute."""
    from hetrun import __version__

    places = model.plans.plan(1).places
    return f"{__version__} {model.plans.plan(1).threads} {places}"


def check_place(path: Path) -> None:
    """Whether there can be a file; said before a model is loaded and prompts are computed for nothing."""
    folder = path.parent
    if not folder.is_dir():
        raise OptionError(
            f"--prompt-cache {printable(str(path))}: the folder {printable(str(folder))} does not "
            "exist; create it"
        )


class EngineSlots:
    """Numbers of places, as clients know them: which are taken, and what was last computed in each; on the
    engine's thread.

    The engine itself needs no numbers: keys and values of a request that has ended are an entry of the prefix
    cache, with which any other request can begin. A number says whose tokens are saved to a file.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # number -> the request there
        self._last: dict[int, Tokens] = {}

    def is_taken(self, number: int | None) -> bool:
        """Whether a request has this place now."""
        return number in self._taken

    def take(self, request: int, number: int | None) -> int:
        """The place that a request wants, which must be free, or the first free one."""
        if number is None:
            number = next(i for i in range(len(self._taken) + 1) if i not in self._taken)
        self._taken[number] = request
        return number

    def left(self, number: int, tokens: Sequence[int]) -> None:
        """A request has left its place, with these tokens computed; without any nothing is known of it."""
        self._taken.pop(number, None)
        self.put(number, np.array(tokens, np.int32))

    def last(self, number: int) -> Tokens:
        """What was computed last in a place; empty: nothing."""
        return self._last.get(number, np.zeros(0, np.int32))

    def put(self, number: int, tokens: Tokens) -> None:
        """A place holds these tokens."""
        if len(tokens):
            self._last[number] = tokens
        else:
            self._last.pop(number, None)
