"""The engine: one thread that owns the model, and the sequences that run on it.

Every native call is made by this thread, for ever: ggml and torch keep a pool of workers per calling thread
and stop spinning for good once there are more of them than cores. Others send it work through a queue.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import numpy as np

from hetrun.errors import Cancelled, ContextFull, EngineStopped, HetrunError, OptionError
from hetrun.events import Event, FinishReason, GenerateRequest, Message, Timings, TokenLogprob, Usage
from hetrun.executor import Chunk, Step
from hetrun.model import MAX_SEQUENCES, Model
from hetrun.sampling import Choice, Sampler, make_sampler
from hetrun.scheduler import schedule
from hetrun.textstream import StreamDecoder
from hetrun.tokenizer import Tokenizer

log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
R = TypeVar("R")
LAST = np.zeros(1, np.int64)  # the wanted row of a chunk of one token
NOTHING = np.zeros(0, np.int64)


class Renderer(Protocol):
    """Messages to text."""

    def __call__(self, messages: tuple[Message, ...]) -> str: ...


@dataclass(slots=True)
class Loaded:
    """What the engine runs."""

    model: Model
    tokenizer: Tokenizer | None
    render: Renderer | None
    temperature: float | None  # the model's own default
    load_s: float = 0.0


@dataclass(slots=True)
class Running:
    """A request that has a place in the KV cache."""

    id: int
    request: GenerateRequest
    on_event: OnEvent
    seq: int
    tokens: list[int]  # prompt and answer
    n_prompt: int
    limit: int  # tokens of the answer
    sampler: Sampler
    decoder: StreamDecoder
    arrived: float
    computed: int = 0
    first: float = 0.0  # when the first token came
    prompt_s: float = 0.0
    last: float = 0.0

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.n_prompt

    def usage(self) -> Usage:
        """Tokens counted."""
        return Usage(self.n_prompt, self.generated)

    def timings(self, load_s: float) -> Timings:
        """Rates measured."""
        decode_s = self.last - self.first
        return Timings(
            load_s=load_s,
            ttft_s=self.first - self.arrived if self.first else 0.0,
            prompt_tok_s=self.n_prompt / self.prompt_s if self.prompt_s else 0.0,
            decode_tok_s=(self.generated - 1) / decode_s if self.generated > 1 and decode_s > 0 else 0.0,
        )


@dataclass(slots=True)
class _Job(Generic[R]):
    """A function to be called on the engine thread."""

    work: Callable[[Loaded], R]
    done: threading.Event = field(default_factory=threading.Event)
    result: R | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    id: int
    request: GenerateRequest
    on_event: OnEvent
    arrived: float


@dataclass(frozen=True, slots=True)
class _Cancel:
    id: int


class _Close:
    pass


class Engine:
    """Starts the thread, gives it work, and stops it."""

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._inbox: queue.SimpleQueue[_Job[object] | _Request | _Cancel | _Close] = queue.SimpleQueue()
        self._ids = count(1)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._loaded: Loaded | None = None
        self._stopped = False
        self._busy: frozenset[int] = frozenset()  # the requests of the step that is running; 0 is a job
        self._thread = threading.Thread(target=self._main, args=(load,), name="hetrun-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed:
            raise self._failed

    @property
    def thread_id(self) -> int | None:
        """The thread that makes every native call."""
        return self._thread.ident

    def submit(self, request: GenerateRequest, on_event: OnEvent) -> int:
        """Begin a request; `on_event` is called on the engine thread."""
        self._check_open()
        new = next(self._ids)
        self._inbox.put(_Request(new, request, on_event, perf_counter()))
        return new

    def cancel(self, request_id: int) -> None:
        """End a request, also in the middle of a step. One that is over already is left alone."""
        if self._stopped:
            return
        self._inbox.put(_Cancel(request_id))
        if request_id in self._busy and self._loaded:
            self._loaded.model.cancel()

    def call(self, work: Callable[[Loaded], R]) -> R:
        """Call a function on the engine thread, between two steps, and wait for it."""
        self._check_open()
        job = _Job(work)
        self._inbox.put(job)  # type: ignore[arg-type]  # the queue does not care for the result's type
        try:
            job.done.wait()
        except KeyboardInterrupt:
            if 0 in self._busy and self._loaded:
                self._loaded.model.cancel()
            raise
        if job.error:
            raise job.error
        return job.result  # type: ignore[return-value]  # set when there is no error

    def close(self) -> None:
        """Stop; running requests get an error event."""
        if self._stopped:
            return
        self._stopped = True
        self._inbox.put(_Close())
        if self._busy and self._loaded:
            self._loaded.model.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if self._stopped:
            raise EngineStopped("the model was closed; open it again with LLM(...)")

    # --- on the engine thread

    def _main(self, load: Callable[[], Loaded]) -> None:
        start = perf_counter()
        try:
            self._loaded = load()
            self._loaded.load_s = perf_counter() - start
        except BaseException as e:
            self._failed = e
            self._stopped = True
            return
        finally:
            self._ready.set()
        try:
            Loop(self._loaded, self._inbox, self._set_busy).run()
        finally:
            self._stopped = True
            self._loaded.model.close()
            if self._loaded.tokenizer:
                self._loaded.tokenizer.close()

    def _set_busy(self, ids: frozenset[int]) -> None:
        self._busy = ids


class Loop:
    """What the engine thread does: take what came in, run a step, hand out what it gave."""

    def __init__(
        self, loaded: Loaded, inbox: queue.SimpleQueue[object], set_busy: Callable[[frozenset[int]], None]
    ) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._inbox = inbox
        self._set_busy = set_busy
        self._waiting: list[_Request] = []
        self._running: list[Running] = []

    def run(self) -> None:
        """Until somebody closes."""
        try:
            while self._take():
                self._admit()
                if self._running:
                    self._step()
        finally:
            stopped = EngineStopped("the model was closed before the answer was complete")
            for r in list(self._running):
                self._fail(r, stopped)
            for w in self._waiting:
                w.on_event(Event("error", error=stopped))

    def _take(self) -> bool:
        """Everything that came in; waits if there is nothing else to do. False: close."""
        idle = not self._running and not self._waiting
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if isinstance(item, _Close):
                return False
            if isinstance(item, _Request):
                self._waiting.append(item)
            elif isinstance(item, _Cancel):
                self._cancel(item.id)
            elif isinstance(item, _Job):
                self._call(item)

    def _call(self, job: _Job[object]) -> None:
        self._model.rearm()
        self._set_busy(frozenset((0,)))
        try:
            job.result = job.work(self._loaded)
        except BaseException as e:
            job.error = e
        finally:
            self._set_busy(frozenset())
            self._model.rearm()
            job.done.set()

    def _cancel(self, request_id: int) -> None:
        for r in [r for r in self._running if r.id == request_id]:
            self._finish(r, "cancelled")
        for w in [w for w in self._waiting if w.id == request_id]:
            self._waiting.remove(w)
            w.on_event(Event("done", finish_reason="cancelled"))

    def _admit(self) -> None:
        """Give waiting requests a place, in order of arrival."""
        while self._waiting and len(self._running) < MAX_SEQUENCES:
            waiting = self._waiting.pop(0)
            try:
                self._running.append(self._begin(waiting))
            except Exception as e:
                waiting.on_event(Event("error", error=e))

    def _begin(self, w: _Request) -> Running:
        tokens = prompt_tokens(self._loaded, w.request)
        params = w.request.params
        room = self._model.context - len(tokens)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(tokens)} tokens, but the context holds {self._model.context} with the answer; "
                "shorten it, or ask for more with --ctx"
            )
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        default = (
            {} if self._loaded.temperature is None else {"default_temperature": self._loaded.temperature}
        )
        sampler = make_sampler(params, **default)
        seq = self._model.alloc()
        decoder = StreamDecoder(tuple(params.stop))
        return Running(
            w.id, w.request, w.on_event, seq, tokens, len(tokens), limit, sampler, decoder, w.arrived
        )

    def _step(self) -> None:
        start, native = perf_counter(), self._model.native_seconds
        chosen = schedule(self._running, self._model.plans.ubatch)
        step = Step(tuple(_chunk(r, n) for r, n in chosen))
        try:
            self._set_busy(frozenset(r.id for r, _ in chosen))
            logits = self._model.step(step)
        except Cancelled:
            self._model.rearm()  # whoever asked for it is in the inbox; the others run again
            return
        except Exception as e:
            if not isinstance(e, HetrunError):
                log.exception("a step failed")
            for r, _ in chosen:
                self._fail(r, e)
            return
        finally:
            self._set_busy(frozenset())
        now, row = perf_counter(), 0
        for r, n in chosen:
            r.computed += n
            if r.missing:
                continue
            self._choose(r, logits[row], now)
            row += 1
        self._model.stats.step(perf_counter() - start, self._model.native_seconds - native)

    def _choose(self, r: Running, logits: np.ndarray, now: float) -> None:
        """Take the next token of a sequence and say so; end it where it ends."""
        r.last = now
        if not r.first:
            r.first, r.prompt_s = now, now - r.arrived
        try:
            choice = r.sampler.sample(logits)
        except HetrunError as e:
            self._fail(r, e)
            return
        r.sampler.accept(choice.token)
        tokenizer = self._loaded.tokenizer
        if tokenizer and not r.request.params.ignore_eos and tokenizer.is_end(choice.token):
            self._finish(r, "stop")
            return
        r.tokens.append(choice.token)
        text = r.decoder.push(tokenizer.piece(choice.token)) if tokenizer else ""
        r.on_event(Event("token", text, choice.token, self._logprob(choice)))
        if r.decoder.stopped is not None:
            self._finish(r, "stop")
        elif r.generated >= r.limit:
            self._finish(r, "length")

    def _logprob(self, choice: Choice) -> TokenLogprob | None:
        if choice.logprob is None:
            return None
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            return TokenLogprob(choice.token, choice.logprob, choice.top)
        pieces = tuple(tokenizer.piece(t) for t, _ in choice.top)
        return TokenLogprob(choice.token, choice.logprob, choice.top, tokenizer.piece(choice.token), pieces)

    def _finish(self, r: Running, reason: FinishReason) -> None:
        self._drop(r)
        r.on_event(
            Event(
                "done",
                r.decoder.flush(),
                finish_reason=reason,
                usage=r.usage(),
                timings=r.timings(self._loaded.load_s),
            )
        )

    def _fail(self, r: Running, error: Exception) -> None:
        self._drop(r)
        r.on_event(Event("error", usage=r.usage(), timings=r.timings(self._loaded.load_s), error=error))

    def _drop(self, r: Running) -> None:
        self._running.remove(r)
        self._model.free(r.seq)


def _chunk(r: Running, n: int) -> Chunk:
    tokens = np.array(r.tokens[r.computed : r.computed + n], np.int64)
    if n < r.missing:
        return Chunk(r.seq, tokens, NOTHING)
    return Chunk(r.seq, tokens, LAST if n == 1 else np.array([n - 1], np.int64))


def prompt_tokens(loaded: Loaded, request: GenerateRequest) -> list[int]:
    """The tokens of a request's prompt."""
    tokenizer = loaded.tokenizer
    if request.tokens is not None:
        tokens = list(request.tokens)
        for i, token in enumerate(tokens):
            if not 0 <= token < loaded.model.n_vocab:
                raise OptionError(
                    f"token {i} of the prompt is {token}; the vocabulary goes from 0 to {loaded.model.n_vocab - 1}"
                )
    elif tokenizer is None:
        raise OptionError("nothing here can read the model's tokenizer, so only prompts of token ids work")
    elif request.messages is not None:
        assert loaded.render is not None
        tokens = tokenizer.encode(loaded.render(request.messages))
    else:
        tokens = tokenizer.encode(request.text or "")
    if not tokens:
        raise OptionError("the prompt is empty; give at least one token")
    return tokens
