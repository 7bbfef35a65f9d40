"""The block that predicts one more token (MTP), at work: its own executor, keys and values, and weights.

Its weights are brought in a second time, where it shares some with the model: nothing that the model's
planner moves or gives back touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetrun.backend import Backend, Floats, WeightUse
from hetrun.executor.executor import Executor
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Chunk, Step
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph, PredictionBlock, kv_shapes
from hetrun.graph.quant import QuantType
from hetrun.loader.architectures import prediction_block
from hetrun.loader.source import ModelSource
from hetrun.loader.table_rows import TableRows
from hetrun.memory.kv.cache import KvCache, sequence_bytes
from hetrun.planner.options import Wishes, this_machine
from hetrun.planner.plan import PlanSet
from hetrun.planner.static import StaticPlanner

AT_ONCE = 16  # tokens of a pass: graphs of few are cheap to keep, and one layer is read quickly
MOST_SEQUENCES = 4  # that it guesses for: with many in a step, guesses hardly pay
WORK = 4 << 20  # of its graphs, and scratch
BYTES_S, BESIDES_S = 25e9, 4e-4  # of weights that are read in a second, about; of a pass, besides these


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """What it runs on, and what it takes."""

    block: PredictionBlock
    backend: str
    plans: PlanSet
    uses: tuple[WeightUse, ...]
    quant: QuantType  # of keys and values
    weights: int  # bytes
    rows: int  # of keys and values, for all that it guesses for

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.weights + self.rows + WORK


class Guess(NamedTuple):
    """A token, and the hidden state that the next guess goes on from."""

    token: int
    hidden: Floats


def plan_block(
    source: ModelSource, backends: Mapping[str, Backend], wishes: Wishes, quant: QuantType
) -> PlannedBlock | None:
    """The block of a model on the first backend that computes on this thread; None where there is none."""
    if (block := prediction_block(source)) is None:
        return None
    graph = block.graph
    able = [n for n, b in backends.items() if b.started and not b.asynchronous and _runs(b, graph)]
    if not able:
        return None
    backend = backends[able[0]]
    wishes = Wishes(wishes.threads, AT_ONCE)
    plans = StaticPlanner({able[0]: backend}, able[:1]).plan(graph, this_machine(), wishes)
    uses = backend.wants(graph.ops)
    context = source.require_int("context_length", 1, 1 << 31)
    rows = MOST_SEQUENCES * sequence_bytes(kv_shapes(graph), quant, AT_ONCE, context)
    return PlannedBlock(block, able[0], plans, uses, quant, backend.resident_bytes(uses), rows)


def _runs(backend: Backend, graph: Graph) -> bool:
    return all(backend.supports(op) for op in graph.ops)


class Predictor:
    """Guesses tokens from what the model thought."""

    def __init__(
        self,
        planned: PlannedBlock,
        backend: Backend,
        context: int,
        threads: Callable[[], int],
        shares: Callable[[], None],
    ) -> None:
        """`threads`: how many the model's answers run with; `shares`: called before the backend is used:
        the model then sets its threads anew."""
        graph, mine = planned.block.graph, {planned.backend: backend}
        self._threads, self._shares = threads, shares
        self._store = WeightStore(mine)
        self._store.load({planned.backend: planned.uses})
        self._rows = TableRows(planned.block.table)
        limits = (MOST_SEQUENCES, AT_ONCE, planned.rows)
        self._kv = KvCache(kv_shapes(graph), planned.quant, context, *limits)
        self._executor = Executor(graph, planned.plans, mine, self._store, self._kv, Stats(), follows=False)
        self._running = 0  # sequences
        self.context = context
        self.about_s = planned.weights / BYTES_S + BESIDES_S  # that a guess takes, before one was made

    @property
    def has_place(self) -> bool:
        """Whether it can begin one more sequence."""
        return self._running < self._kv.max_sequences

    def alloc(self) -> int:
        """A new sequence."""
        seq = self._kv.alloc()
        self._running += 1
        return seq

    def free(self, seq: int) -> None:
        """A sequence is over."""
        self._kv.free(seq)
        self._running -= 1

    def keep(self, seq: int, n: int) -> bool:
        """Take back all but the first n tokens; False where that many are not there any more."""
        if not self._kv.keepable(seq, n):
            return False
        self._kv.truncate(seq, n)
        return True

    def guess(self, seq: int, tokens: Sequence[int], before: Floats) -> Guess:
        """What follows the next tokens of a sequence, by the hidden state of the token before each."""
        self._take_threads()
        embedded = self._rows(tokens)
        for a in range(0, len(tokens), AT_ONCE):
            b = min(a + AT_ONCE, len(tokens))
            ids = np.array(tokens[a:b], np.int64)
            wanted = np.array([b - a - 1] if b == len(tokens) else [], np.int64)
            given = (embedded[a:b], before[a:b])
            rows = self._executor.run(Step((Chunk(seq, ids, wanted, hidden=len(wanted), given=given),)))
        return Guess(int(rows[-1].argmax()), self._executor.hidden[-1:])

    def _take_threads(self) -> None:
        """Run with as many threads as the model, which will set its own again."""
        n, plans = self._threads(), self._executor.plans
        if n != plans.plan(1).threads:
            fewer = {bucket: replace(plan, threads=n) for bucket, plan in plans.plans.items()}
            self._executor.adopt(replace(plans, plans=fewer))
        self._shares()
        self._executor.forget_threads()

    def rest(self) -> None:
        """Nothing has come for a while."""
        self._executor.rest()
        self._kv.trim()

    def close(self) -> None:
        """Give everything back."""
        self._executor.close()
        self._rows.close()
