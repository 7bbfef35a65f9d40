"""The probe: what this machine takes for the parts of a model, measured before anybody waits for an answer.

It runs units of the real graph, on their real weights, as segments of their own, and shorter passes of the
whole model. What it finds goes into the forecast, which remembers it for the next start and for other models
with layers of the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import (
    FLOAT_BYTES,
    Backend,
    Floats,
    Ints,
    Pass,
    Runner,
    Segment,
    SequencePart,
    WeightUse,
)
from hetrun.errors import BudgetError
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Graph, Op, Value
from hetrun.graph.ops import Attention
from hetrun.graph.signature import Unit, form_of
from hetrun.memory.kv.cache import KvCache
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.plan import segment_of
from hetrun.planner.segment_cost import CALL
from hetrun.planner.trials import LINK, Trial
from hetrun.system.progress import Progress

log = logging.getLogger(__name__)

RUNS, LEAST_S, LONG_S = 3, 0.02, 0.25  # runs of one cell: how many, how long, or one that is long by itself
HASTY_DOUBT = 0.5  # how far off, relative, what is measured beside other programs may be
MOST_RUNS = 12
LONG_SLICES = 3  # a run that takes longer is a measurement by itself
LARGEST_PART = 0.15  # of the time left, for one run
NOISE = 0.5  # of the values that go in: any will do that stay finite
MOST_BESIDE, LEAST_RUN_S = 64, 1e-7  # runs of the host while a device has one, and what none is below
LINK_TOKENS = 512  # whose values are sent to measure it

Slices = Generator[list[list[float]], None, None]  # of trials, the seconds of a run in each slice so far


class Prober:
    """Runs trials on the engine's thread, between steps."""

    def __init__(
        self,
        graph: Graph,
        backends: Mapping[str, Backend],
        store: WeightStore,
        kv: KvCache,
        forecast: WorkTimes,
        context: int,
    ) -> None:
        self._graph = graph
        self._backends = backends
        self._store = store
        self._kv = kv
        self._forecast = forecast
        self._context = context
        self._random = np.random.default_rng(0)
        self._brought: dict[str, dict[WeightUse, None]] = {}  # for trials
        self._seen: dict[int, NDArray[np.uint8]] = {}  # by width: KV rows of what lies behind a trial
        readers: dict[Value, set[int]] = {}
        for i, op in enumerate(graph.ops):
            for value in op.inputs:
                readers.setdefault(value, set()).add(i)
        self._readers = readers
        self._number = {id(op): i for i, op in enumerate(graph.ops)}

    def run(self, trials: Iterable[Trial], until: float, tell: Progress = lambda part: None) -> int:
        """Measure one after the other until a moment is reached; how many were measured."""
        trials = list(trials)
        done = 0
        for trial in trials:
            left = until - perf_counter()
            if left < 0:
                break
            if not self._too_long(trial, left):
                try:
                    self.measure(trial)
                except BudgetError as e:
                    log.debug("%s is not tried on %s: %s", trial.name, trial.backend, e)
                done += 1
            tell(done / len(trials))
        return done

    def _too_long(self, trial: Trial, left: float) -> bool:
        """Whether smaller passes say that this one would take much of the time that is left."""
        expected = self._forecast.seconds(trial.work, trial.tokens * trial.sequences, trial.seen + 1)
        return expected is not None and expected > LARGEST_PART * left

    def measure(self, trial: Trial, hear: Callable[[float], None] | None = None, once: bool = False) -> None:
        """Run a trial, once or some times; the best goes to the forecast, or to who would rather hear it."""
        for backend in self._backends.values():
            backend.set_threads(trial.threads)
        segments = [self._segment(trial, ops) for ops in trial.ops]
        wanted = {use: None for s in segments for use in self._backends[trial.backend].wants(s.ops)}
        self._bring(trial.backend, wanted)
        with self._sequences(trial, segments) as work:
            runners: list[Runner] = []
            try:
                for s in segments:
                    buffers = self._store.buffers(trial.backend)
                    runners.append(self._backends[trial.backend].compile(s, work.shape, buffers, self._kv))
                n = trial.tokens * trial.sequences
                learn = partial(self._forecast.learn, trial.work, n, work.depth)
                self._time(segments, runners, work, hear or learn, once)
            finally:
                for runner in runners:
                    runner.close()

    def _bring(self, name: str, wanted: Collection[WeightUse]) -> None:
        """Read what a trial needs; where a device has no room for it beside what others needed, these go."""
        missing = dict.fromkeys(use for use in wanted if not self._store.holds(name, [use]))
        self._brought.setdefault(name, {}).update(missing)
        try:
            self._store.load({name: wanted})
        except BudgetError:
            self.give_back(name)
            self._brought[name] = missing
            self._store.load({name: wanted})

    def give_back(self, name: str) -> None:
        """Weights that nothing but trials needed. To be called before others come to need them."""
        self._store.drop(name, self._brought.pop(name, {}))

    def in_turn(
        self, units: Sequence[Unit], ways: Sequence[Sequence[str]], threads: int, tokens: int
    ) -> list[float]:
        """Units one behind the other, again and again: the least time of each way to place them."""
        for backend in self._backends.values():
            backend.set_threads(threads)
        found: list[float] = []
        trial = Trial("turns", "", tuple(u.ops for u in units), "", threads, tokens)
        placed = {
            (unit.scope, name): replace(self._segment(trial, unit.ops), name=unit.scope, backend=name)
            for way in ways
            for unit, name in zip(units, way, strict=True)
        }
        for (_, name), s in placed.items():
            self._bring(name, dict.fromkeys(self._backends[name].wants(s.ops)))
        with self._sequences(trial, list(placed.values())) as work:
            for value in dict.fromkeys(v for s in placed.values() for v in s.reads):
                work.values[value.name] = self._noise(work.rows(value), value.width)
            runners: dict[tuple[str, str], Runner] = {}
            try:
                for key, s in placed.items():
                    buffers = self._store.buffers(s.backend)
                    runners[key] = self._backends[s.backend].compile(s, work.shape, buffers, self._kv)
                for way in ways:
                    chain = [runners[unit.scope, name] for unit, name in zip(units, way, strict=True)]
                    found.append(min(self._chain(chain, work) for _ in range(RUNS + 1)))
            finally:
                for runner in runners.values():
                    runner.close()
        return found

    def _chain(self, runners: Sequence[Runner], work: Pass) -> float:
        return sum(self._once(runner, work) for runner in runners)

    def compare(self, trials: Sequence[Trial], rounds: int, slice_s: float) -> Slices:
        """Run trials in turn, each for a slice of time, again and again: the mean seconds of a run in each
        slice, by trial. Whatever else this machine does happens to all of them. Between slices, where a step
        can run, it gives what there is so far."""
        with ExitStack() as open_for_it:
            ready = [open_for_it.enter_context(self._ready(t)) for t in trials]
            found: list[list[float]] = [[] for _ in trials]
            for at in range(rounds + 1):
                for trial, (runner, work), mine in zip(trials, ready, found, strict=True):
                    for backend in self._backends.values():
                        backend.set_threads(trial.threads)
                    runs, start = 0, perf_counter()
                    while not runs or (at and perf_counter() < start + slice_s):
                        self._backends[trial.backend].evict_streamed()
                        runner.submit(work).wait()
                        runs += 1
                    took = perf_counter() - start
                    if at or took > LONG_SLICES * slice_s:  # the first round touches memory
                        mine.append(took / runs)
                    yield found
                if at and all(len(mine) > at and mine[-1] > LONG_SLICES * slice_s for mine in found):
                    return  # long runs differ little from each other, and cost much

    @contextmanager
    def _ready(self, trial: Trial) -> Iterator[tuple[Runner, Pass]]:
        """A trial's first ops, compiled for a pass that is there for them only."""
        backend = self._backends[trial.backend]
        backend.set_threads(trial.threads)
        segment = self._segment(trial, trial.ops[0])
        self._bring(trial.backend, dict.fromkeys(backend.wants(segment.ops)))
        with self._sequences(trial, [segment]) as work:
            for value in segment.reads:
                work.values[value.name] = self._noise(work.rows(value), value.width)
            runner = backend.compile(segment, work.shape, self._store.buffers(trial.backend), self._kv)
            try:
                yield runner, work
            finally:
                runner.close()

    def _time(
        self,
        segments: Sequence[Segment],
        runners: Sequence[Runner],
        work: Pass,
        hear: Callable[[float], None],
        once: bool,
    ) -> None:
        for value in dict.fromkeys(v for s in segments for v in s.reads):
            work.values[value.name] = self._noise(work.rows(value), value.width)
        backend = self._backends[segments[0].backend]
        by_itself = backend.asynchronous
        first = self._once(runners[0], work)  # memory is touched, pools of threads begin
        end, times = perf_counter(), list[float]()
        while len(times) < MOST_RUNS and (len(times) < RUNS or sum(times) < LEAST_S):
            if times and (once or first > LONG_S):
                break
            backend.evict_streamed()
            seconds = self._once(runners[(len(times) + 1) % len(runners)], work)
            # A backend that works by itself may have begun to load weights when the run before was over.
            now = perf_counter()
            times.append(now - end if by_itself else seconds)
            end = now
        # Other programs may slow a run down; only an early start makes one seem faster.
        hear(sorted(times)[len(times) // 2] if by_itself else min(times))

    def _once(self, runner: Runner, work: Pass) -> float:
        start = perf_counter()
        runner.submit(work).wait()
        return perf_counter() - start

    def beside(self, here: Trial, there: Trial) -> float:
        """How many times as long work of the host takes while weights cross for a device, and these as well:
        both read the host's memory. 1: neither knows of the other; 2: one after the other would be as fast.

        The host's work is repeated until it takes as long as what crosses."""
        device = self._backends[there.backend]
        with self._ready(there) as (far, far_work), self._ready(here) as (near, near_work):

            def both(runs: int, crosses: bool = True) -> float:
                device.evict_streamed()
                start = perf_counter()
                done = far.submit(far_work) if crosses else None
                for _ in range(runs):
                    near.submit(near_work).wait()
                if done:
                    done.wait()
                return perf_counter() - start

            both(1)  # memory is touched
            crossing = min(both(0) for _ in range(RUNS))
            one = min(both(1, crosses=False) for _ in range(RUNS))
            runs = min(MOST_BESIDE, max(1, round(crossing / max(one, LEAST_RUN_S))))
            together = min(both(runs) for _ in range(RUNS))
        shorter, longer = sorted((crossing, runs * one))
        return min(max(1 + (together - longer) / max(shorter, LEAST_RUN_S), 1.0), 2.0)

    def _noise(self, rows: int, width: int) -> Floats:
        return self._random.normal(0, NOISE, (rows, width)).astype(np.float32)

    def _segment(self, trial: Trial, ops: tuple[Op, ...]) -> Segment:
        """These ops alone: they read what they do not make, and give what others read."""
        mine = {self._number[id(op)] for op in ops}
        leaving = {v for v, readers in self._readers.items() if readers - mine}
        return segment_of(trial.name, trial.backend, ops, leaving.union(self._graph.outputs), "a probe")

    @contextmanager
    def _sequences(self, trial: Trial, segments: Sequence[Segment]) -> Iterator[Pass]:
        """A pass of sequences that are there for the trial only, with keys and values behind them."""
        seqs: list[int] = []
        try:
            parts, slots, rows = [], [], np.arange(trial.tokens)
            layers = {op.attrs.layer for s in segments for op in s.ops if isinstance(op.attrs, Attention)}
            for i in range(trial.sequences):
                seqs.append(self._kv.alloc())
                self._fill(seqs[-1], trial.seen, layers)
                slots.append(self._kv.extend(seqs[-1], trial.tokens))
                views = self._kv.views(seqs[-1], trial.seen, trial.seen + trial.tokens)
                at = i * trial.tokens
                states = self._kv.state_view(seqs[-1], trial.seen, trial.seen + trial.tokens)
                parts.append(SequencePart(at, at + trial.tokens, i, i + 1, views, states))
            n = trial.tokens * trial.sequences
            joined: tuple[Ints, ...] = tuple(np.concatenate(group) for group in zip(*slots, strict=True))
            wanted = np.arange(1, trial.sequences + 1) * trial.tokens - 1
            positions = np.tile(rows + trial.seen, trial.sequences)
            tokens = self._random.integers(0, self._graph.logits.width, n)
            yield Pass(tokens, positions, joined, wanted, tuple(parts))
        finally:
            for seq in seqs:
                self._kv.free(seq)

    def _fill(self, seq: int, n: int, layers: Iterable[int]) -> None:
        """Give a sequence tokens, and numbers as keys and values: untouched memory reads faster than any.

        The same numbers again and again: drawing them would take far longer than the trial, and a request may
        be waiting for the next token.
        """
        for at in range(0, n, step := min(self._kv.most_at_once, 512)):
            rows = self._kv.extend(seq, min(step, n - at))
            for layer in layers:
                for table in self._kv.kept[layer]:
                    mine, width = rows[self._kv.group(layer)], table.n_heads * table.head_dim
                    if width not in self._seen:
                        self._seen[width] = table.quant.quantise(self._noise(step, width))
                    table.raw[mine] = self._seen[width][: len(mine)]

    def call(self, backend: str, threads: int) -> None:
        """Measure what a segment costs besides its work, on the smallest there is; and the link, if any."""
        op = next((op for op in self._graph.ops if op.kind == "add"), None)
        if op is None or not self._backends[backend].supports(op):
            return
        trial = Trial("call", form_of((op,)), ((op,),), backend, threads, 1)
        self.measure(trial)
        seconds = self._forecast.seconds(trial.work, 1, 1.0)
        if seconds is not None:
            self._forecast.learn_fact(CALL, backend, seconds)
            if self._backends[backend].asynchronous:
                self._measure_link(replace(trial, tokens=min(LINK_TOKENS, self._context)), op, seconds)

    def _measure_link(self, trial: Trial, op: Op, call: float) -> None:
        """The same op on values of many tokens, which cross with it and take next to no computing."""
        found: list[float] = []
        self.measure(trial, found.append)
        crossed = FLOAT_BYTES * trial.tokens * sum(v.width for v in (*op.inputs, op.out))
        self._forecast.learn_fact(LINK, trial.backend, crossed / max(found[0] - call, 1e-9))


def price_of_a_turn(
    prober: Prober,
    units: Sequence[Unit],
    able: Sequence[Collection[str]],
    home: str,
    other: str,
    threads: int,
    tokens: int,
) -> float | None:
    """Seconds that one change of backend costs; None where no two neighbours run on both."""
    both = [
        home in some and other in some and units[i].scope.startswith("blk.") for i, some in enumerate(able)
    ]
    at = next((i for i in range(len(units) // 2, len(units) - 1) if both[i] and both[i + 1]), None)
    if at is None:
        return None
    ways = ((home, home), (other, other), (home, other), (other, home))
    here, there, out, back = prober.in_turn(units[at : at + 2], ways, threads, tokens)
    return max(0.0, out + back - here - there) / 4  # each of the mixed ones changes and comes back
