"""A model that runs: a source becomes a graph, a plan, weights in memory and something that takes steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from hetrun.backend import Floats
from hetrun.client.events import DeviceSlots, Streaming
from hetrun.client.queries import LayerPlace
from hetrun.executor.autotune.autotuner import Autotuner
from hetrun.executor.autotune.setup import Setup
from hetrun.executor.device_loss import DeviceLoss, close_all
from hetrun.executor.executor import Executor
from hetrun.executor.interface import Model, ModelLimits
from hetrun.executor.library.model import WholeModel
from hetrun.executor.library.plan import backend_for
from hetrun.executor.loading.load_plan import LoadPlan, prepare
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES, SOON
from hetrun.executor.long_prompts import LongPrompts
from hetrun.executor.model_budget import ModelBudget
from hetrun.executor.model_parts import ModelParts
from hetrun.executor.model_tuning import ModelTuning
from hetrun.executor.model_weights import ModelWeights
from hetrun.executor.mtp import Predictor
from hetrun.executor.stats import Stats
from hetrun.executor.step_runner import StepRunner
from hetrun.executor.steps import Between
from hetrun.executor.tuning_setup import setup_of
from hetrun.graph import Op, kv_shapes, states_of
from hetrun.loader.source import ModelSource
from hetrun.memory import breakdown
from hetrun.memory.kv.cache import KvCache
from hetrun.memory.kv.prefix_cache import CACHED
from hetrun.memory.ledger import Books, helper_bytes
from hetrun.planner.costmodel import WorkTimes
from hetrun.planner.layer_map import places_of
from hetrun.planner.options import Options
from hetrun.planner.plan import PlanSet
from hetrun.prefetch.expert_trace import HitShares
from hetrun.system.allocator import give_back
from hetrun.system.progress import MeasuringProgress, Progress, stretch

LOADING = 0.6  # of the progress of opening a model; the rest is measuring


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
        with ExitStack() as undo:
            prepared = prepare(source, options, SOON)
            self.graph, self.context = prepared.graph, prepared.context
            self.backends = prepared.backends
            undo.callback(close_all, self.backends)
            self.n_vocab, self.width = self.graph.logits.width, self.graph.hidden.width
            look(ModelLimits(self.context, self.n_vocab))
            self.kv = _kv_of(prepared)
            self.books = Books(prepared.granted, helpers=lambda: options.front + helper_bytes())
            self.books.opened()
            self.max_sequences = max(1, min(MAX_SEQUENCES, self.kv.max_sequences - 1))
            self._weights = ModelWeights(self.graph, self.backends, self.kv, self.books)
            setup = setup_of(prepared, options)
            undo.enter_context(self._weights.begin(prepared))
            end = 0.1 if self._weights.disk else LOADING if setup else 1
            self._weights.load(prepared, stretch(progress, 0, end))
            forecast = WorkTimes.load(setup.memory) if setup and setup.memory else WorkTimes()
            self._executor = Executor(
                self.graph,
                prepared.plans,
                self.backends,
                self._weights.store,
                self.kv,
                self.stats,
                options.wishes.deterministic,
                forecast,
            )
            self.predictor = _predictor_of(prepared, self._executor, self.books)
            if self.predictor:
                undo.callback(self.predictor.close)
            self._budget = ModelBudget(self.books, self._executor, self._weights)
            self._tuning = tuning = ModelTuning(self.graph, self._executor)
            parts = ModelParts(self._executor, self.kv, self.books, self._weights, tuning)
            self._runner = StepRunner(parts, self.stats, DeviceLoss(source, options, prepared, parts))
            if setup:
                self._measure(setup, forecast, stretch(progress, LOADING, 1, MeasuringProgress))
            self._weights.open(self._executor, progress)
            self.step, self.choose = self._runner.step, self._runner.choose
            self.alloc, self.fork, self.truncate = self.kv.alloc, self.kv.fork, self.kv.rewind
            self.free, self.length = self.kv.free, self.kv.length
            self.fits, self.shareable, self.thin = self.kv.fits, self.kv.shareable, self.kv.thin
            self.checkpoint_every = self.kv.checkpoint_every
            undo.pop_all()

    def _measure(self, setup: Setup, forecast: WorkTimes, progress: Progress | None) -> None:
        """What is not known yet, and plan by it."""
        autotuner = Autotuner(
            self.graph, self.backends, self._weights.store, self.kv, self._executor, forecast, setup
        )
        self._tuning.begin(autotuner, progress)
        self.rest()  # what was measured in goes, with keys and values of long texts

    @property
    def autotuner(self) -> Autotuner | None:
        """What plans anew while it runs; None where its plans are fixed."""
        return self._tuning.autotuner

    @property
    def long_prompts(self) -> LongPrompts | None:
        """What chooses between host and device for prompts, where weights come from disk."""
        return self._weights.long_prompts

    @property
    def stands_aside(self) -> bool:
        """Whether steps of others can run in the middle of a long one. Weights come from disk in the order of
        a pass: one in the middle of it would take its pieces."""
        return not self._weights.are_read_by_passes

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        return self._executor.plans

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer's weights lie and what computes with them; from any thread."""
        return places_of(self.plans, self._weights.streamed, self._crosses)

    def _crosses(self, op: Op, backend: str) -> int:
        """Bytes of an op's weights that come over a link for every pass."""
        device = self.backends.get(backend)  # one that has failed is gone
        uses = device.wants([op]) if device else ()
        return sum(use.weight.nbytes for use in uses if device and device.streams(use))

    @property
    def crossed(self) -> Mapping[str, int]:
        """Bytes of weights that came over each device's link so far, for passes; from any thread."""
        return {name: b.crossed for name, b in self.backends.copy().items() if b.crossed}

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """This many tokens of prompts wait: what is worth preparing for them is prepared now."""
        self._tuning.expect(tokens, between)
        self._runner.expect(tokens)

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Between two steps: look after the plan."""
        self._tuning.tend(idle, between)
        self._weights.budget.tend()

    def set_ram(self, nbytes: int) -> None:
        """Take at most this many bytes from now on."""
        self._budget.set_ram(nbytes)

    def lend(self, held: int, most: int) -> None:
        """Leave a part of the budget to what encodes pictures: it holds so much, and may come to so much."""
        self._budget.lend(held, most)

    def bill(self) -> Mapping[str, int]:
        """What takes how much now."""
        return self._budget.bill()

    @property
    def promised(self) -> PlanSet:
        """The plans in force, with the speeds that follow from what was measured so far."""
        return self._tuning.promised

    @property
    def reason(self) -> str:
        """Why passes run as they do: the last change, also one that was taken back; from any thread."""
        return self._tuning.reason

    @property
    def in_use(self) -> Mapping[str, int]:
        """What took how much recently, without promises; from any thread."""
        return self.books.seen

    def streaming(self) -> Streaming | None:
        """What passes are like that read weights from disk."""
        return self._weights.streaming()

    def experts_kept(self) -> HitShares | None:
        """How well experts were kept that do not all fit, beside other rules; None: they do, or too little
        was chosen yet."""
        if experts := self._weights.experts:
            return experts.hit_shares()
        return next((kept for each in self._executor.experts if (kept := each.hit_shares())), None)

    def device_slots(self) -> DeviceSlots | None:
        """How well experts do that have slots on a device; None: there are none."""
        return next((found for each in self._executor.experts if (found := each.report)), None)

    def rest(self) -> None:
        """Nothing has come for a while: memory that is not needed goes to the system, and the books tell."""
        self._executor.rest()
        self.kv.trim()
        if self.predictor:
            self.predictor.rest()
        give_back()
        self._weights.budget.look()

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        """Seconds of a step, by tokens of each sequence and how many come before them; None: unknown."""
        if self._weights.disk or self._weights.experts:
            return self._weights.predict(sum(n for n, _ in chunks), self.plans)
        return self._tuning.predict(chunks)

    @property
    def alike(self) -> int:
        """The most tokens of a step whose rows have the bits that they have one by one."""
        return self.plans.alike(self.backends)

    @property
    def most_cached(self) -> int | None:
        """Tokens of prompts that are worth keeping for later; None: all there is room for."""
        return self._weights.most_cached

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
        return self._weights.disk is None

    @property
    def hidden(self) -> Floats:
        """The hidden states that chunks of the last step had kept; good until the next step."""
        return self._executor.hidden

    @property
    def kv_bytes(self) -> int:
        """Memory of keys and values in use."""
        return self.kv.used_bytes

    def forget_threads(self) -> None:
        """The backends' threads were set elsewhere: they are set again before the next pass."""
        self._executor.forget_threads()

    def cancel(self) -> None:
        """End the step that is running; from any thread."""
        for backend in list(self.backends.values()):
            backend.cancel()

    def rearm(self) -> None:
        """Let the next step run."""
        for backend in self.backends.values():
            backend.rearm()

    def close(self) -> None:
        """Give everything back, and keep what was learnt."""
        self._tuning.close()
        if self.predictor:
            self.predictor.close()
        self._executor.close()
        self._weights.close()
        close_all(self.backends)
        self._weights.close_files()
        self.kv.close()


def _kv_of(prepared: LoadPlan) -> KvCache:
    """The cache for the keys and values of all sequences."""
    return KvCache(
        kv_shapes(prepared.graph),
        prepared.quant,
        prepared.context,
        # Two more, so that two ways to work can be compared while all of them run.
        MAX_SEQUENCES + 2 + CACHED,
        prepared.plans.ubatch,
        prepared.kv_bytes,
        states_of(prepared.graph.ops),
    )


def _predictor_of(prepared: LoadPlan, executor: Executor, books: Books) -> Predictor | None:
    """What guesses for a model: its weights are booked before they are read, its rows before they come."""
    if (planned := prepared.block) is None:
        return None
    books.found(breakdown.MTP, "shared", planned.rows)
    backend, threads = prepared.backends[planned.backend], lambda: executor.plans.plan(1).threads
    make = partial(Predictor, planned, backend, prepared.context, threads, executor.forget_threads)
    return books.take(breakdown.MTP, "anonymous", planned.weights, make)


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
