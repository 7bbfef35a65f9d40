"""This side: the engine as a user has it, from the request to the token."""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol, TypeVar

from hetrun.api.local_model import LocalModel, reason_of
from hetrun.api.model_path import model_path
from hetrun.backend import Backend
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import HetrunError, OptionError
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.stats import Stats
from hetrun.planner.plan import Plan, bucket_of
from hetrun.prefetch.expert_trace import HitShares
from hetrun.system.progress import Progress
from hetrun.tools.bench import breakdown as anatomy
from hetrun.tools.bench.breakdown import Anatomy
from hetrun.tools.bench.cases import BenchCase, Passage
from hetrun.tools.bench.io_counters import experts_kept
from hetrun.tools.bench.matmul_peak import Peak, measure_peak, multiplier
from hetrun.tools.bench.texts import BenchText, passage_of
from hetrun.tools.bench.timed_window import BackendSeconds, TimedWindow, WindowSeconds

log = logging.getLogger(__name__)

T = TypeVar("T")
QUICK_S = 1.0  # a sample that takes no longer may be taken once more, to look inside


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """What one run of a segment took."""

    segment: str
    backend: str
    threads: int
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TokenMark:
    """The moment a token came, and what the engine had counted until then."""

    at: float
    step_seconds: float
    native_seconds: float


def open_llm(settings: Settings, progress: Progress | None = None, **forced: object) -> LocalModel:
    """The model by settings that were already resolved; what is forced counts more."""
    given = {name: getattr(settings, name) for name in settings.origins if name != "model"}
    return LocalModel(model_path(settings), progress=progress, **(given | forced))


def spec_of(settings: Settings) -> str:
    """Speed is measured without speculation, unless the user asked for it."""
    return settings.spec if "spec" in settings.origins else "off"


class HetrunSide:
    """Measures cases on an open model."""

    name = "hetrun"

    def __init__(self, llm: LocalModel, look: bool = False, text: BenchText | None = None) -> None:
        """With `look` the unmeasured runs show what the time inside backends goes into; with a text its
        tokens are read and written."""
        self._llm = llm
        self._text = text
        self._look = look
        self._stats: Stats = llm.stats
        self._backends: Mapping[str, Backend] = llm.call(_backends)
        self._shares: list[float] = []
        self._measured: list[WindowSeconds] = []
        self._looked = BackendSeconds({}, {})
        self._seconds = 0.0  # of the last sample, prompt included
        self._peaks: dict[tuple[str, str, int], Peak | None] = {}

    def check(self, case: BenchCase) -> None:
        """Refuse what the model has no room for."""
        if case.context > self._llm.info.context:
            raise OptionError(
                f"{case.name} needs a context of {case.context} tokens, but the model has "
                f"{self._llm.info.context}; measure less, or ask for more with --ctx"
            )
        most = self._llm.call(lambda loaded: loaded.model.max_sequences)
        if case.batch > most:
            raise OptionError(f"-b {case.batch} is more than the {most} sequences that run together")

    def prepare(self, case: BenchCase) -> None:
        """Once, unmeasured: graphs are compiled, memory is touched."""
        self._run(case, 0, look=self._look)
        self._shares.clear()
        self._measured.clear()
        self._llm.call(lambda loaded: loaded.model.stats.reset())

    def sample(self, case: BenchCase, seed: int) -> float:
        """Tokens per second, once."""
        return self._run(case, seed)

    def anatomy(self, case: BenchCase) -> Anatomy:
        """Where the time of the samples since `prepare` went.

        Looking makes runs slower, so it is not done in measured ones: in the first one, or, where that costs
        little, in one more. What was seen there are shares of the time that was measured.
        """
        measured = anatomy.mean(self._measured)
        if self._seconds <= QUICK_S:
            self._run(case, 0, look=True)
        return anatomy.dissect("prompt" if case.kind == "prefill" else "step", measured, self._looked)

    def _run(self, case: BenchCase, seed: int, look: bool = False) -> float:
        tokens = 1 if case.kind == "prefill" else case.tokens + 1
        stretch = TimedWindow(self._stats, self._backends, look)
        watch = Watch(self._stats, case.batch, tokens, stretch)
        if case.kind == "prefill":
            self._llm.call(lambda loaded: stretch.begin())
        begin = perf_counter()
        try:
            answer(self._llm, case, seed, watch, passage_of(self._text, case, seed))
        finally:
            if look:
                self._llm.call(lambda loaded: stretch.stop())
        self._seconds = perf_counter() - begin
        if look:
            self._looked = stretch.looked
        if case.kind == "prefill":
            total = watch.begun - begin
            self._measured.append(WindowSeconds(total, stretch.inside, stretch.waited, watch.queued))
            return case.batch * case.tokens / total
        self._shares.append(watch.python_share)
        step, n = case.batch / watch.rate, case.tokens
        inside = {name: seconds / n for name, seconds in stretch.inside.items()}
        self._measured.append(WindowSeconds(step, inside, stretch.waited / n))
        return watch.rate

    def experts_kept(self) -> HitShares | None:
        """How well experts were kept that do not all fit."""
        return self._llm.call(experts_kept)

    def alone(self, work: Callable[[], T]) -> T:
        """Do something while the engine does nothing: it looks after the model when it is not asked."""
        return self._llm.call(lambda loaded: work())

    def peak(self, case: BenchCase, threads: int | None = None) -> Peak | None:
        """How fast the backend that makes most of a case's products multiplies at its best, with `threads`
        threads; None: with those of the plan.

        It is measured once. None where that is impossible apart from the model.
        """
        plan = self._llm.plan.plan(self._width(case))
        most = multiplier(plan.segments)
        if most is None or most.backend not in self._backends:
            return None
        n = threads or plan.threads
        key = most.backend, most.weight.quant.name, n

        def measure(loaded: LoadedModel) -> Peak:
            backend = self._backends[most.backend]
            backend.set_threads(n)
            try:
                return measure_peak(backend, most.weight, n)
            finally:
                assert isinstance(loaded.model, PlannedModel), "only such a model has backends"
                loaded.model.forget_threads()

        if key not in self._peaks:
            try:
                self._peaks[key] = self._llm.call(measure)
            except HetrunError as e:
                log.warning("how fast %s multiplies could not be measured: %s", most.backend, e)
                self._peaks[key] = None
        return self._peaks[key]

    def threads(self, case: BenchCase) -> int:
        """Compute threads of the plan that is measured."""
        return self._llm.plan.plan(self._width(case)).threads

    @property
    def precision(self) -> str:
        """Of its products; empty where a library that runs models as a whole decides."""
        return self._llm.plan.precision or ""

    def plan(self, case: BenchCase) -> str:
        """Which backends run the case, and how many segments of it: `llamacpp`, `amx x4 + llamacpp x5`."""
        return backends_of(self._llm.plan.plan(self._width(case)))

    def _width(self, case: BenchCase) -> int:
        """Tokens of a typical pass."""
        tokens = case.batch * (case.tokens if case.kind == "prefill" else 1)
        return min(tokens, self._llm.plan.ubatch)

    def bucket(self, case: BenchCase) -> str:
        """The bucket of a typical pass."""
        return bucket_of(self._width(case))

    def segments(self, case: BenchCase) -> list[SegmentTime]:
        """What the segments took since `prepare`."""
        bucket = self.bucket(case)
        return [
            SegmentTime(k.segment, k.backend, k.threads, r.runs, r.seconds / r.runs)
            for k, r in self._llm.stats
            if k.bucket == bucket
        ]

    @property
    def python_share(self) -> float | None:
        """The part of a decode step that was spent in Python."""
        return median(self._shares) if self._shares else None


def answer(llm: LocalModel, case: BenchCase, seed: int, watch: Watch, text: Passage | None = None) -> None:
    """Have the requests of a case answered, until the watch has seen enough of each; those of a text by its
    own tokens."""
    # Sequences begin one after the other; those that began early go on until the last one is done.
    late = 0 if case.batch == 1 or watch.tokens == 1 else case.batch * (1 + case.prompt // llm.plan.ubatch)
    params = SamplingParams(max_tokens=watch.tokens + late, temperature=0, ignore_eos=True)
    prompts = (case.prompts(llm.n_vocab, seed) if text is None else text.prompts).tolist()
    scripts = [()] * len(prompts) if text is None else text.answers.tolist()
    ids = [
        llm.submit(GenerateRequest(params, tokens=tuple(prompt), forced=tuple(script)), watch.collector(i))
        for i, (prompt, script) in enumerate(zip(prompts, scripts, strict=True))
    ]
    try:
        watch.wait()
    finally:
        for request_id in ids:
            llm.cancel(request_id)


def backends_of(plan: Plan) -> str:
    """Who runs a plan: `llamacpp`, or `amx x4 + llamacpp x5` segments."""
    counts = Counter(s.backend for s in plan.segments)
    if len(plan.segments) == 1:
        return plan.segments[0].backend
    return " + ".join(f"{name} x{n}" for name, n in counts.items())


def _backends(loaded: LoadedModel) -> Mapping[str, Backend]:
    """What can be looked into; a library that runs whole models cannot."""
    return loaded.model.backends if isinstance(loaded.model, PlannedModel) else {}


class BenchObserver(Protocol):
    """What is told, on the engine's thread, when that begins which is measured, and when it ends."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Watch:
    """Marks each token of some requests. The engine thread calls it, so it does next to nothing."""

    def __init__(
        self, stats: Stats, requests: int, tokens: int, stretch: BenchObserver | None = None
    ) -> None:
        """The stretch begins when every request has a token (for one token each, before that) and ends with
        the last token of the request that began last."""
        self._stats = stats
        self._stretch: BenchObserver = stretch or TimedWindow(stats, {})
        self._queued: list[
            float
        ] = []  # seconds until the engine began with a request, of those that are done
        self.tokens = tokens
        self._marks: list[list[TokenMark]] = [[] for _ in range(requests)]
        self._missing = requests  # that have no token yet
        self._last = 0  # the request that began last
        self._over: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def collector(self, i: int) -> Callable[[Event], None]:
        """What is called with the events of request i."""
        marks, stats = self._marks[i], self._stats

        def on_event(event: Event) -> None:
            if event.kind == "error":
                self._over.put(reason_of(event))
            elif event.kind == "token":
                marks.append(TokenMark(perf_counter(), stats.step_seconds, stats.native_seconds))
                if len(marks) == 1:
                    self._missing -= 1
                    self._last = i
                    if not self._missing and self.tokens > 1:
                        self._stretch.begin()
                if not self._missing and i == self._last and len(marks) == self.tokens:
                    self._stretch.end()
                    if self.tokens > 1:
                        self._over.put(None)
            elif event.kind == "done":
                self._done(event, i)

        return on_event

    def _done(self, event: Event, i: int) -> None:
        found, timings = len(self._marks[i]), event.timings
        if i == self._last and found < self.tokens:
            self._over.put(HetrunError(f"the answer ended after {found} of {self.tokens} tokens"))
        elif timings.prompt_tok_s:
            self._queued.append(timings.ttft_s - event.usage.prompt_tokens / timings.prompt_tok_s)
        if self.tokens == 1 and not self._missing and i == self._last:
            self._over.put(None)

    def wait(self) -> None:
        """Until the request that began last has all its tokens."""
        error = self._over.get()
        if error:
            raise error

    @property
    def _window(self) -> list[TokenMark]:
        """While every request was running."""
        return self._marks[self._last][: self.tokens]

    @property
    def begun(self) -> float:
        """When the last prompt was read."""
        return self._window[0].at

    @property
    def queued(self) -> float:
        """How long the first of the requests waited for the engine; they come together."""
        return max(0.0, min(self._queued, default=0.0))

    @property
    def rate(self) -> float:
        """Tokens per second of all requests, from then on."""
        a, b = self._window[0].at, self._window[-1].at
        return sum(a < mark.at <= b for marks in list(self._marks) for mark in list(marks)) / (b - a)

    @property
    def python_share(self) -> float:
        """The part of the steps that was not inside native calls. A step is counted after its token was
        marked: the second mark is the first that has the prompt behind it."""
        window = self._window
        if len(window) < 3:
            return 0.0
        steps = window[-1].step_seconds - window[1].step_seconds
        return 1 - (window[-1].native_seconds - window[1].native_seconds) / steps
