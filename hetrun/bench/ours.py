"""This side: the engine as a user has it, from the request to the token."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from hetrun.bench.cases import Case
from hetrun.config import Settings
from hetrun.errors import HetrunError, OptionError
from hetrun.events import Event, GenerateRequest
from hetrun.graph import Graph, kv_shapes
from hetrun.kv import token_bytes
from hetrun.llm import LLM, model_path, reason_of
from hetrun.ops import Moe
from hetrun.params import SamplingParams
from hetrun.plan import bucket_of
from hetrun.quant import by_name
from hetrun.source import ModelSource, build_graph, is_known, open_model
from hetrun.stats import Stats
from hetrun.weights import Progress
from hetrun.whole_plan import needs


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """What one run of a segment took."""

    segment: str
    backend: str
    threads: int
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Mark:
    """The moment a token came, and what the engine had counted until then."""

    at: float
    step_seconds: float
    native_seconds: float


def open_llm(settings: Settings, progress: Progress | None = None, **forced: object) -> LLM:
    """The model by settings that were already resolved; what is forced counts more."""
    given = {name: getattr(settings, name) for name in settings.origins if name != "model"}
    return LLM(model_path(settings), progress=progress, **(given | forced))


class Ours:
    """Measures cases on an open model."""

    name = "hetrun"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._stats: Stats = llm.stats
        self._shares: list[float] = []

    def check(self, case: Case) -> None:
        """Refuse what the model has no room for."""
        if case.context > self._llm.info.context:
            raise OptionError(
                f"{case.name} needs a context of {case.context} tokens and the model has "
                f"{self._llm.info.context}; measure less, or ask for more with --ctx"
            )
        most = self._llm.call(lambda loaded: loaded.model.max_sequences)
        if case.batch > most:
            raise OptionError(f"-b {case.batch} is more than the {most} sequences that run together")

    def prepare(self, case: Case) -> None:
        """Once, unmeasured: graphs are compiled, memory is touched."""
        self.sample(case, 0)
        self._shares.clear()
        self._llm.call(lambda loaded: loaded.model.stats.reset())

    def sample(self, case: Case, seed: int) -> float:
        """Tokens per second, once."""
        tokens = 1 if case.kind == "prefill" else case.tokens + 1
        watch = Watch(self._stats, case.batch, tokens)
        # Sequences begin one after the other; those that began early go on until the last one is done.
        most = tokens if case.batch == 1 or tokens == 1 else tokens + self._head_start(case)
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        prompts = case.prompts(self._llm.n_vocab, seed).tolist()
        begin = perf_counter()
        ids = [
            self._llm.submit(GenerateRequest(params, tokens=tuple(prompt)), watch.collector(i))
            for i, prompt in enumerate(prompts)
        ]
        try:
            watch.wait()
        finally:
            for request_id in ids:
                self._llm.cancel(request_id)
        if case.kind == "prefill":
            return case.batch * case.tokens / (watch.begun - begin)
        self._shares.append(watch.python_share)
        return watch.rate

    def _head_start(self, case: Case) -> int:
        return case.batch * (1 + case.prompt // self._llm.plan.ubatch)

    def threads(self, case: Case) -> int:
        """Compute threads of the plan that is measured."""
        return self._llm.plan.plan(self._width(case)).threads

    def plan(self, case: Case) -> str:
        """Which backends run the case, and how many segments of it: `llamacpp`, `amx x4 + llamacpp x5`."""
        segments = self._llm.plan.plan(self._width(case)).segments
        counts = {s.backend: sum(o.backend == s.backend for o in segments) for s in segments}
        if len(segments) == 1:
            return segments[0].backend
        return " + ".join(f"{name} x{n}" for name, n in counts.items())

    def _width(self, case: Case) -> int:
        """Tokens of a typical pass."""
        tokens = case.batch * (case.tokens if case.kind == "prefill" else 1)
        return min(tokens, self._llm.plan.ubatch)

    def segments(self, case: Case) -> list[SegmentTime]:
        """What the segments took since `prepare`."""
        bucket = bucket_of(self._width(case))
        return [
            SegmentTime(k.segment, k.backend, k.threads, r.runs, r.seconds / r.runs)
            for k, r in self._llm.stats
            if k.bucket == bucket
        ]

    @property
    def python_share(self) -> float | None:
        """The part of a decode step that was spent in Python."""
        return median(self._shares) if self._shares else None


class Watch:
    """Marks each token of some requests. The engine thread calls it, so it does next to nothing."""

    def __init__(self, stats: Stats, requests: int, tokens: int) -> None:
        self._stats = stats
        self._tokens = tokens
        self._marks: list[list[Mark]] = [[] for _ in range(requests)]
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
                marks.append(Mark(perf_counter(), stats.step_seconds, stats.native_seconds))
                if len(marks) == 1:
                    self._missing -= 1
                    self._last = i
                if not self._missing and i == self._last and len(marks) == self._tokens:
                    self._over.put(None)
            elif i == self._last and len(marks) < self._tokens:
                self._over.put(HetrunError(f"the answer ended after {len(marks)} of {self._tokens} tokens"))

        return on_event

    def wait(self) -> None:
        """Until the request that began last has all its tokens."""
        error = self._over.get()
        if error:
            raise error

    @property
    def _window(self) -> list[Mark]:
        """While every request was running."""
        return self._marks[self._last][: self._tokens]

    @property
    def begun(self) -> float:
        """When the last prompt was read."""
        return self._window[0].at

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


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer, of which each token reads some."""

    nbytes: int
    n: int
    n_used: int

    def read_by(self, tokens: int) -> float:
        """Bytes that so many tokens are expected to read if they choose independently of each other."""
        return self.nbytes * (1 - (1 - self.n_used / self.n) ** tokens)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a decode step must read."""

    weights: int  # each once, whatever the batch; of the embedding only a row
    kv: tuple[tuple[int, int], ...]  # of each layer: bytes of a token, and its window or 0
    experts: tuple[Experts, ...] = ()  # they are not among the weights above

    def weight_bytes(self, tokens: int) -> float:
        """Weights that a step of so many tokens reads; an estimate where there are experts."""
        return self.weights + sum(e.read_by(tokens) for e in self.experts)

    def kv_bytes(self, seen: float) -> float:
        """Keys and values of so many tokens that a sequence has seen; a layer with a window reads no more."""
        return sum(size * min(seen, window or seen) for size, window in self.kv)

    def per_step(self, case: Case) -> float:
        """Bytes of a step in the middle of a case."""
        kv = self.kv_bytes(case.prompt + (case.tokens + 1) / 2)
        return self.weight_bytes(case.batch) + case.batch * kv


def traffic(path: Path, kv_type: str) -> Traffic:
    """From the file's header."""
    source = open_model(path)
    if not is_known(source.architecture):
        return _traffic_of_file(source, kv_type)
    graph, quant = build_graph(source), by_name(kv_type.upper())
    experts = _experts(graph)
    weights = {w: w.nbytes for op in graph.ops if op.kind != "embed" for w in op.weights}
    kv = tuple((token_bytes(shape, quant), shape.window) for shape in kv_shapes(graph).values())
    return Traffic(sum(weights.values()) - sum(e.nbytes for e in experts), kv, experts)


def _experts(graph: Graph) -> tuple[Experts, ...]:
    found = ((op.attrs, op.weights[1:]) for op in graph.ops if isinstance(op.attrs, Moe))  # behind the router
    return tuple(Experts(sum(w.nbytes for w in ws), a.n_experts, a.n_used) for a, ws in found)


def _traffic_of_file(source: ModelSource, kv_type: str) -> Traffic:
    """For a model that hetrun has no graph of: by the names of its tensors."""
    named = {w.name: w.nbytes for w in source.weights()}
    looked_up = named.get("token_embd.weight", 0) if "output.weight" in named else 0
    n = source.get_int("expert_count", 0, 0, 1 << 16)
    size = sum(nbytes for name, nbytes in named.items() if "_exps." in name) if n else 0
    experts = (Experts(size, n, source.get_int("expert_used_count", n, 1, n)),) if size else ()
    kv = ((needs(source, kv_type, 1).per_token, 0),)
    return Traffic(sum(named.values()) - looked_up - size, kv, experts)
