"""Our side of a sweep: hetrun with one budget, in a process of its own, so that its peaks are its own.

It loads once and then waits on its pipe: nothing of it runs while others are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from hetrun.api.local_model import LocalModel
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError
from hetrun.executor.stats import Stats
from hetrun.prefetch.expert_trace import HitShares
from hetrun.tools.bench.cases import BenchCase, Passage
from hetrun.tools.bench.hetrun_side import Watch, answer, backends_of
from hetrun.tools.bench.io_counters import Counters, ModelMemory, count, experts_kept, held
from hetrun.tools.bench.process import BenchProcess, obey

NAME = "hetrun"
TRIAL = 2  # steps that say how many a sample may have


@dataclass(frozen=True, slots=True)
class OpenModel:
    """Load a model with these options; answered with `ModelOpened`."""

    path: str
    options: Mapping[str, object]
    weights: int  # bytes of all of them


@dataclass(frozen=True, slots=True)
class ModelOpened:
    context: int
    load_s: float


@dataclass(frozen=True, slots=True)
class PrepareCase:
    """Warm up for a case; answered with steps per second."""

    case: BenchCase
    text: Passage | None = None


@dataclass(frozen=True, slots=True)
class RunCase:
    """Measure the case, with this many tokens; answered with `SweepSample`."""

    case: BenchCase
    seed: int
    text: Passage | None = None  # what is read and written


@dataclass(frozen=True, slots=True)
class ReportState:
    """Answered with `WorkerState`."""

    case: BenchCase


@dataclass(frozen=True, slots=True)
class Complete:
    """Answer these prompts together, greedily; answered with `CaseCompleted`."""

    prompts: Sequence[tuple[int, ...]]
    tokens: int


@dataclass(frozen=True, slots=True)
class SweepSample:
    """Some steps, one behind the other, and what they took."""

    tok_s: float
    steps: int
    seconds: float
    streamed: int  # bytes that our readers brought
    read: int  # bytes that the kernel fetched from disks

    @property
    def per_step(self) -> float:
        """Bytes of weights that a step took from disk."""
        return self.streamed / self.steps

    @property
    def disk_rate(self) -> float:
        """Bytes per second that came from disk."""
        return self.streamed / self.seconds


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What it holds, and how it computes."""

    held: ModelMemory
    threads: int
    plan: str
    experts: HitShares | None = None  # how well those were kept that do not all fit


@dataclass(frozen=True, slots=True)
class CaseCompleted:
    tokens: tuple[tuple[int, ...], ...]
    seconds: float


Order = OpenModel | PrepareCase | RunCase | ReportState | Complete


class StepObserver:
    """Counts when it begins and when it ends; both on the engine's thread."""

    def __init__(self, llm: LocalModel) -> None:
        self._loaded = llm.call(lambda loaded: loaded)
        self.first, self.last = Counters(), Counters()

    def begin(self) -> None:
        """From now on."""
        self.first = count(self._loaded)

    def end(self) -> None:
        """Until now."""
        self.last = count(self._loaded)


class OpenedModel:
    """A model that was opened, in its own process."""

    def __init__(self, path: str, options: Mapping[str, object], weights: int) -> None:
        begin = perf_counter()
        self._weights = weights
        self._llm = LocalModel(path, progress=None, eager=False, **options)
        self.opened = ModelOpened(self._llm.info.context, perf_counter() - begin)

    def begin(self, case: BenchCase, text: Passage | None = None) -> float:
        """Steps per second of a few, behind the case's prompts."""
        if case.context > self._llm.info.context:
            raise OptionError(
                f"{case.name} needs a context of {case.context} tokens and the model has "
                f"{self._llm.info.context} here; measure less, or ask for more with --ctx"
            )
        return self.run(replace(case, tokens=TRIAL), 0, text).steps / self._seconds

    def run(self, case: BenchCase, seed: int, text: Passage | None = None) -> SweepSample:
        """Once."""
        stats: Stats = self._llm.stats
        noting = StepObserver(self._llm)
        watch = Watch(stats, case.batch, case.tokens + 1, noting)
        answer(self._llm, case, seed, watch, text)
        first, last = noting.first, noting.last
        self._seconds = last.at - first.at
        return SweepSample(
            tok_s=watch.rate,
            steps=case.tokens,
            seconds=self._seconds,
            streamed=last.streamed - first.streamed,
            read=last.read - first.read,
        )

    def look(self, case: BenchCase) -> WorkerState:
        """What it holds now, and the plan of the case's steps."""
        plan = self._llm.plan.plan(case.batch)
        found = self._llm.call(lambda loaded: held(loaded, self._weights))
        experts = self._llm.call(experts_kept)
        return WorkerState(found, plan.threads, backends_of(plan), experts)

    def complete(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> CaseCompleted:
        """Whole answers, prompts included."""
        begin = perf_counter()
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        found = self._llm.generate([list(p) for p in prompts], params)
        return CaseCompleted(tuple(tuple(c.tokens) for c in found), perf_counter() - begin)

    def close(self) -> None:
        """Its process ends now."""
        self._llm.close()


def main(descriptor: int) -> None:
    """The process's whole life; it ends when the other end of the pipe does."""
    opened: list[OpenedModel] = []
    try:
        obey(descriptor, NAME, lambda order: _answers(opened, order))
    finally:
        for model in opened:
            model.close()


def _answers(opened: list[OpenedModel], order: object) -> Iterator[object]:
    match order:
        case OpenModel(path, options, weights):
            opened.append(OpenedModel(path, options, weights))
            yield opened[0].opened
        case PrepareCase(case, text):
            yield opened[0].begin(case, text)
        case RunCase(case, seed, text):
            yield opened[0].run(case, seed, text)
        case ReportState(case):
            yield opened[0].look(case)
        case Complete(prompts, tokens):
            yield opened[0].complete(prompts, tokens)


def start(prefix: Sequence[str] = ()) -> BenchProcess:
    """Such a process; nothing is loaded yet."""
    return BenchProcess(NAME, "from hetrun.tools.bench.sweep.worker import main; main({pipe})", prefix)
