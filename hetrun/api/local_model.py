"""`LocalModel`: a model in this process; `LLM`, the command line and workers are built on it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar, cast

import numpy as np

from hetrun.api.model_path import model_path
from hetrun.api.ranking import Ranked, checked_documents, ranked, ranking_requests
from hetrun.backend import Floats, registry
from hetrun.client.completion import (
    Completion,
    Prompt,
    as_prompts,
    completion,
    embedding_request,
    prompt_request,
)
from hetrun.client.events import CurrentStep, Event, GenerateRequest, OnEvent, Streaming
from hetrun.client.hook_dispatcher import heard
from hetrun.client.queries import PlanForecast, Question, RankPrompts
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import OPTIONS, Settings
from hetrun.engine.counters import EngineCounters
from hetrun.engine.engine import CLOSED, Engine
from hetrun.engine.factory import describe, load, template_of
from hetrun.engine.input_processor import Renderer
from hetrun.engine.loaded_model import LoadedModel, prompts_of, tokenizer_of
from hetrun.engine.query_handlers import answered
from hetrun.errors import EngineStopped, OptionError, system_faults
from hetrun.executor.interface import look, set_ram
from hetrun.executor.plan_prediction import predict_plans
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Chunk, Step
from hetrun.executor.what_if import changed, foresee, promised
from hetrun.graph.pooling import Pooling, read_vector
from hetrun.loader.hub.projectors import find_vision
from hetrun.loader.open_model import open_model
from hetrun.loader.source import ModelSource
from hetrun.loader.vision import NoVision, Vision
from hetrun.pictures.decoder import PictureDecoder
from hetrun.planner.options import Options, Wishes
from hetrun.planner.plan import PlanSet
from hetrun.planner.precision import precision_of
from hetrun.system.progress import Progress
from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.renderer import TemplateWorker

A = TypeVar("A")
R = TypeVar("R")


class LocalModel:
    """A loaded model. Every native call is made by one thread; methods may be called from any."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        eager: bool = False,
        **options: object,
    ) -> None:
        """Options are those of the command line, with the same names: ctx, ram, threads, backends, ubatch,
        kv_type, deterministic, plan, chat_template, temperature, ...; `progress` is called with the loaded
        share. `eager` loads everything that pays in the long run now, not with the first long prompt."""
        name = None if model is None else str(model)
        self._open(Settings.resolve(environ=None, model=name, **options), progress, eager=eager)

    @classmethod
    def of(
        cls,
        settings: Settings,
        progress: Progress | None = None,
        *,
        chatting: bool = False,
        eager: bool | None = False,
        most_waiting: int | None = None,
        first: GenerateRequest | None = None,
        front: int = 0,
    ) -> LocalModel:
        """The model of resolved settings.

        `chatting`: messages will follow soon. `most_waiting`: the limit on waiting requests. Errors in the
        `first` request are raised before weights are read. `front`: bytes of the process that this one works
        for, which the memory limit is for as well.
        """
        llm = cls.__new__(cls)
        llm._open(settings, progress, chatting, eager, most_waiting, first, front)
        return llm

    def _open(
        self,
        settings: Settings,
        progress: Progress | None,
        chatting: bool = False,
        eager: bool | None = False,
        most_waiting: int | None = None,
        first: GenerateRequest | None = None,
        front: int = 0,
    ) -> None:
        self.settings = settings
        with system_faults("the model was not loaded"):
            self._begin(settings, progress, chatting, eager, most_waiting, first, front)

    def _begin(
        self,
        settings: Settings,
        progress: Progress | None,
        chatting: bool,
        eager: bool | None,
        most_waiting: int | None,
        first: GenerateRequest | None,
        front: int,
    ) -> None:
        source = open_model(model_path(settings))
        self._templates = templates = TemplateWorker(template_of(source, settings))
        with ExitStack() as undo:
            undo.callback(templates.close)
            if chatting:
                templates.warm()  # its process starts while the model loads
            vision = vision_of(source, settings)
            options = replace(seeing(as_options(settings, eager), vision), front=front)
            # A process of its own, from the first picture on.
            self._decoder = decoder = undo.enter_context(PictureDecoder())
            self._engine = Engine(
                lambda: load(
                    source=source,
                    templates=templates,
                    settings=settings,
                    options=options,
                    progress=progress,
                    most_waiting=most_waiting,
                    first=first,
                    vision=vision,
                    decode=decoder.decode,
                )
            )
            undo.callback(self._engine.close)
            self.info = self._engine.call(lambda loaded: describe(source, templates.template, loaded))
            self.render: Renderer | None = self._engine.call(lambda loaded: loaded.render)
            undo.pop_all()

    @property
    def plan(self) -> PlanSet:
        """What runs where, and why."""
        return self.call(lambda loaded: promised(loaded.model))

    @property
    def stats(self) -> Stats:
        """What was measured so far."""
        return self.call(lambda loaded: look(loaded.model))

    @property
    def doing(self) -> CurrentStep | None:
        """The step being computed; None while the engine waits. Returns at once, on any thread."""
        return self._engine.doing

    @property
    def streaming(self) -> Streaming | None:
        """Statistics of recent passes that read weights from disk; None: all weights are in memory. Returns
        at once, on any thread."""
        return self._engine.streaming

    @property
    def n_vocab(self) -> int:
        """Logits of a token."""
        return self.info.n_vocab

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue one or several prompts, which run together. A prompt is a text or a list of token ids."""
        found = self.collect([prompt_request(p, params or self.defaults) for p in as_prompts(prompts)])
        return [completion(events) for events in found]

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalise: bool = True
    ) -> Floats:
        """A vector for each text or list of token ids, float32 [n_texts, width]: the "mean" of its tokens'
        hidden states, or that of the "last" or the first token ("cls"); by default as the model's file says.
        Its length is 1 unless `normalise` is off."""
        found = self.collect(self.embedding_requests(texts, pooling))
        return vectors(found, normalise)

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Documents by how well they meet a query's requirements, the best first; at most `top_n`."""
        texts = checked_documents(query, documents, top_n)
        found = self.collect(self.ranking_requests(query, texts))
        return ranked([events[-1] for events in found], texts, top_n)

    def ranking_requests(self, query: str, documents: Sequence[str]) -> list[GenerateRequest]:
        """The engine's requests for the scores of documents."""
        return ranking_requests(self.ask(RankPrompts(query, tuple(documents))), self.info.context)

    def embedding_requests(
        self, texts: Prompt | Sequence[Prompt], pooling: Pooling | None
    ) -> list[GenerateRequest]:
        """The engine's requests for vectors."""
        kind = self.info.pooling if pooling is None else pooling
        return [embedding_request(text, kind) for text in as_prompts(texts)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """The events of one prompt as they arrive; leaving the loop stops the model."""
        return self.stream_request(prompt_request(prompt, params or self.defaults))

    def stream_request(self, request: GenerateRequest) -> Iterator[Event]:
        """The events of a request as they arrive; raises its error."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        hearing = heard(request, lambda: self.info)
        request_id = self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                if hearing:
                    hearing.event(event)
                if event.kind == "error":
                    raise reason_of(event)
                yield event
                if event.kind == "done":
                    return
        finally:
            self.cancel(request_id)
            if hearing:
                hearing.end()

    def submit(self, request: GenerateRequest, on_event: OnEvent) -> int:
        """Begin a request and return; `on_event` is called on the engine thread and must be quick."""
        return self._engine.submit(request, on_event)

    def cancel(self, request_id: int) -> None:
        """Stop a request, also in the middle of a step; nothing happens if it is over."""
        self._engine.cancel(request_id)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """The logits after each token, float32 [n_tokens, n_vocab]."""
        return self.call(lambda loaded: all_logits(loaded, tokens))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, as a prompt is tokenised."""
        return self.call(lambda loaded: tokenizer_of(loaded).encode(text))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return self.call(lambda loaded: tokenizer_of(loaded).decode(list(tokens)))

    def save_prompts(self, path: str | PathLike[str]) -> int:
        """Write computed prompts to a file, for `load_prompts` or --prompt-cache of another process, and
        return their number."""
        return self.call(lambda loaded: prompts_of(loaded).save(Path(path)))

    def load_prompts(self, path: str | PathLike[str]) -> int:
        """Read saved prompts and return their number. Raises UserError if the file is damaged, or belongs to
        another model or other options."""
        return self.call(lambda loaded: prompts_of(loaded).load(Path(path)))

    def set_ram(self, ram: int | str) -> PlanSet:
        """Change the memory limit, given as 1.5GiB or in bytes; returns the new plan.

        The change happens between two steps, and no answer is lost. Raises BudgetError if running requests
        need more; nothing has changed then.
        """
        nbytes = OPTIONS["ram"].parse(ram, "ram")

        def change(loaded: LoadedModel) -> PlanSet:
            set_ram(loaded.model, nbytes, loaded.prefixes)
            look(loaded.model)
            return loaded.model.plans

        plans = self.call(change)
        self.settings = replace(self.settings, ram=nbytes)
        return plans

    def foresee(self, changes: Mapping[str, object]) -> PlanForecast:
        """Predict memory and speed for other options; changes nothing."""
        source = open_model(model_path(self.settings))
        options = options_for(source, changed(self.settings, changes))
        kv_type = self.settings.kv_type

        def look(loaded: LoadedModel) -> PlanForecast:
            found, model = foresee(loaded.model, source, options, kv_type), loaded.model
            # Options that were not given depend on free memory, but have been decided by now.
            now = replace(found, context=model.context, threads=model.plans.plan(1).threads)
            return found if changes else now

        return self.aside(look)

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._engine.is_closed

    def check_open(self) -> None:
        """Raise an error if it was closed, or if this process is a fork of the one that opened it."""
        self._engine.check_here()
        if self.is_closed:
            raise EngineStopped(CLOSED)

    @property
    def held(self) -> EngineCounters:
        """The engine's load and totals; returns at once, on any thread."""
        return self._engine.held

    @property
    def template(self) -> ChatTemplate:
        """The chat template in use."""
        return self._templates.template

    def ask(self, question: Question[A]) -> A:
        """The answer to a query about the running model; blocks until it is there."""
        self._engine.check_here()  # a fork shares the pipe to the process of templates, and must not use it
        return cast("A", answered(self, question))

    def aside(self, work: Callable[[LoadedModel], R]) -> R:
        """Call a function that doesn't use the model on the engine thread, maybe in the middle of a pass."""
        return self._engine.call(work, aside=True)

    @property
    def memory(self) -> Mapping[str, int]:
        """The memory in use, in bytes by kind; also `limit` and `left`."""
        return self.call(lambda loaded: loaded.model.bill())

    def check_template(self) -> None:
        """Raise errors in the chat template that can be found without messages."""
        self._templates.check()

    def call(self, work: Callable[[LoadedModel], R]) -> R:
        """Call a function with the loaded model on the engine thread."""
        return self._engine.call(work)

    def close(self) -> None:
        """Stop the engine and free the memory."""
        self._templates.close()
        self._decoder.close()
        self._engine.close()

    def __enter__(self) -> LocalModel:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def defaults(self) -> SamplingParams:
        """The default sampling parameters."""
        s = self.settings
        return SamplingParams(max_tokens=s.max_tokens, temperature=s.temperature, seed=s.seed)

    def collect(self, requests: Sequence[GenerateRequest]) -> list[list[Event]]:
        """Run requests together and return the events of each. An error of one ends all and is raised."""
        over: queue.SimpleQueue[int] = queue.SimpleQueue()
        with Collector(self, requests, over.put) as collector:
            for _ in requests:
                collector.check(over.get())
        return collector.events


class Collector:
    """Runs requests together and keeps their events; leaving the context cancels unfinished ones.

    For speed, the caller is notified of the end of each request, not of each token.
    """

    def __init__(
        self, model: LocalModel, requests: Sequence[GenerateRequest], when_over: Callable[[int], None]
    ) -> None:
        """`when_over` is called on the engine thread with the index of a request that has ended."""
        self.events: list[list[Event]] = [[] for _ in requests]
        self._model, self._when_over = model, when_over
        self._ids: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.cancel)
            for i, request in enumerate(requests):
                self._ids.append(model.submit(request, self._hearer(i, request)))
            undo.pop_all()

    def check(self, number: int) -> None:
        """Raise the error of a request that has ended with one."""
        last = self.events[number][-1]
        if last.kind == "error":
            raise reason_of(last)

    def cancel(self) -> None:
        """Cancel unfinished requests."""
        for request_id in self._ids:
            self._model.cancel(request_id)

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _hearer(self, i: int, request: GenerateRequest) -> OnEvent:
        hearing = heard(request, lambda: self._model.info)

        def on_event(event: Event) -> None:
            self.events[i].append(event)
            if event.last:
                if hearing:
                    hearing.event(event)
                self._when_over(i)

        return on_event


def for_conversations(*, progress: Progress | None = None, front: int = 0, **options: object) -> LocalModel:
    """A model whose first message must not wait, for a server's worker."""
    return _conversing(progress, options, eager=True, front=front)


def for_a_chat(*, progress: Progress | None = None, front: int = 0, **options: object) -> LocalModel:
    """The same for a chat with one user: copies of weights that only make long prompts faster take no memory
    before there are long prompts."""
    return _conversing(progress, options, eager=None, front=front)


def _conversing(
    progress: Progress | None, options: Mapping[str, object], *, eager: bool | None, front: int
) -> LocalModel:
    settings = Settings.resolve(environ=None, **options)
    # Only here: the server's clients don't know of each other, so its queue is limited.
    llm = LocalModel.of(
        settings, progress, chatting=True, eager=eager, most_waiting=settings.queue, front=front
    )
    try:
        llm.check_template()
    except BaseException:
        llm.close()
        raise
    return llm


def reason_of(event: Event) -> Exception:
    """The error of an error event."""
    return event.error or RuntimeError("the engine gave no reason")


def vectors(found: Sequence[Sequence[Event]], normalise: bool) -> Floats:
    """The vectors of finished embeddings, float32 [n, width]."""
    return np.stack([read_vector(vector_of(events[-1]), normalise) for events in found])


def vector_of(event: Event) -> bytes:
    """The vector of the last event of an embedding."""
    assert event.embedding is not None, "it ended as it should, and not with an error"
    return event.embedding


MTP: Mapping[str, Literal["auto", "on"]] = {"auto": "auto", "mtp": "on"}  # by --spec


def as_options(settings: Settings, eager: bool | None = False) -> Options:
    """The part of the settings that a model is made with."""
    wishes = Wishes(settings.threads, settings.ubatch, settings.plan, settings.deterministic)
    return Options(
        wishes,
        settings.backends or None,
        ctx=settings.ctx,
        kv_type=settings.kv_type,
        ram=settings.ram,
        vram=settings.vram,
        precision=precision_of(settings.precision),
        planner=settings.planner,
        streaming=settings.streaming,
        eager=eager,
        mtp=MTP.get(settings.spec, "off"),
    )


def options_for(source: ModelSource, settings: Settings, eager: bool | None = False) -> Options:
    """The same, with what the model reads pictures with."""
    return seeing(as_options(settings, eager), vision_of(source, settings))


def vision_of(source: ModelSource, settings: Settings) -> Vision | NoVision:
    """What a model reads pictures with. Not what would take attention from a device that was asked for by
    name: texts are what most people ask about."""
    found, known = find_vision(source, settings.mmproj), registry.backends()
    if isinstance(found, NoVision) or not found.whole or settings.mmproj:
        return found
    devices = [name for name in settings.backends or () if name in known and known[name].own_memory]
    if not devices:
        return found
    return NoVision(
        f"rows of its pictures see each other, which {devices[0]} cannot compute, so attention would run on "
        f"the CPU, also of texts; --mmproj {found.path} reads pictures all the same"
    )


def seeing(options: Options, vision: Vision | NoVision) -> Options:
    """The same for a model that reads pictures with this, or reads none."""
    if not isinstance(vision, Vision):
        return replace(options, vision=vision)
    return replace(options, vision=vision, spatial=vision.spatial, whole=vision.whole)


def make_plan(settings: Settings, source: ModelSource | None = None) -> PlanSet:
    """The plan for the settings' model, without reading its weights; `source`: its header, if it was read."""
    source = source or open_model(model_path(settings))
    return predict_plans(source, options_for(source, settings, eager=None))


def all_logits(loaded: LoadedModel, tokens: Sequence[int]) -> Floats:
    """The logits of every token of a text that has not been seen before."""
    model, ids = loaded.model, np.asarray(tokens, np.int64)
    if not len(ids) or ids.min() < 0 or ids.max() >= model.n_vocab:
        raise OptionError(f"logits need at least one token, each from 0 to {model.n_vocab - 1}")
    if len(ids) > model.context:
        raise OptionError(
            f"{len(ids)} tokens do not fit into the context of {model.context}; ask for more with ctx"
        )
    seq = (loaded.prefixes or model).alloc()
    try:
        return model.step(Step((Chunk(seq, ids, np.arange(len(ids))),))).copy()
    finally:
        model.free(seq)
