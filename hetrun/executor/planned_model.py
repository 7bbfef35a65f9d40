"""A model that runs: a source becomes a graph, a plan, weights in memory and something that takes steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeVar

from hetrun.backend import Backend, Descriptor, Floats, Rows, registry
from hetrun.client.events import DeviceSlots, Streaming
from hetrun.client.queries import LayerPlace
from hetrun.errors import BudgetError, Cancelled, UserError
from hetrun.executor.autotune.answer_pace import Gaps, Pace, pace_of
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.autotune.core_choice import recall_seats
from hetrun.executor.autotune.setup import Setup, planned, planner_for
from hetrun.executor.executor import Executor
from hetrun.executor.interface import Model, ModelLimits
from hetrun.executor.library.model import WholeModel
from hetrun.executor.library.plan import backend_for, prepare as prepare_whole
from hetrun.executor.loading.backend_selection import vet
from hetrun.executor.loading.context_length import USUAL_CONTEXT
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES, SOON, kv_of_all
from hetrun.executor.loading.prompt_device import PromptDevice
from hetrun.executor.loading.resident_budget import InMemory
from hetrun.executor.long_prompts import FEWEST, LongPrompts
from hetrun.executor.mtp import Predictor
from hetrun.executor.pass_observer import PassObserver
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Between, Step
from hetrun.executor.weight_store import WeightStore
from hetrun.graph import Op, kept_by, kv_shapes, states_of
from hetrun.graph.signature import coarse
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown as bill
from hetrun.memory.kv.cache import KvCache, sequence_bytes
from hetrun.memory.kv.prefix_cache import CACHED
from hetrun.memory.ledger import Books, MemoryGrant, granted
from hetrun.planner.costmodel import WorkTimes, path_of_machine
from hetrun.planner.expert_stats import known_choices
from hetrun.planner.layer_map import places_of
from hetrun.planner.online import OnlinePlanner
from hetrun.planner.options import Options, this_machine
from hetrun.planner.plan import PlanSet
from hetrun.planner.rates import SHORT, TokenRates
from hetrun.prefetch.cached_experts import FromExperts
from hetrun.prefetch.expert_trace import HitShares
from hetrun.prefetch.mapped_weights import FromMaps
from hetrun.prefetch.streamed_weights import FromDisk
from hetrun.system.allocator import give_back
from hetrun.system.progress import MeasuringProgress, Progress, stretch

log = logging.getLogger(__name__)

LEAST_MEASURED = 8 << 20  # bytes of weights: measuring a smaller model takes longer than it could win
CACHED_SHARE = 1 / 16  # of a budget that does not hold all weights, for prompts that may come again
LOADING = 0.6  # of the progress of opening a model; the rest is measuring


T = TypeVar("T")


class PlannedModel:
    """Graph, plan and executor."""

    max_sequences = MAX_SEQUENCES

    def __init__(
        self,
        source: ModelSource,
        options: Options,
        progress: Progress | None = None,
        look: Callable[[ModelLimits], None] = lambda limits: None,
    ) -> None:
        """`look` may still say no when all is decided and no weight is read."""
        self.stats = Stats()
        self._source, self._options = source, options
        with ExitStack() as undo:
            prepared = prepare(source, options, SOON)
            self._process = {
                name: n for name, n in prepared.plans.memory.items() if name in bill.OF_THE_PROCESS
            }
            self.graph, self.context = prepared.graph, prepared.context
            self._backends = prepared.backends
            undo.callback(self._close_backends)
            self.n_vocab, self.width = self.graph.logits.width, self.graph.hidden.width
            look(ModelLimits(self.context, self.n_vocab))
            self._kv = KvCache(
                kv_shapes(self.graph),
                prepared.quant,
                self.context,
                # Two more, so that two ways to work can be compared while all of them run.
                MAX_SEQUENCES + 2 + CACHED,
                prepared.plans.ubatch,
                prepared.kv_bytes,
                states_of(self.graph.ops),
            )
            self.books = Books(prepared.granted)
            self.books.opened()
            self._lent = 0, 0  # to what encodes pictures: bytes that it holds, and may come to
            self._accepted = 0  # guesses that were right, when the last pass began
            self._follow(prepared)
            self.max_sequences = max(1, min(MAX_SEQUENCES, self._kv.max_sequences - 1))
            self._store = store = WeightStore(self._backends)
            setup = _setup(prepared, options)
            undo.enter_context(self._begin_reading(prepared))
            self._vet(prepared.plans)
            end = 0.1 if self._disk else LOADING if setup else 1
            self._load(prepared, stretch(progress, 0, end))
            self.predictor = self._predictor(prepared, undo)
            forecast = WorkTimes.load(setup.memory) if setup and setup.memory else WorkTimes()
            same = options.wishes.deterministic
            self._executor = Executor(
                self.graph, prepared.plans, self._backends, store, self._kv, self.stats, same, forecast
            )
            self.autotuner: Autotuner | None = None
            self.pace: Pace | None = None
            self._gaps = Gaps()
            if setup:
                self._measure(setup, forecast, stretch(progress, LOADING, 1, MeasuringProgress))
            self._open_disk(progress)
            self.alloc, self.fork, self.truncate = self._kv.alloc, self._kv.fork, self._kv.rewind
            self.free, self.length = self._kv.free, self._kv.length
            self.fits, self.shareable, self.thin = self._kv.fits, self._kv.shareable, self._kv.thin
            self.checkpoint_every = self._kv.checkpoint_every
            undo.pop_all()

    def _follow(self, prepared: LoadPlan) -> None:
        """What was decided about where weights are."""
        self._streamed, self._within = prepared.streamed, _within(prepared)
        self._device = prepared.prompts
        # Weights come from disk in the order of a pass: one in the middle of it would take its pieces.
        self.stands_aside = not prepared.streamed and not prepared.mapped and not prepared.experts

    def _begin_reading(self, prepared: LoadPlan) -> ExitStack:
        """What passes read weights through, where not all are in memory; what closes it."""
        undo = ExitStack()
        self._disk: FromDisk | None = None
        self._experts: FromExperts | None = None
        self._maps = FromMaps(prepared.mapped) if prepared.mapped else None
        self.long_prompts: LongPrompts | None = None
        if streamed := prepared.streamed:
            self._disk = FromDisk(streamed, self._backends[streamed.backend], self._kv, self.books)
            undo.callback(self._disk.close)
            if prepared.prompts:
                self.long_prompts = self._with_device(prepared.prompts, prepared.plans, self._disk)
                undo.callback(self.long_prompts.close)
        if part := prepared.experts:
            self._experts = FromExperts(part, self._backends[part.backend], self._kv, self.books)
            undo.callback(self._experts.close)
        self._budget = self._disk or self._experts or self._in_memory(prepared)
        return undo

    def _with_device(self, device: PromptDevice, plans: PlanSet, disk: FromDisk) -> LongPrompts:
        """What decides where prompts run, and what the device reads them through."""
        found = LongPrompts(device, plans, self.graph, disk.seconds, lambda: disk.rate)
        self._backends[device.backend].stream_from_files(found.read)
        return found

    def _open_disk(self, progress: Progress | None) -> None:
        """Have the weights that stay in memory read, where others come from disk for every pass."""
        if self._disk or self._experts:
            self._executor.stream(self.long_prompts.look_up if self.long_prompts else None)
        if self._disk:
            self._disk.open(stretch(progress, 0.1, 1))
        if self._experts:
            self._experts.open()

    def _vet(self, plans: PlanSet) -> None:
        """Try what would have weights from the beginning; others are tried when they start."""
        for name in plans.backends:
            vet(name, self._backends[name], self.graph)

    def _load(self, prepared: LoadPlan, progress: Progress | None) -> None:
        """The weights that are there as a whole: booked before they are read."""
        self._wanted = prepared.wanted
        load = partial(self._store.load, prepared.wanted, progress)
        self.books.take(bill.WEIGHTS, "anonymous", prepared.weights, load)
        self._store.settle()

    def _predictor(self, prepared: LoadPlan, undo: ExitStack) -> Predictor | None:
        """What guesses for it: its weights are booked before they are read, its rows before they come."""
        if (planned := prepared.block) is None:
            return None
        self.books.found(bill.MTP, "shared", planned.rows)
        backend, threads = self._backends[planned.backend], lambda: self.plans.plan(1).threads
        make = partial(Predictor, planned, backend, self.context, threads, self.forget_threads)
        found = self.books.take(bill.MTP, "anonymous", planned.weights, make)
        undo.callback(found.close)
        return found

    def _measure(self, setup: Setup, forecast: WorkTimes, progress: Progress | None) -> None:
        """What is not known yet, and plan by it."""
        self.autotuner = Autotuner(
            self.graph, self._backends, self._store, self._kv, self._executor, forecast, setup
        )
        self.autotuner.begin(progress)
        self.pace = Pace(forecast, self.graph, self._pass_of_one)
        self.rest()  # what was measured in goes, with keys and values of long texts

    @property
    def _threads_of_one(self) -> int:
        """With which a pass of one token is planned."""
        return (self.autotuner.planned if self.autotuner else self.plans).plan(1).threads

    def _pass_of_one(self, depth: float) -> float | None:
        """Seconds of a pass of one token, as the planner predicts it for the plan of now: trials of others
        are part of what an answer takes."""
        autotuner = self.autotuner
        return autotuner.planner.pass_seconds(autotuner.planned.plan(1), 1, depth) if autotuner else None

    def _in_memory(self, prepared: LoadPlan) -> InMemory:
        mapped, store = prepared.mapped, self._store
        return InMemory(
            books=self.books,
            kv=self._kv,
            weights=lambda: mapped.left if mapped else store.resident_bytes,
            copies=(lambda: {}) if mapped else (lambda: store.copied_bytes),
            kv_of_all=partial(kv_of_all, prepared.kv_one),
            mapped=mapped,
        )

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        return self._executor.plans

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer's weights lie and what computes with them; from any thread."""
        return places_of(self.plans, self._disk.kept.streamed if self._disk else (), self._crosses)

    def _crosses(self, op: Op, backend: str) -> int:
        """Bytes of an op's weights that come over a link for every pass."""
        device = self._backends.get(backend)  # one that has failed is gone
        uses = device.wants([op]) if device else ()
        return sum(use.weight.nbytes for use in uses if device and device.streams(use))

    @property
    def crossed(self) -> Mapping[str, int]:
        """Bytes of weights that came over each device's link so far, for passes; from any thread."""
        return {name: b.crossed for name, b in self._backends.copy().items() if b.crossed}

    @property
    def _reading(self) -> FromDisk | FromExperts | FromMaps | None:
        """What passes read weights through, if they do."""
        return self._disk or self._experts or self._maps

    def step(self, step: Step, between: Between | None = None) -> Floats:
        """The logits of the wanted tokens, or their hidden states; good until the next step."""
        if (reading := self._reading) is None:
            return self._watched(lambda: self._executor.run(step, between), step)
        if self._experts:
            self._experts.expect(min(step.tokens, self.plans.ubatch))
        if self.long_prompts and self._on_device(self.long_prompts, step.tokens):
            return self._prompt_on_device(self.long_prompts, step)
        start = perf_counter()
        rows = self._run(lambda: self._executor.run(step), step)
        if (reading := self._reading) is None:
            return rows
        end, certain = perf_counter(), step.tokens - step.drafted
        accepted, self._accepted = self.stats.accepted - self._accepted, self.stats.accepted
        # What became of the guesses shows only behind a pass: here those of the last one count.
        answering, gap = certain == len(step.chunks), self._gaps.began(start) or 0.0
        reading.ran(end - start, step.tokens, certain + accepted, answering, gap)
        self._gaps.ended(end, answering)
        return rows

    def _on_device(self, prompts: LongPrompts, tokens: int) -> bool:
        """Have the faster of two ways for this many tokens in force; whether it is the device's."""
        if (plans := prompts.chosen(tokens, self.plans)) is not self.plans:
            other = prompts.by_host if plans is prompts.with_device else prompts.with_device
            self._executor.adopt(plans, other.plans.values())
        return tokens >= FEWEST and plans is prompts.with_device

    def _prompt_on_device(self, prompts: LongPrompts, step: Step) -> Floats:
        """A step of a prompt there; by the host where the device has no room for it after all."""
        start, compiling = perf_counter(), self.stats.compiling_seconds
        try:
            rows = self._run(lambda: self._executor.run(step), step)
        except BudgetError as e:
            log.warning("%s has no room for long prompts any more: %s", prompts.device.device, e)
            prompts.give_up()
            return self.step(step)
        if self.long_prompts is prompts:  # not rescued from a device that failed
            took = perf_counter() - start - (self.stats.compiling_seconds - compiling)
            prompts.observe(step.tokens, took)
            prompts.check()
        self._gaps.ended(perf_counter(), False)
        return rows

    def choose(self, step: Step, k: int, between: Between | None = None) -> Rows:
        """The k greatest logits of each wanted token, where a device can choose; else all of them."""
        if self._reading:
            return self.step(step)
        return self._watched(lambda: self._executor.choose(step, k, between), step)

    def _watched(self, run: Callable[[], T], step: Step) -> T:
        """Run it, and see how long after the token before it the next one of an answer comes."""
        start = perf_counter()
        found = self._run(run, step)
        end, alone = perf_counter(), step.tokens == 1
        if self.pace:
            gap = self._gaps.began(start) if alone else None
            if gap is None:
                self.pace.broken()
            else:
                depth = self._kv.length(step.chunks[0].seq)
                self.pace.observe(gap + end - start, depth, self._threads_of_one)
            self._gaps.ended(end, alone)
        return found

    def _run(self, run: Callable[[], T], step: Step) -> T:
        """Without a backend that fails, where the others can do it."""
        before = [self._kv.length(c.seq) for c in step.chunks]
        while True:
            try:
                return run()
            except Exception as e:  # a plugin's backend may raise anything
                # With windows a sequence may have lost what it saw; then the step is another one.
                is_whole = before == [self._kv.length(c.seq) for c in step.chunks]
                if not (is_whole and self._goes_on_without(self._executor.failed, e)):
                    raise

    def _goes_on_without(self, name: str, error: Exception) -> bool:
        """A backend failed in the middle of a step: whether the others can take the same step."""
        if self.autotuner and self.autotuner.goes_on_without(name, error):
            return True
        device = self._backends.get(name)
        # A file that cannot be read is no fault of the device, nor is memory that others need.
        if device is None or isinstance(error, Cancelled | UserError):
            return False
        if not (device.device_bytes(self._wanted.get(name, ())) or self._runs_prompts(name)):
            return False
        return self._reopen_without(name, error)

    def _runs_prompts(self, name: str) -> bool:
        return self._device is not None and name == self._device.backend

    def _reopen_without(self, name: str, error: Exception) -> bool:
        """A device had its part of weights for which RAM has no room. What it had comes from disk from now
        on: all is decided and read again, as without the device. Keys and values stay as they are."""
        lost, ways = {name}, {self._device.backend} if self._device else set[str]()
        if self._device and name in (self._device.backend, self._device.device):
            lost = {self._device.backend, self._device.device}
        others = tuple(n for n in self._backends if n not in lost | ways)
        # A block that guesses has its weights there, too.
        if self._executor.stands_still or self.predictor or not others:
            return False
        at_once = self.plans.host_ubatch or self.plans.ubatch
        wishes = replace(self._options.wishes, ubatch=at_once, plan=None)
        options = replace(self._options, backends=others, ctx=self.context, ram=self.books.granted.nbytes)
        options = replace(options, wishes=wishes, besides=self._process, mtp="off")
        try:
            prepared = prepare(self._source, options, SOON)
        except UserError as e:
            log.debug("nothing goes on without %s: %s", name, e)
            return False
        log.warning("the backend %s is left out, and weights are read again without it: %s", name, error)
        why = f"{name} failed: what it had of the weights comes from disk"
        prepared = replace(prepared, plans=replace(prepared.plans, reason=why))
        self._give_weights_back()
        self._backends.update(prepared.backends)
        self._store.forget()
        self._follow(prepared)
        self._vet(prepared.plans)
        with self._begin_reading(prepared) as undo:
            self._load(prepared, None)
            undo.pop_all()
        self._executor.adopt(prepared.plans)
        self._kv.limit_bytes = prepared.kv_bytes
        self._open_disk(None)
        return True

    def _give_weights_back(self) -> None:
        """All of them, with the backends that had them."""
        if self.autotuner:
            self.autotuner.close()
            self.autotuner = self.pace = None
            self._executor.observe(PassObserver())
        self._executor.forget_devices()
        self._close_reading()
        self._close_backends()
        self._backends.clear()
        if self.long_prompts:
            self.long_prompts.close()
        self.books.forget_weights()

    def _close_reading(self) -> None:
        """What passes read weights through."""
        if self._disk:
            self._disk.close()
        if self._experts:
            self._experts.close()

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """This many tokens of prompts wait: what is worth preparing for them is prepared now."""
        if self.autotuner:
            self.autotuner.expect(tokens, between)
        if self.long_prompts:
            self._on_device(self.long_prompts, tokens)

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan."""
        if self.autotuner:
            self.autotuner.tend(idle, between)
        self._budget.tend()

    def set_ram(self, nbytes: int) -> None:
        """Take at most this many bytes from now on."""
        limit = granted(nbytes)
        self._budget.set_limit(limit)
        plans = self._within(limit) if self._within else replace(self.plans, memory=self.bill())
        if self.long_prompts:
            plans = self.long_prompts.follow(plans, self.plans)
        self._executor.adopt(plans)

    def lend(self, held: int, most: int) -> None:
        """Leave a part of the budget to what encodes pictures: it holds so much, and may come to so much."""
        before = self._lent
        self.books.grows(bill.PICTURES, "anonymous", held, most)
        try:
            # What comes from disk takes room that is there again by itself.
            if most > before[1] or not (self._disk or self._experts):
                self._budget.set_limit(self.books.granted)
        except BudgetError:
            self.books.grows(bill.PICTURES, "anonymous", *before)
            self._budget.look()
            raise
        self._lent = held, most
        self._executor.adopt(replace(self.plans, memory=self.bill()))

    def bill(self) -> Mapping[str, int]:
        """What takes how much now."""
        self._budget.look()
        return self.books.bill()

    @property
    def promised(self) -> PlanSet:
        """The plans in force, with the speeds that follow from what was measured so far."""
        if self.autotuner is None:
            return self.plans
        pace = pace_of(self.autotuner.forecast, self.graph, self._threads_of_one)
        return replace(self.plans, rates=_rates(self.autotuner.planner, self.autotuner.planned, pace))

    @property
    def reason(self) -> str:
        """Why passes run as they do: the last change, also one that was taken back; from any thread."""
        changes = self.autotuner.changes if self.autotuner else ()
        told = (change.reason for change in reversed(changes) if change.became != "proposed")
        return next(told, self.plans.reason)

    @property
    def in_use(self) -> Mapping[str, int]:
        """What took how much recently, without promises; from any thread."""
        return self.books.seen

    def streaming(self) -> Streaming | None:
        """What passes are like that read weights from disk."""
        reading = self._reading
        return reading.report() if reading else None

    def experts_kept(self) -> HitShares | None:
        """How well experts were kept that do not all fit, beside other rules; None: they do, or too little
        was chosen yet."""
        if self._experts:
            return self._experts.kept()
        return next((kept for each in self._executor.experts if (kept := each.kept())), None)

    def device_slots(self) -> DeviceSlots | None:
        """How well experts do that have slots on a device; None: there are none."""
        return next((found for each in self._executor.experts if (found := each.report)), None)

    def rest(self) -> None:
        """Nothing has come for a while: memory that is not needed goes to the system, and the books tell."""
        self._executor.rest()
        self._kv.trim()
        if self.predictor:
            self.predictor.rest()
        give_back()
        self._budget.look()

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step, by tokens of each sequence and how many come before them; None: unknown."""
        if disk := self._disk or self._experts:
            tokens = sum(n for n, _ in chunks)
            if self.long_prompts and tokens >= FEWEST and self.plans is self.long_prompts.with_device:
                return self.long_prompts.on_device(tokens)
            return disk.predict(tokens)
        return self.autotuner.predict(chunks) if self.autotuner else None

    @property
    def alike(self) -> int:
        """The most tokens of a step whose rows have the bits that they have one by one."""
        return self.plans.alike(self._backends)

    @property
    def most_cached(self) -> int | None:
        """Tokens of prompts that are worth keeping for later, beside the last one; None: all there is room
        for. While weights come from disk each byte of them is one that every pass reads."""
        if (reading := self._disk or self._experts) is None:
            return None
        each = self._kv.token_bytes
        return int(CACHED_SHARE * reading.granted.nbytes) // each if each else None

    @property
    def native_seconds(self) -> float:
        """Time spent in calls that leave Python."""
        return self._executor.native_seconds

    @property
    def segment(self) -> str:
        """What runs now, in words; from any thread."""
        return self._executor.segment

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states can be had of more rows than logits: a pass then runs in two parts, which one
        that takes weights from disk in their order cannot."""
        return self._streamed is None

    @property
    def hidden(self) -> Floats:
        """The hidden states that chunks of the last step had kept; good until the next step."""
        return self._executor.hidden

    @property
    def kv_bytes(self) -> int:
        """Memory of keys and values in use."""
        return self._kv.used_bytes

    @property
    def kv(self) -> KvCache:
        """Keys and values of all sequences."""
        return self._kv

    @property
    def backends(self) -> Mapping[str, Backend]:
        """What it may run on, by name."""
        return self._backends

    def forget_threads(self) -> None:
        """The backends' threads were set elsewhere: they are set again before the next pass."""
        self._executor.forget_threads()

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        for backend in list(self._backends.values()):
            backend.cancel()

    def rearm(self) -> None:
        """Let the next step run."""
        for backend in self._backends.values():
            backend.rearm()

    def close(self) -> None:
        """Give everything back, and keep what was learnt."""
        if self.autotuner:
            self.autotuner.close()
        if self.predictor:
            self.predictor.close()
            self.predictor = None  # it knows this model, and both would wait for the garbage collector
        self._executor.close()
        self._close_reading()
        self._close_backends()
        if self.long_prompts:
            self.long_prompts.close()
        self._kv.close()

    def _close_backends(self) -> None:
        for name, backend in self._backends.items():
            try:
                backend.close()
            except Exception as e:  # a plugin may fail in any way, and the others are closed
                log.warning("the backend %s could not be closed: %s", name, e)


def _within(prepared: LoadPlan) -> Callable[[MemoryGrant], PlanSet] | None:
    """The plan in another budget, where it changes what is read."""
    part = prepared.streamed or prepared.experts
    return part.within if part else None


def _setup(prepared: LoadPlan, options: Options) -> Setup | None:
    """What an autotuner needs; None where nothing is to be decided while the model runs."""
    wishes = options.wishes
    if not options.measures or wishes.plan or wishes.deterministic:
        return None
    if prepared.streamed or prepared.mapped or prepared.experts:
        return None
    if sum(w.nbytes for w in prepared.graph.weights().values()) < LEAST_MEASURED:
        return None
    known, plan = registry.backends(), prepared.plans.plan(1)
    home = {coarse(op.scope): s.backend for s in plan.segments for op in s.ops}
    allowed = options.backends or ()
    chosen = [n for n in prepared.backends if n in home.values() or _may_be_chosen(n, known.get(n), allowed)]
    machine = this_machine()
    details = {n: str(known[n].probe()) for n in chosen if n in known} | {"precision": options.precision}
    return Setup(
        home,
        tuple(chosen),
        (wishes.threads,) if wishes.threads else machine.counts,
        prepared.room,
        prepared.context,
        _is_eager(options, [prepared.backends[n] for n in chosen]),
        path_of_machine(machine.cores, details),
        options.precision,
        () if wishes.threads else machine.wide,
        prepared.own,
        partial(_rows_of, prepared, options.ctx or min(prepared.context, USUAL_CONTEXT)),
        prepared.plans.host_ubatch,
    )


def _rows_of(prepared: LoadPlan, tokens: int, ops: Sequence[Op]) -> int:
    """Keys and values of a text, as far as some ops keep them."""
    return sequence_bytes(kept_by(ops), prepared.quant, prepared.plans.ubatch, tokens, states_of(ops))


def _is_eager(options: Options, backends: Sequence[Backend]) -> bool:
    """Copies in the memory of a device take none of the host's, and its speed is worth the start."""
    return any(b.asynchronous for b in backends) if options.eager is None else options.eager


def _may_be_chosen(name: str, known: Descriptor | None, allowed: Collection[str]) -> bool:
    """Whether a planner may choose a backend; another way to work of one that it may is not known itself."""
    return known is None or not known.is_last_resort or name in allowed


def open_planned(
    source: ModelSource,
    options: Options,
    progress: Progress | None = None,
    look: Callable[[ModelLimits], None] = lambda limits: None,
) -> Model:
    """A model that takes steps, its weights read; `look` may refuse it before they are."""
    if backend := backend_for(source, options.backends):
        return WholeModel(source, backend, options, progress, look)
    return PlannedModel(source, options, progress, look)


def foreseen(source: ModelSource, options: Options, known: WorkTimes | None = None) -> PlanSet:
    """The plan for a model and what it promises, without reading its weights; by times that are known, or
    else those that were kept."""
    if whole := backend_for(source, options.backends):
        return prepare_whole(source, whole, options).plans
    prepared = prepare(source, options)
    try:
        setup = _setup(prepared, options)
        if setup is None or setup.memory is None:
            return prepared.plans
        forecast = known or WorkTimes.load(setup.memory)
        if known is None:
            recall_seats(forecast, setup)  # what runs has taken its seats
        planner = planner_for(prepared.graph, prepared.backends, forecast, setup)
        planner.listen(known_choices(prepared.graph).likely)
        plans = planned(planner, prepared.plans, setup)
        return replace(
            plans, rates=_rates(planner, plans, pace_of(forecast, prepared.graph, plans.plan(1).threads))
        )
    finally:
        for backend in prepared.backends.values():
            backend.close()


def _rates(planner: OnlinePlanner, plans: PlanSet, pace: float) -> TokenRates:
    """What tokens of an answer take, with what comes between them, and passes of a long prompt."""
    one, many, most = plans.plan(1), plans.plan(plans.ubatch), min(plans.ubatch, plans.context)
    short = planner.pass_seconds(one, 1, min(SHORT, plans.context))
    full = planner.pass_seconds(one, 1, plans.context)
    prompt = planner.pass_seconds(many, most, most / 2)
    if short is None:
        return TokenRates()
    prompts, answers = most / prompt if prompt else None, 1 / (pace * short)
    return TokenRates(prompts, answers, 1 / (pace * full) if full else None, "measured")
