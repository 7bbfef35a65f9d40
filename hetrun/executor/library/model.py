"""Models that a library runs as a whole, behind the same `Model` as those that are planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Descriptor, Floats
from hetrun.backend.library_model import WholeRunner
from hetrun.client.events import Streaming
from hetrun.client.queries import LayerPlace
from hetrun.errors import BudgetError, OptionError
from hetrun.executor.interface import ModelLimits
from hetrun.executor.library.plan import prepare
from hetrun.executor.stats import Stats, TimeKey
from hetrun.executor.steps import Between, Chunk, Step
from hetrun.loader.source import ModelSource
from hetrun.memory.kv.paged_allocator import too_long
from hetrun.planner.options import Options
from hetrun.planner.plan import bucket_of
from hetrun.system.progress import Progress

log = logging.getLogger(__name__)

UNKNOWN_VOCABULARY = 1 << 31  # tokens: how many there are the library says once the model is open


@dataclass(slots=True)
class _Sequence:
    """What a sequence is, and how much of it the library holds; the rest it gets with the next step."""

    tokens: list[int] = field(default_factory=list)
    held: int = 0


class WholeModel:
    """A `Model` over a library's own."""

    stands_aside = False
    width = 0  # the library gives logits only
    hidden = np.empty((0, 0), np.float32)
    alike = 0  # what is taken back, the library may have to compute again from the beginning

    def __init__(
        self,
        source: ModelSource,
        backend: Descriptor,
        options: Options,
        progress: Progress | None = None,
        look: Callable[[ModelLimits], None] = lambda limits: None,
    ) -> None:
        prepared = prepare(source, backend, options)
        self.stats = Stats()
        self.plans, self._setup, self._need = prepared.plans, prepared.setup, prepared.need
        self.context, self.max_sequences = self._setup.context, self._setup.sequences
        look(ModelLimits(self.context, UNKNOWN_VOCABULARY))
        self._runner: WholeRunner = prepared.whole.open(prepared.files, self._setup, progress)
        if not options.backends:
            log.warning(
                "%s: hetrun has no architecture %r, so %s runs it as a whole; `hetrun plan` says more",
                source.path,
                source.architecture[:40],
                backend.name,
            )
        self.n_vocab = self._runner.n_vocab
        self._segment = self.plans.plan(1).segments[0]
        self._sequences: dict[int, _Sequence] = {}

    # --- sequences

    def alloc(self) -> int:
        """A new, empty sequence."""
        # One more than run together, to be used beside them.
        free = (i for i in range(self.max_sequences + 1) if i not in self._sequences)
        seq = next(free, None)
        if seq is None:
            raise BudgetError(
                f"{self._segment.backend} has room for {self.max_sequences} sequences here, all in use"
            )
        self._sequences[seq] = _Sequence()
        return seq

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Always: the library took the memory of every sequence at the start."""
        return True

    def shareable(self, seq: int, n: int) -> int:
        """All of them; what the library cannot cut it gets again."""
        return n

    def fork(self, seq: int, n: int | None = None) -> int:
        """A new sequence with the same tokens, or the first n of them."""
        parent, new = self._sequences[seq], self.alloc()
        self._runner.copy(seq, new)
        self._sequences[new] = _Sequence(parent.tokens.copy(), parent.held)
        if n is not None:
            self.truncate(new, n)
        return new

    checkpoint_every = 0

    def thin(self, over: Collection[int] = ()) -> bool:
        """What cannot be cut is computed anew: nothing is kept for it."""
        return False

    def truncate(self, seq: int, n: int) -> int:
        """Forget every token from position n on."""
        s = self._sequences[seq]
        if not 0 <= n <= len(s.tokens):
            raise ValueError(f"sequence {seq} has {len(s.tokens)} tokens and cannot be cut to {n}")
        del s.tokens[n:]
        if s.held > n:
            s.held = n if self._runner.cut(seq, n) else 0
        return n

    def free(self, seq: int) -> None:
        """Give everything back."""
        self.truncate(seq, 0)
        del self._sequences[seq]

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return len(self._sequences[seq].tokens)

    @property
    def kv_bytes(self) -> int:
        """What the sequences hold of the memory that was taken at the start, estimated."""
        return sum(s.held * self._need.per_token for s in self._sequences.values())

    # --- steps

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens; good until the next step. The library does not stop in between."""
        before = {c.seq: len(self._sequences[c.seq].tokens) for c in step.chunks}
        if len(before) < len(step.chunks):
            raise ValueError("a step has one chunk for each of its sequences")
        for c in step.chunks:
            if before[c.seq] + len(c.tokens) > self.context:
                raise too_long(self.context)
        try:
            for c in step.chunks:
                self._sequences[c.seq].tokens += c.tokens.tolist()
            rows = self._run(_together([self._batch(c, before[c.seq]) for c in step.chunks]), step.wanted)
        except BaseException:
            self._take_back(before)
            raise
        for c in step.chunks:
            s = self._sequences[c.seq]
            s.held = len(s.tokens)
        return rows

    def _batch(self, chunk: Chunk, before: int) -> TokenBatch:
        """The tokens of a chunk, and in front of them those that the library had to forget."""
        s = self._sequences[chunk.seq]
        n = len(s.tokens) - s.held
        wanted = np.zeros(n, np.bool_)
        wanted[chunk.wanted + (before - s.held)] = True
        positions = np.arange(s.held, s.held + n)
        tokens = chunk.tokens if before == s.held else np.array(s.tokens[s.held :], np.int64)
        return TokenBatch(tokens, positions, np.full(n, chunk.seq), wanted)

    def _run(self, batch: TokenBatch, wanted: int) -> Floats:
        pieces = list(cut(batch.wanted, self._setup.ubatch, self._setup.wanted))
        if len(pieces) == 1:
            return self._run_piece(batch)
        out, at = np.empty((wanted, self.n_vocab), np.float32), 0
        for a, b in pieces:
            rows = self._run_piece(batch.part(a, b))
            out[at : at + len(rows)] = rows
            at += len(rows)
        return out

    def _run_piece(self, batch: TokenBatch) -> Floats:
        n, start = len(batch.tokens), perf_counter()
        rows = self._runner.run(batch.tokens, batch.positions, batch.sequences, batch.wanted)
        key = TimeKey(self._segment.name, self._segment.backend, bucket_of(n), self._setup.threads)
        self.stats.record(key).add(n, perf_counter() - start)
        return rows

    def _take_back(self, before: dict[int, int]) -> None:
        """After an error: every sequence is as long as it was; what the library lost, it gets again."""
        intact = self._runner.recover()
        for seq, s in self._sequences.items():
            if seq in before:
                del s.tokens[before[seq] :]
                s.held = s.held if intact and self._runner.cut(seq, s.held) else 0
            elif not intact:
                s.held = 0

    @property
    def segment(self) -> str:
        """The library runs the model as a whole."""
        return f"{self._segment.name} on {self._segment.backend}"

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        return self._runner.native_seconds

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        self._runner.cancel()

    def rearm(self) -> None:
        """Let the next step run."""
        self._runner.rearm()

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Nothing is known ahead."""
        return None

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """Nothing can be prepared: the library decides by itself."""

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Nothing to look after."""

    def rest(self) -> None:
        """The library keeps what it has."""

    def set_ram(self, nbytes: int) -> None:
        """Refused."""
        raise OptionError(
            f"the memory of this model cannot be changed while it runs: {self._segment.backend} holds the "
            "whole model; open it again with another --ram"
        )

    def bill(self) -> Mapping[str, int]:
        """As it was planned: the library does not say what it takes."""
        return self.plans.memory

    @property
    def reason(self) -> str:
        """The plan does not change."""
        return self.plans.reason

    @property
    def in_use(self) -> Mapping[str, int]:
        """The library does not say."""
        return {}

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """The library does not say where it has what."""
        return ()

    @property
    def crossed(self) -> Mapping[str, int]:
        """The library does not say."""
        return {}

    def streaming(self) -> Streaming | None:
        """The library holds everything."""
        return None

    def close(self) -> None:
        """Give everything back."""
        self._runner.close()


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of some sequences, one behind the other."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    sequences: NDArray[np.int64]
    wanted: NDArray[np.bool_]

    def part(self, a: int, b: int) -> TokenBatch:
        """Tokens a to b."""
        return TokenBatch(self.tokens[a:b], self.positions[a:b], self.sequences[a:b], self.wanted[a:b])


def _together(batches: list[TokenBatch]) -> TokenBatch:
    if len(batches) == 1:
        return batches[0]
    return TokenBatch(
        np.concatenate([b.tokens for b in batches]),
        np.concatenate([b.positions for b in batches]),
        np.concatenate([b.sequences for b in batches]),
        np.concatenate([b.wanted for b in batches]),
    )


def cut(wanted: NDArray[np.bool_], tokens: int, rows: int) -> Iterator[tuple[int, int]]:
    """Where a batch is cut, so that no piece has more tokens or more wanted ones than that."""
    at = np.flatnonzero(wanted)
    a = first = 0
    while a < len(wanted):
        b = min(a + tokens, len(wanted))
        last = int(np.searchsorted(at, b))
        if last - first > rows:
            last = first + rows
            b = int(at[last])
        yield a, b
        a, first = b, last
