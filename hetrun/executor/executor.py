"""Runs plans: cuts a step into passes, finds or compiles the segments for each, runs them stage by stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter

import numpy as np

from hetrun.backend import (
    Backend,
    Done,
    Floats,
    Ints,
    Pass,
    PassShape,
    Rows,
    Runner,
    Segment,
    SequencePart,
    TopLogits,
)
from hetrun.errors import BackendError, BudgetError, OptionError
from hetrun.executor.compiled_plan import CompiledPass, PassTiming, Stage, TimedRunner
from hetrun.executor.device_experts import DeviceExperts
from hetrun.executor.pass_observer import PassObserver
from hetrun.executor.stats import RecentPasses, Stats, TimeKey
from hetrun.executor.steps import Between, Step, Trip, cut, join, prepare
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph, Value
from hetrun.graph.ops import Attention, Stateful
from hetrun.graph.signature import Forms, of_wanted_rows
from hetrun.loader.table_rows import TableRows
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.states import NONE
from hetrun.planner.costmodel import OpWork, WorkCells, WorkTimes
from hetrun.planner.partial_plans import PartialPlans
from hetrun.planner.plan import BUCKETS, Plan, PlanSet, after, between, up_to
from hetrun.system.ema import smoothed

SMALL = 16  # tokens; graphs up to this size are cheap to keep
SMOOTHING, MOST_BETWEEN_S = 0.1, 0.002
KEPT, KEPT_FEW = (64, 4), (16, 1)  # compiled shapes, of small passes and large ones; where memory is scarce


# Of which plan's stages, with how many threads, for which passes, and how many such passes stand still while
# it runs.
Shape = tuple[int, int, PassShape, int]


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
        forecast: WorkTimes | None = None,
        follows: bool = True,
    ) -> None:
        """Times of segments go into the stats, and into the forecast where there is one. `follows`: it looks
        after what lies in the slots of devices, which only one may do."""
        self._most_kept = KEPT
        self.plans = plans
        self.recent = {bucket: RecentPasses() for bucket in BUCKETS}  # what passes were like recently
        self._observer = PassObserver()
        self._embed: Callable[[Ints], Floats] | None = None
        self._inside = 0.0  # seconds of all segments
        self.between_s = 0.0  # that a pass takes besides its segments; smoothed
        self._forecast = forecast
        self._forms = Forms()
        self._graph = graph
        self._tables = [(table, TableRows(table.weight)) for table in graph.tables]
        self._to_hidden = PartialPlans(partial(up_to, value=graph.hidden))
        self._from_hidden = PartialPlans(partial(after, value=graph.hidden, what="head"))
        self._from_embedded = PartialPlans(lambda stages: after(stages, graph.embedded, "rows"))
        # Of these the parts between which rows of pictures are added to what the first layers make, for so
        # many of them.
        self._between_layers: dict[int, list[PartialPlans]] = {}
        # The hidden states that chunks of the last step had kept, one chunk's after the other's.
        self.hidden = np.empty((0, graph.hidden.width), np.float32)
        self._backends = backends
        self._store = store
        self._kv = kv
        self._stats = stats
        # There is one numeric path, whatever else is in the step, if no row can tell who is beside it.
        self.most_alike = plans.most_alike(backends) if deterministic else 1
        self._most_tokens = min(self.most_alike, plans.ubatch) if deterministic else plans.ubatch
        at_once = plans.host_ubatch or plans.ubatch
        self._most_wanted = self._most_tokens if deterministic else max(SMALL, at_once // 4)
        # What follows the text in slots of devices.
        slots = [backend.expert_slots() for backend in backends.values()] if follows else []
        self.experts = [DeviceExperts(each) for each in slots if each is not None]
        self._small: OrderedDict[Shape, CompiledPass] = OrderedDict()
        self._large: OrderedDict[Shape, CompiledPass] = OrderedDict()
        self._plan: Plan | None = None  # whose threads are set
        # The one that runs now, for those who wonder why nothing comes; may be read at any time.
        self.segment = ""
        self.failed = ""  # the backend whose segment failed in the last step
        self._away = 0.0  # seconds spent in other steps while a pass stood still
        self._busy: list[Shape] = []  # what passes have begun to run by: all but the last stand still

    def observe(self, observer: PassObserver) -> None:
        """Have all passes from the next one on seen by this observer."""
        self._observer = observer

    def stream(self, embed: Callable[[Ints], Floats] | None) -> None:
        """Weights come from disk now: few compiled shapes are kept. Passes that devices run get their tokens'
        rows from `embed`, where the host's backend has them only in passes of its own."""
        self._most_kept, self._embed = KEPT_FEW, embed

    def adopt(self, plans: PlanSet, beside: Collection[Plan] = ()) -> None:
        """Run by other plans from the next step on; what was compiled for those that stay is kept, and for
        those `beside` them, which may run soon."""
        staying = [*plans.plans.values(), *beside]
        alive = {id(p.stages) for p in staying}
        from_embedded = [part for plan in staying for part in self._from_embedded.known(plan)]
        deeper = [part for parts in self._between_layers.values() for part in parts]
        in_parts = [found for part in deeper for plan in from_embedded for found in part.known(plan)]
        for parts in (self._from_embedded, self._to_hidden, self._from_hidden):
            alive |= parts.keep([*staying, *from_embedded, *in_parts])
        for parts in deeper:
            alive |= parts.keep(from_embedded)
        for cache in (self._small, self._large):
            for key in [key for key in cache if key[0] not in alive and key not in self._busy]:
                cache.pop(key).close()
        self.plans = plans
        self._plan = None

    def forget_threads(self) -> None:
        """The backends' threads were set elsewhere: they are set again before the next pass."""
        self._plan = None

    def rest(self) -> None:
        """Nothing has come for a while: graphs of long passes go, which take most, and the next prompt hardly
        ever has as many tokens as one of the last; and those for numbers of threads that no plan has now."""
        with suppress(BackendError):  # of a device that has failed: the next step says so
            self._kv.settle()
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
        assert not isinstance(rows, TopLogits)  # that was not asked for
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
            plan, most_tokens = self._plan_of(step.tokens)
            passes = cut(step, most_tokens, self._most_wanted)
            if len(passes) == 1:
                start, inside = perf_counter(), self._inside + self._away
                trip = prepare(passes[0], before, slots, self._kv, self._graph)
                trip.work.enough = (self._graph.logits.name, k) if k else None
                rows = self._run_pass(trip, step.hidden, between)
                self._keep([trip])
                besides = perf_counter() - start - (self._inside + self._away - inside)
                if besides < MOST_BETWEEN_S:  # more is a graph that was compiled
                    self.between_s = smoothed(self.between_s, besides, SMOOTHING)
                return rows
            # A pass may leave its result in memory that the next one overwrites.
            out, at = np.empty((step.wanted, self._result(step.hidden).width), np.float32), 0
            trips = []
            for pieces in passes:
                trips.append(trip := prepare(pieces, before, slots, self._kv, self._graph))
                mine = plan if len(trip.work.tokens) == most_tokens else None
                rows = self._run_pass(trip, step.hidden, between, mine)
                assert not isinstance(rows, TopLogits)  # that was not asked for
                out[at : at + len(rows)] = rows
                at += len(rows)
            self._keep(trips)
            return out
        except BaseException:
            for seq, length in before.items():
                self._kv.truncate(seq, length if self._kv.keepable(seq, length) else 0)
            raise

    def _plan_of(self, tokens: int) -> tuple[Plan | None, int]:
        """The plan for as many of these as a pass may have, where the host makes more passes of them than a
        device would; and the most tokens of a pass."""
        plan = self.plans.plan(min(tokens, self._most_tokens))
        most = self.plans.most_of(plan)
        return (plan, most) if most < min(tokens, self._most_tokens) else (None, self._most_tokens)

    def _run_pass(
        self, trip: Trip, hidden: bool, between: Between | None = None, plan: Plan | None = None
    ) -> Rows:
        """`plan`: what it runs by, if not by the one for as many tokens."""
        self._look_up(trip.work)
        work = trip.work
        n = len(work.tokens)
        plan = plan or self.plans.plan(n)
        self.recent[plan.bucket].add(work.depth)
        ran = PassTiming(plan.bucket, plan.threads, n, work.depth, len(work.parts) > 1, 0.0, True, [])
        if between:
            work.between = partial(self._step_aside, between, plan)
        if self._embed and plan.on_devices and not trip.embedded:
            work.values[self._graph.embedded.name] = self._embed(work.tokens)
            trip.embedded = True
        self._observer.prepare(work)
        with ExitStack() as ends:
            for each in self.experts:
                each.begin(work)
                ends.callback(each.end)
            return self._run_planned(trip, plan, ran, hidden)

    def _run_planned(self, trip: Trip, plan: Plan, ran: PassTiming, hidden: bool) -> Rows:
        work, last = trip.work, trip.work
        self._overwrite(work)
        start, away = perf_counter(), self._away
        first = self._from_embedded.of(plan) if trip.embedded else plan
        if trip.deeper:
            first = self._add_deeper(first, trip, ran)
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
        # What it takes without the output matrix is no measure of the plan, nor what pictures take.
        if not hidden and not trip.deeper and not work.whole:
            self._observer.observe(ran)
        result = self._result(hidden)
        if last.greatest is not None:
            return last.greatest
        return last.values[result.name] if len(last.wanted) else np.empty((0, result.width), np.float32)

    def _add_deeper(self, plan: Plan, trip: Trip, ran: PassTiming) -> Plan:
        """The first layers, each with its block of a picture's rows added to what it makes; what is left."""
        work, n = trip.work, len(trip.deeper)
        values = self._graph.after_layers(n)
        if n not in self._between_layers:
            self._between_layers[n] = [
                PartialPlans(partial(between, values=values, number=i)) for i in range(n + 1)
            ]
        *parts, rest = [part.of(plan) for part in self._between_layers[n]]
        for part, value, rows in zip(parts, values, trip.deeper, strict=True):
            self._go_through(part, work, ran)
            work.values[value.name] = work.values[value.name] + rows
        return rest

    def _go_through(self, plan: Plan, work: Pass, ran: PassTiming) -> None:
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
            self.hidden = join(kept)

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

    def _settle(self, work: Pass, layers: frozenset[int]) -> None:
        """Have the states of some layers at home that a pass reads."""
        states = self._kv.states
        if states is None or not states.any_lent:
            return
        for part in work.parts:
            if part.states and part.states.read != NONE:
                states.settle(part.states.read, int(work.positions[part.a]), layers)

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

    def _run_stage(self, stage: Stage, work: Pass, ran: PassTiming) -> None:
        """Give every device its segment and wait for all, also when one fails: the others use our memory."""
        begun: list[tuple[TimedRunner, float, Done]] = []
        failed: BaseException | None = None
        away = self._away
        for timed in stage:
            if timed.reads_states:
                self._settle(work, timed.reads_states)
            if timed.reads_rows and self._kv.arrivals.touch(timed.reads_rows):
                self._kv.settle()
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
            try:
                raise failed
            finally:
                # An error knows this frame, and with it the model: its memory would wait for the collector.
                del failed, begun

    def _compiled(self, plan: Plan, shape: PassShape) -> tuple[Shape, CompiledPass]:
        is_small = shape.tokens <= SMALL
        cache, most = (self._small, self._most_kept[0]) if is_small else (self._large, self._most_kept[1])
        self._set_threads(plan)  # before compiling: a backend may lay work out by it
        # A runner keeps its values in memory of its own, so none runs while it stands still.
        mine = (id(plan.stages), plan.threads, shape)
        key = (*mine, [b[:3] for b in self._busy].count(mine))
        found = cache.get(key)
        if found is None:
            self._make_room_for(shape)
            while len(cache) >= most and (key_of_old := self._oldest(cache)):
                cache.pop(key_of_old).close()
            start = perf_counter()
            found = cache[key] = self._fitting(plan, shape)
            self._stats.compiling_seconds += perf_counter() - start
        else:
            cache.move_to_end(key)
        return key, found

    def _make_room_for(self, shape: PassShape) -> None:
        """Of passes that only devices take one is kept: their values are large, and page-locked."""
        at_once = self.plans.host_ubatch
        if at_once and shape.tokens > at_once:
            for key in [key for key in self._large if key[2].tokens > at_once and key not in self._busy]:
                self._large.pop(key).close()

    def _oldest(self, cache: Mapping[Shape, CompiledPass]) -> Shape | None:
        """What was not run for longest, and does not stand still in the middle of a run."""
        return next((key for key in cache if key not in self._busy), None)

    def _set_threads(self, plan: Plan) -> None:
        if plan is not self._plan:
            for backend in self._backends.values():
                backend.set_threads(plan.threads)
            self._plan = plan

    def _fitting(self, plan: Plan, shape: PassShape) -> CompiledPass:
        """Compiled; where a device has no memory left for it, what was not run for longest goes."""
        while True:
            try:
                return self._compile(plan, shape)
            except BudgetError:
                cache = next((c for c in (self._large, self._small) if self._oldest(c)), None)
                if cache is None or (old := self._oldest(cache)) is None:
                    raise
                cache.pop(old).close()

    def _compile(self, plan: Plan, shape: PassShape) -> CompiledPass:
        compiled = CompiledPass(plan.stages, [])
        try:
            for segments in plan.stages:
                compiled.stages.append(stage := [])
                # What works by itself begins first; the others keep this thread until they are done.
                for s in sorted(segments, key=lambda s: not self._backends[s.backend].asynchronous):
                    record = self._stats.record(TimeKey(s.name, s.backend, plan.bucket, plan.threads))
                    measured = self._measured(s, plan.threads, shape)
                    runner, wanted = self._runner(s, shape), of_wanted_rows(s.ops)
                    name = f"{s.name} on {s.backend}"
                    reads = self._reads_states(s), self._reads_rows(s)
                    stage.append(TimedRunner(name, s.backend, record, measured, runner, wanted, *reads))
        except BaseException:
            compiled.close()
            raise
        return compiled

    def _reads_states(self, segment: Segment) -> frozenset[int]:
        """Layers whose states must be on the host."""
        if self._backends[segment.backend].keeps_states:
            return frozenset()
        return frozenset(op.attrs.layer for op in segment.ops if isinstance(op.attrs, Stateful))

    def _reads_rows(self, segment: Segment) -> frozenset[int]:
        """Layers whose keys and values must be on the host."""
        if self._backends[segment.backend].keeps_states:
            return frozenset()
        return frozenset(op.attrs.layer for op in segment.ops if isinstance(op.attrs, Attention))

    def _measured(self, segment: Segment, threads: int, shape: PassShape) -> WorkCells | None:
        """Where times of a segment are learned from; none where more than each sequence's last row is wanted:
        that is seldom, and takes so much longer that other passes would seem to take long."""
        if self._forecast is None or shape.wanted > len(shape.parts) or shape.whole:
            return None
        form = self._forms.of(segment.ops)
        return self._forecast.measured(OpWork(form, segment.backend, threads, len(shape.parts) > 1))

    def _runner(self, segment: Segment, shape: PassShape) -> Runner:
        backend = self._backends[segment.backend]
        if (
            shape.whole
            and not backend.sees_whole
            and any(isinstance(o.attrs, Attention) for o in segment.ops)
        ):
            raise OptionError(
                f"the backend {segment.backend} cannot read the pictures of this model, whose parts see each "
                "other; use --backends llamacpp"
            )
        try:
            return backend.compile(segment, shape, self._store.buffers(segment.backend), self._kv)
        except BaseException:
            self.failed = segment.backend
            raise

    @property
    def native_seconds(self) -> float:
        """Time that all backends spent in calls that leave Python."""
        return sum(b.native_seconds for b in self._backends.values())

    def _look_up(self, work: Pass) -> None:
        """The rows of tables that stay in their files."""
        for table, rows_of in self._tables:
            rows = rows_of(work.tokens) * np.float32(table.factor)
            parts = np.split(rows, len(table.values), axis=1)
            for value, part in zip(table.values, parts, strict=True):
                work.values[value.name] = np.ascontiguousarray(part)

    @property
    def stands_still(self) -> bool:
        """Whether a pass stands still for the step that runs now: it goes on by what was compiled for it."""
        return bool(self._busy)

    def forget_devices(self) -> None:
        """Give back what lies in devices, compiled graphs and slots: their backends are closed next."""
        self._embed = None
        while self.experts:
            self.experts.pop().close()
        for cache in (self._small, self._large):
            while cache:
                cache.popitem()[1].close()

    def close(self) -> None:
        """Give everything back."""
        for _, rows_of in self._tables:
            rows_of.close()
        self.forget_devices()
