"""Runs plans: cuts a step into passes, finds or compiles the segments for each, runs them stage by stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import (
    Backend,
    Done,
    Floats,
    Greatest,
    Ints,
    Pass,
    PassShape,
    Rows,
    Runner,
    Segment,
    SequencePart,
)
from hetrun.errors import BudgetError
from hetrun.executor.compiled_plan import Compiled, Ran, Stage, Timed
from hetrun.executor.stats import Key, Recent, Stats
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph, Value
from hetrun.graph.ops import Stateful
from hetrun.graph.signature import Forms, of_wanted_rows
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE, Mark
from hetrun.planner.costmodel import Forecast, Measured, Work
from hetrun.planner.partial_plans import PartialPlans
from hetrun.planner.plan import BUCKETS, Plan, PlanSet, after, up_to

SMALL = 16  # tokens; graphs up to this size are cheap to keep
SMOOTHING, MOST_BETWEEN_S = 0.1, 0.002
KEPT, KEPT_FEW = (64, 4), (16, 1)  # compiled shapes, of small passes and large ones; where memory is scarce


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence, and for which of them somebody wants the result."""

    seq: int
    tokens: Ints
    wanted: Ints  # ascending
    marks: tuple[Mark, ...] = ()  # positions of the sequence at which its states are kept
    hidden: int = 0  # of its last so many tokens, and of the wanted ones, hidden states are kept
    given: tuple[Floats, ...] = ()  # what the graph is given beside tokens, each with a row for each
    embedded: Floats | None = None  # rows in place of what its tokens are looked up as
    places: Ints | None = None  # of each its positions in time, height and width; None: as in a text

    @property
    def shown(self) -> Ints:
        """The tokens of which anything is wanted, ascending."""
        n, wanted, kept = len(self.tokens), self.wanted, min(self.hidden, len(self.tokens))
        if kept <= len(wanted) and (not kept or wanted[-kept] == n - kept):
            return wanted
        return np.union1d(wanted, np.arange(n - kept, n))


Number = TypeVar("Number", bound=np.generic)
Between = Callable[[], None]
Piece = tuple[Chunk, int, int]  # tokens a to b of a chunk
# Of which plan's stages, with how many threads, for which passes, and how many such passes stand still while
# it runs.
Shape = tuple[int, int, PassShape, int]
Slots = tuple[Ints, ...]  # KV rows of some tokens, in each group of layers


@dataclass(slots=True)
class Trip:
    """A pass, and what is wanted of its wanted rows."""

    work: Pass
    kept: Ints  # those whose hidden states are kept
    scored: Ints | None = None  # those whose logits are wanted; None: of all
    hidden: Floats | None = None  # what was kept
    embedded: bool = False  # rows have come in place of what tokens are looked up as

    def keep(self, hidden: Floats) -> None:
        """The hidden states of all wanted rows have come, in memory that the next pass overwrites."""
        if len(self.kept):
            self.hidden = hidden[self.kept]


@dataclass(frozen=True, slots=True)
class Step:
    """What the model does next: tokens of several sequences, each as long as it likes."""

    chunks: tuple[Chunk, ...]
    drafted: int = 0  # of their tokens, so many are guesses
    hidden: bool = False  # wanted are hidden states behind the last norm, and no logits are computed

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def wanted(self) -> int:
        """Wanted results in all."""
        return sum(len(c.wanted) for c in self.chunks)


class Executor:
    """Runs steps of one graph by one plan set."""

    def __init__(
        self,
        graph: Graph,
        plans: PlanSet,
        backends: Mapping[str, Backend],
        store: WeightStore,
        kv: KvCache,
        stats: Stats,
        deterministic: bool = False,
        forecast: Forecast | None = None,
    ) -> None:
        """Times of segments go into the stats, and into the forecast where there is one."""
        self.kept = KEPT
        self.plans = plans
        self.recent = {bucket: Recent() for bucket in BUCKETS}  # what passes were like of late
        # Who is told of each pass, and decides whether anything is learnt from it.
        self.hear: Callable[[Ran], None] = Ran.learn
        # Who may ask a pass for more than its results, before it runs.
        self.ask: Callable[[Pass], object] = lambda work: None
        self._inside = 0.0  # seconds of all segments
        self.between_s = 0.0  # that a pass takes besides its segments; smoothed
        self._forecast = forecast
        self._forms = Forms()
        self._graph = graph
        self._to_hidden = PartialPlans(partial(up_to, value=graph.hidden))
        self._from_hidden = PartialPlans(partial(after, value=graph.hidden, what="head"))
        self._from_embedded = PartialPlans(lambda stages: after(stages, graph.embedded, "rows"))
        # The hidden states that chunks of the last step had kept, one chunk's after the other's.
        self.hidden = np.empty((0, graph.hidden.width), np.float32)
        self._backends = backends
        self._store = store
        self._kv = kv
        self._stats = stats
        # There is one numeric path, whatever else is in the step, if no row can tell who is beside it.
        self.most_alike = plans.most_alike(backends) if deterministic else 1
        self._most_tokens = min(self.most_alike, plans.ubatch) if deterministic else plans.ubatch
        self._most_wanted = self._most_tokens if deterministic else max(SMALL, plans.ubatch // 4)
        self._small: OrderedDict[Shape, Compiled] = OrderedDict()
        self._large: OrderedDict[Shape, Compiled] = OrderedDict()
        self._plan: Plan | None = None  # whose threads are set
        # The one that runs now, for whoever wonders why nothing comes; may be read at any time.
        self.segment = ""
        self.failed = ""  # the backend whose segment failed in the last step
        self._away = 0.0  # seconds spent in other steps while a pass stood still
        self._busy: list[Shape] = []  # what passes have begun to run by: all but the last stand still

    def adopt(self, plans: PlanSet, beside: Collection[Plan] = ()) -> None:
        """Run by other plans from the next step on; what was compiled for those that stay is kept, and for
        those `beside` them, which may run soon."""
        staying = [*plans.plans.values(), *beside]
        alive = {id(p.stages) for p in staying}
        for parts in (self._from_embedded, self._to_hidden, self._from_hidden):
            alive |= parts.keep(staying)
        for cache in (self._small, self._large):
            for key in [key for key in cache if key[0] not in alive and key not in self._busy]:
                cache.pop(key).close()
        self.plans = plans
        self._plan = None

    def forget_threads(self) -> None:
        """Somebody else has set the backends' threads: they are set again before the next pass."""
        self._plan = None

    def rest(self) -> None:
        """Nothing has come for a while: graphs of long passes go, which take most, and the next prompt hardly
        ever has as many tokens as one of the last; and those for numbers of threads that no plan has now."""
        threads = {plan.threads for plan in self.plans.plans.values()}
        for cache, keep in ((self._small, threads), (self._large, frozenset[int]())):
            for key in [key for key in cache if key[1] not in keep and key not in self._busy]:
                cache.pop(key).close()

    def choose(self, step: Step, k: int, between: Between | None = None) -> Rows:
        """The k greatest logits of each wanted token, where what makes them can choose; else all of them."""
        return self._run(step, between, k)

    def run(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens, or their hidden states; the array is good until the next step."""
        rows = self._run(step, between, 0)
        assert not isinstance(rows, Greatest)  # nobody asked for that
        return rows

    def _run(self, step: Step, between: Between | None, k: int) -> Rows:
        """What `run` gives or, for k greatest, `choose`.

        `between` may run steps of other sequences now and then in the middle of a pass.
        If anything goes wrong, every sequence is as long as it was before. Only one that got more tokens than
        a cache with windows takes at once may have lost what it saw then: it is empty, and begins anew.
        """
        self.failed = ""
        before = {c.seq: self._kv.length(c.seq) for c in step.chunks}
        if len(before) < len(step.chunks):
            raise ValueError("a step has one chunk for each of its sequences")
        try:
            most = self._kv.most_at_once
            # A chunk that is longer gets its rows pass by pass.
            slots = {c.seq: self._kv.extend(c.seq, n) for c in step.chunks if (n := len(c.tokens)) <= most}
            for c in step.chunks:
                if c.seq in slots:
                    self._kv.mark(c.seq, c.marks)
            passes = self._cut(step)
            if len(passes) == 1:
                start, inside = perf_counter(), self._inside + self._away
                trip = self._prepare(passes[0], before, slots)
                trip.work.enough = (self._graph.logits.name, k) if k else None
                rows = self._run_pass(trip, step.hidden, between)
                self._keep([trip])
                besides = perf_counter() - start - (self._inside + self._away - inside)
                if besides < MOST_BETWEEN_S:  # more is a graph that was compiled
                    self.between_s += SMOOTHING * (besides - self.between_s)
                return rows
            # A pass may leave its result in memory that the next one overwrites.
            out, at = np.empty((step.wanted, self._result(step.hidden).width), np.float32), 0
            trips = []
            for pieces in passes:
                trips.append(trip := self._prepare(pieces, before, slots))
                rows = self._run_pass(trip, step.hidden, between)
                assert not isinstance(rows, Greatest)  # nobody asked for that
                out[at : at + len(rows)] = rows
                at += len(rows)
            self._keep(trips)
            return out
        except BaseException:
            for seq, length in before.items():
                self._kv.truncate(seq, length if self._kv.keepable(seq, length) else 0)
            raise

    def _cut(self, step: Step) -> list[list[Piece]]:
        """What goes into each pass, within the limits on tokens and wanted rows."""
        chunks = [c for c in step.chunks if len(c.tokens)]
        # A hidden state is no wider than what passes work in; logits are.
        most_wanted = self._most_tokens if step.hidden else self._most_wanted
        alike = len({c.embedded is None for c in chunks}) == 1
        if alike and step.tokens <= self._most_tokens and step.wanted <= most_wanted:
            return [[(c, 0, len(c.tokens)) for c in chunks]]
        passes: list[list[Piece]] = [[]]
        tokens = wanted = 0
        for chunk in chunks:
            a, n = 0, len(chunk.tokens)
            if passes[-1] and (passes[-1][0][0].embedded is None) != (chunk.embedded is None):
                passes.append([])
                tokens = wanted = 0
            while a < n:
                b = self._fit(chunk, a, self._most_tokens - tokens, most_wanted - wanted)
                if b == a:
                    passes.append([])
                    tokens = wanted = 0
                    continue
                passes[-1].append((chunk, a, b))
                tokens += b - a
                wanted += _count(chunk.wanted, a, b)
                a = b
        return [pieces for pieces in passes if pieces]

    def _fit(self, chunk: Chunk, a: int, tokens: int, wanted: int) -> int:
        """How far a chunk's tokens from `a` on go into what is left of a pass."""
        b = min(len(chunk.tokens), a + tokens)
        inside = chunk.wanted[(chunk.wanted >= a) & (chunk.wanted < b)]
        return int(inside[wanted]) if len(inside) > wanted else b

    def _prepare(
        self, pieces: Sequence[Piece], before: Mapping[int, int], slots: Mapping[int, Slots]
    ) -> Trip:
        parts, tokens, rows, wanted = [], [], [], []
        # One number for each piece: numpy adds them up for all pieces at once.
        sizes, behind, counts, offsets = [], [], [], []
        at = wanted_at = 0
        for chunk, a, b in pieces:
            n, start = b - a, before[chunk.seq] + a
            ids, mine, own = chunk.tokens, chunk.shown, slots.get(chunk.seq)
            if own is None:
                own = self._kv.extend(chunk.seq, n)
            elif n < len(ids):
                own = tuple([r[a:b] for r in own])
            if n < len(ids):
                ids, mine = ids[a:b], mine[(mine >= a) & (mine < b)]
            count = len(mine)
            views = self._kv.views(chunk.seq, start, start + n)
            states = self._kv.state_view(chunk.seq, start, start + n)
            parts.append(SequencePart(at, at + n, wanted_at, wanted_at + count, views, states))
            tokens.append(ids)
            rows.append(own)
            wanted.append(mine)
            sizes.append(n)
            behind.append(start - at)
            counts.append(count)
            offsets.append(at - a)
            at, wanted_at = at + n, wanted_at + count
        positions = np.arange(at) + np.repeat(behind, sizes)
        joined = rows[0] if len(rows) == 1 else tuple(map(np.concatenate, zip(*rows, strict=True)))
        rows_wanted = _join(wanted) + np.repeat(offsets, counts)
        work = Pass(_join(tokens), positions, joined, rows_wanted, tuple(parts))
        for i, value in enumerate(self._graph.given):
            work.values[value.name] = _join([chunk.given[i][a:b] for chunk, a, b in pieces])
        if pieces[0][0].embedded is not None:
            rows_of = [chunk.embedded[a:b] for chunk, a, b in pieces if chunk.embedded is not None]
            work.values[self._graph.embedded.name] = _join(rows_of)
        if any([chunk.places is not None for chunk, _, _ in pieces]):
            work.places = _places(work, pieces)
        return _trip(work, pieces)

    def _run_pass(self, trip: Trip, hidden: bool, between: Between | None = None) -> Rows:
        work, last = trip.work, trip.work
        plan, n = self.plans.plan(len(work.tokens)), len(work.tokens)
        self.recent[plan.bucket].add(work.depth)
        ran = Ran(plan.bucket, plan.threads, n, work.depth, len(work.parts) > 1, 0.0, True, [])
        if between:
            work.between = partial(self._step_aside, between, plan)
        self.ask(work)
        self._overwrite(work)
        start, away = perf_counter(), self._away
        first = self._from_embedded.of(plan) if trip.embedded else plan
        in_parts = hidden or trip.scored is not None
        self._go_through(self._to_hidden.of(first) if in_parts else first, work, ran)
        if len(trip.kept):
            trip.keep(work.values[self._graph.hidden.name])
        if not hidden and trip.scored is not None:
            last = self._head_of(work, trip.scored)
            if len(trip.scored):
                self._go_through(self._from_hidden.of(plan), last, ran)
        ran.seconds = perf_counter() - start - (self._away - away)
        self.recent[plan.bucket].seconds += ran.seconds
        if not hidden:  # what it takes without the output matrix is no measure of the plan
            self.hear(ran)
        result = self._result(hidden)
        if last.greatest is not None:
            return last.greatest
        return last.values[result.name] if len(last.wanted) else np.empty((0, result.width), np.float32)

    def _go_through(self, plan: Plan, work: Pass, ran: Ran) -> None:
        """All stages of a plan."""
        key, compiled = self._compiled(plan, work.shape)
        self._busy.append(key)
        try:
            for stage in compiled.stages:
                if work.between:
                    work.between()
                self._run_stage(stage, work, ran)
        finally:
            self._busy.pop()

    def _head_of(self, work: Pass, scored: Ints) -> Pass:
        """What is left of a pass when all hidden states are there: the logits of some."""
        n, name = len(scored), self._graph.hidden.name
        rows = np.arange(n)
        part = SequencePart(0, n, 0, n, ())
        values = {name: np.ascontiguousarray(work.values[name][scored])}
        return Pass(rows, rows, (), rows, (part,), values, work.enough, between=work.between)

    def _keep(self, trips: Sequence[Trip]) -> None:
        if kept := [trip.hidden for trip in trips if trip.hidden is not None]:
            self.hidden = _join(kept)

    def _result(self, hidden: bool) -> Value:
        """What is wanted of a step."""
        return self._graph.hidden if hidden else self._graph.logits

    def _step_aside(self, between: Between, plan: Plan) -> None:
        """Let others run in the middle of a pass; the time is theirs, the threads are set as they were."""
        start, inside, away, segment = perf_counter(), self._inside, self._away, self.segment
        try:
            between()
        finally:
            self.segment = segment
            self._set_threads(plan)
            self._inside = inside
            self._away = away + perf_counter() - start  # a step inside that one is a part of it

    def _settle(self, work: Pass) -> None:
        """Have the states at home that a pass reads."""
        states = self._kv.states
        if states is None or not states.any_lent:
            return
        for part in work.parts:
            if part.states and part.states.read != NONE:
                states.settle(part.states.read, int(work.positions[part.a]))

    def _overwrite(self, work: Pass) -> None:
        """What a pass writes takes the place of what devices may have of these slots."""
        states = self._kv.states
        if states is None or not states.any_lent:
            return
        for part in work.parts:
            if part.states:
                for slot in part.states.write[part.states.write != NONE].tolist():
                    if slot != part.states.read:
                        states.overwrite(slot)

    def _run_stage(self, stage: Stage, work: Pass, ran: Ran) -> None:
        """Give every device its segment and wait for all, also when one fails: the others use our memory."""
        begun: list[tuple[Timed, float, Done]] = []
        failed: BaseException | None = None
        away = self._away
        if any(timed.reads_states for timed in stage):
            self._settle(work)
        for timed in stage:
            self.segment = timed.name
            self._stats.segments += 1
            try:
                begun.append((timed, perf_counter(), timed.runner.submit(work)))
            except BaseException as e:
                failed, self.failed = e, timed.backend
                break
        for timed, start, done in begun:
            asked = perf_counter()
            self.segment = timed.name
            try:
                done.wait()
                end = perf_counter()
                took = end - start - (self._away - away)
                timed.add(work, ran, took)
                self._inside += took
                self._stats.wait_seconds += end - asked
            except BaseException as e:
                failed, self.failed = failed or e, timed.backend
        self.segment = ""
        if failed:
            raise failed

    def _compiled(self, plan: Plan, shape: PassShape) -> tuple[Shape, Compiled]:
        cache, most = (self._small, self.kept[0]) if shape.tokens <= SMALL else (self._large, self.kept[1])
        self._set_threads(plan)  # before compiling: a backend may lay work out by it
        # A runner keeps its values in memory of its own, so none runs while it stands still.
        mine = (id(plan.stages), plan.threads, shape)
        key = (*mine, [b[:3] for b in self._busy].count(mine))
        found = cache.get(key)
        if found is None:
            while len(cache) >= most and (key_of_old := self._oldest(cache)):
                cache.pop(key_of_old).close()
            found = cache[key] = self._fitting(plan, shape)
        else:
            cache.move_to_end(key)
        return key, found

    def _oldest(self, cache: Mapping[Shape, Compiled]) -> Shape | None:
        """What was not run for longest, and does not stand still in the middle of a run."""
        return next((key for key in cache if key not in self._busy), None)

    def _set_threads(self, plan: Plan) -> None:
        if plan is not self._plan:
            for backend in self._backends.values():
                backend.set_threads(plan.threads)
            self._plan = plan

    def _fitting(self, plan: Plan, shape: PassShape) -> Compiled:
        """Compiled; where a device has no memory left for it, what was not run for longest goes."""
        while True:
            try:
                return self._compile(plan, shape)
            except BudgetError:
                cache = next((c for c in (self._large, self._small) if self._oldest(c)), None)
                if cache is None or (old := self._oldest(cache)) is None:
                    raise
                cache.pop(old).close()

    def _compile(self, plan: Plan, shape: PassShape) -> Compiled:
        compiled = Compiled(plan.stages, [])
        try:
            for segments in plan.stages:
                compiled.stages.append(stage := [])
                # Whoever works by itself begins first; the others keep this thread until they are done.
                for s in sorted(segments, key=lambda s: not self._backends[s.backend].asynchronous):
                    record = self._stats.record(Key(s.name, s.backend, plan.bucket, plan.threads))
                    measured = self._measured(s, plan.threads, shape)
                    runner, wanted = self._runner(s, shape), of_wanted_rows(s.ops)
                    name = f"{s.name} on {s.backend}"
                    reads = self._reads_states(s)
                    stage.append(Timed(name, s.backend, record, measured, runner, wanted, reads))
        except BaseException:
            compiled.close()
            raise
        return compiled

    def _reads_states(self, segment: Segment) -> bool:
        """Whether states that it reads must be on the host."""
        keeps = self._backends[segment.backend].keeps_states
        return not keeps and any(isinstance(op.attrs, Stateful) for op in segment.ops)

    def _measured(self, segment: Segment, threads: int, shape: PassShape) -> Measured | None:
        """Where times of a segment are learned from; none where more than each sequence's last row is wanted:
        that is seldom, and takes so much longer that other passes would seem to take long."""
        if self._forecast is None or shape.wanted > len(shape.parts):
            return None
        form = self._forms.of(segment.ops)
        return self._forecast.measured(Work(form, segment.backend, threads, len(shape.parts) > 1))

    def _runner(self, segment: Segment, shape: PassShape) -> Runner:
        backend = self._backends[segment.backend]
        try:
            return backend.compile(segment, shape, self._store.buffers(segment.backend), self._kv)
        except BaseException:
            self.failed = segment.backend
            raise

    @property
    def native_seconds(self) -> float:
        """Time that all backends spent in calls that leave Python."""
        return sum(b.native_seconds for b in self._backends.values())

    def close(self) -> None:
        """Give the compiled graphs back."""
        for cache in (self._small, self._large):
            while cache:
                cache.popitem()[1].close()


def _trip(work: Pass, pieces: Sequence[Piece]) -> Trip:
    """A pass of some pieces, and what they want of its rows."""
    embedded = pieces[0][0].embedded is not None
    if not any([chunk.hidden for chunk, _, _ in pieces]):
        return Trip(work, np.zeros(0, np.int64), embedded=embedded)
    kept, scored = [], []
    for part, (chunk, a, _) in zip(work.parts, pieces, strict=True):
        rows = np.arange(part.wanted_a, part.wanted_b)
        tokens = work.wanted[part.wanted_a : part.wanted_b] - part.a + a
        kept.append(rows if chunk.hidden else rows[:0])
        scored.append(rows[np.isin(tokens, chunk.wanted)])
    logits = _join(scored)
    return Trip(work, _join(kept), logits if len(logits) < len(work.wanted) else None, embedded=embedded)


def _places(work: Pass, pieces: Sequence[Piece]) -> Ints:
    """Of each token its positions in time, height and width: those of a text are one."""
    found = np.repeat(work.positions[:, None], 3, 1)
    for part, (chunk, a, b) in zip(work.parts, pieces, strict=True):
        if chunk.places is not None:
            found[part.a : part.b] = chunk.places[a:b]
    return found


def _join(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _count(wanted: Ints, a: int, b: int) -> int:
    return int(np.count_nonzero((wanted >= a) & (wanted < b)))
