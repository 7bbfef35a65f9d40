"""Runs plans: cuts a step into passes, finds or compiles the segments for each, runs them stage by stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hetrun.backend import Backend, Floats, Ints, Pass, PassShape, Runner, Segment, SequencePart
from hetrun.graph import Graph
from hetrun.kv import KvCache
from hetrun.plan import Plan, PlanSet
from hetrun.stats import Key, Record, Stats
from hetrun.weights import WeightStore

SMALL = 16  # tokens; graphs up to this size are cheap to keep
KEPT_SMALL, KEPT_LARGE = 64, 4  # compiled shapes kept


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence, and for which of them somebody wants the result."""

    seq: int
    tokens: Ints
    wanted: Ints


@dataclass(frozen=True, slots=True)
class Step:
    """What the model does next: tokens of several sequences, each as long as it likes."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(len(c.tokens) for c in self.chunks)


class Executor:
    """Runs steps of one graph by one plan set."""

    def __init__(self, graph: Graph, plans: PlanSet, backends: Mapping[str, Backend], store: WeightStore, kv: KvCache,
                 stats: Stats, deterministic: bool = False) -> None:  # fmt: skip
        self.plans = plans
        self._graph = graph
        self._backends = backends
        self._store = store
        self._kv = kv
        self._stats = stats
        # With one row in each pass there is one numeric path, whatever else is in the step.
        self._most_tokens = 1 if deterministic else plans.ubatch
        self._most_wanted = 1 if deterministic else max(SMALL, plans.ubatch // 4)
        self._small: OrderedDict[tuple[int, PassShape], Compiled] = OrderedDict()
        self._large: OrderedDict[tuple[int, PassShape], Compiled] = OrderedDict()
        self._plan: Plan | None = None  # whose threads are set

    def run(self, step: Step) -> Floats:
        """The logits of the wanted tokens, in order. The array is good until the next step.

        If anything goes wrong, every sequence is as long as it was before.
        """
        before = {c.seq: self._kv.length(c.seq) for c in step.chunks}
        try:
            slots = {c.seq: self._kv.extend(c.seq, len(c.tokens)) for c in step.chunks}
            passes = self._cut(step)
            # The next pass may write its results where this one's lie.
            own = len(passes) > 1
            results = [self._run_pass(self._prepare(pieces, before, slots), own) for pieces in passes]
        except BaseException:
            for seq, length in before.items():
                self._kv.truncate(seq, min(length, self._kv.length(seq)))
            raise
        kept = [r for r in results if r is not None]
        if len(kept) == 1:
            return kept[0]
        return np.concatenate(kept) if kept else np.empty((0, self._graph.logits.width), np.float32)

    def _cut(self, step: Step) -> list[list[tuple[Chunk, int, int]]]:
        """Passes, each a list of (chunk, first token, last token), within the limits on tokens and wanted rows."""
        n_wanted = sum(len(c.wanted) for c in step.chunks)
        if step.tokens <= self._most_tokens and n_wanted <= self._most_wanted:
            return [[(c, 0, len(c.tokens)) for c in step.chunks]]
        passes: list[list[tuple[Chunk, int, int]]] = [[]]
        tokens = wanted = 0
        for chunk in step.chunks:
            a, n = 0, len(chunk.tokens)
            while a < n:
                b = self._fit(chunk, a, self._most_tokens - tokens, self._most_wanted - wanted)
                if b == a:
                    passes.append([])
                    tokens = wanted = 0
                    continue
                passes[-1].append((chunk, a, b))
                tokens += b - a
                wanted += _count(chunk.wanted, a, b)
                a = b
        return passes

    def _fit(self, chunk: Chunk, a: int, tokens: int, wanted: int) -> int:
        """How far a chunk's tokens from `a` on go into what is left of a pass."""
        b = min(len(chunk.tokens), a + tokens)
        inside = chunk.wanted[(chunk.wanted >= a) & (chunk.wanted < b)]
        return int(inside[wanted]) if len(inside) > wanted else b

    def _prepare(
        self, pieces: Sequence[tuple[Chunk, int, int]], before: Mapping[int, int], slots: Mapping[int, Ints]
    ) -> Pass:
        parts, tokens, positions, rows, wanted = [], [], [], [], []
        at = wanted_at = 0
        for chunk, a, b in pieces:
            start = before[chunk.seq]
            mine = chunk.wanted
            if b - a < len(chunk.tokens):
                mine = mine[(mine >= a) & (mine < b)]
            if at != a:
                mine = mine + (at - a)
            view = self._kv.view(chunk.seq, start + b)
            parts.append(SequencePart(at, at + b - a, wanted_at, wanted_at + len(mine), view))
            tokens.append(chunk.tokens[a:b])
            positions.append(np.arange(start + a, start + b))
            rows.append(slots[chunk.seq][a:b])
            wanted.append(mine)
            at, wanted_at = at + b - a, wanted_at + len(mine)
        return Pass(_join(tokens), _join(positions), _join(rows), _join(wanted), tuple(parts))

    def _run_pass(self, work: Pass, own: bool) -> Floats | None:
        compiled = self._compiled(self.plans.plan(len(work.tokens)), work.shape)
        n = len(work.tokens)
        for stage in compiled.stages:
            begun = [(record, perf_counter(), runner.submit(work)) for record, runner in stage]
            for record, start, done in begun:
                done.wait()
                record.add(n, perf_counter() - start)
        if not len(work.wanted):
            return None
        logits = work.values[self._graph.logits.name]
        return logits.copy() if own else logits

    def _compiled(self, plan: Plan, shape: PassShape) -> Compiled:
        cache, most = (self._small, KEPT_SMALL) if shape.tokens <= SMALL else (self._large, KEPT_LARGE)
        key = (id(plan.stages), shape)
        found = cache.get(key)
        if found is None:
            while len(cache) >= most:
                cache.popitem(last=False)[1].close()
            found = cache[key] = self._compile(plan, shape)
        else:
            cache.move_to_end(key)
        self._set_threads(plan)
        return found

    def _set_threads(self, plan: Plan) -> None:
        if plan is not self._plan:
            for backend in self._backends.values():
                backend.set_threads(plan.threads)
            self._plan = plan

    def _compile(self, plan: Plan, shape: PassShape) -> Compiled:
        stages = tuple(
            tuple((self._stats.record(self._key(plan, s)), self._runner(s, shape)) for s in stage)
            for stage in plan.stages
        )
        return Compiled(stages)

    def _key(self, plan: Plan, segment: Segment) -> Key:
        return Key(segment.name, segment.backend, plan.bucket, plan.threads)

    def _runner(self, segment: Segment, shape: PassShape) -> Runner:
        return self._backends[segment.backend].compile(
            segment, shape, self._store.buffers(segment.backend), self._kv
        )

    @property
    def native_seconds(self) -> float:
        """Time that all backends spent in calls that leave Python."""
        return sum(b.native_seconds for b in self._backends.values())

    def close(self) -> None:
        """Give the compiled graphs back."""
        for cache in (self._small, self._large):
            while cache:
                cache.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class Compiled:
    """The runners of a plan for one shape of pass."""

    stages: tuple[tuple[tuple[Record, Runner], ...], ...]

    def close(self) -> None:
        """Give their memory back."""
        for stage in self.stages:
            for _, runner in stage:
                runner.close()


def _join(parts: Sequence[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _count(wanted: Ints, a: int, b: int) -> int:
    return int(np.count_nonzero((wanted >= a) & (wanted < b)))
