"""What the engine's thread does: take what came in, run a step, hand out what it gave."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hetrun.backend import Floats
from hetrun.errors import Cancelled, ContextFull, EngineStopped, HetrunError, OptionError
from hetrun.events import Event, FinishReason, GenerateRequest, Message, TokenLogprob
from hetrun.executor import Chunk, Step
from hetrun.model import Model
from hetrun.params import SamplingParams
from hetrun.sampling import Choice, Sampler, make_sampler
from hetrun.scheduler import OnEvent, Running, schedule
from hetrun.textstream import StreamDecoder
from hetrun.tokenizer import Tokenizer

log = logging.getLogger(__name__)

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
class Job(Generic[R]):
    """A function to be called on the engine thread."""

    id: int
    work: Callable[[Loaded], R]
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False  # nobody waits for it any more
    result: R | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue."""

    id: int
    request: GenerateRequest
    on_event: OnEvent
    arrived: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request that is to end."""

    id: int


class Close:
    """The engine is to end."""


Item = Job[Any] | Request | Cancel | Close


class Gate:
    """What other threads and the engine thread must see in the same order: what runs, and what is to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopped = False
        self.model: Model | None = None
        self._busy: frozenset[int] = frozenset()  # the requests or the job that are in the model now
        self._cancelled: set[int] = set()  # those whose cancel lies in the inbox

    @property
    def busy(self) -> bool:
        """Whether something is in the model now."""
        return bool(self._busy)

    def cancel(self, id: int) -> None:
        """With the lock: end what runs if it is this one."""
        self._cancelled.add(id)
        if id in self._busy and self.model:
            self.model.cancel()

    def stop(self) -> None:
        """With the lock: end what runs, and let nothing else begin."""
        self.stopped = True
        if self._busy and self.model:
            self.model.cancel()

    def forget(self, id: int) -> None:
        """A cancel was taken out of the inbox."""
        with self.lock:
            self._cancelled.discard(id)

    def enter(self, ids: frozenset[int]) -> bool:
        """Begin to compute for these; False if one of them was cancelled meanwhile, or all is stopped."""
        with self.lock:
            if self.stopped or self.model is None or not self._cancelled.isdisjoint(ids):
                return False
            self.model.rearm()  # a cancel that came for the last ones too late
            self._busy = ids
            return True

    def leave(self) -> None:
        """It is computed: a cancel does not reach the model any more."""
        with self.lock:
            self._busy = frozenset()


class Loop:
    """What the engine thread does: take what came in, run a step, hand out what it gave."""

    def __init__(self, loaded: Loaded, inbox: queue.SimpleQueue[Item], gate: Gate) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._inbox = inbox
        self._gate = gate
        self._waiting: list[Request] = []
        self._running: list[Running] = []
        self._turn = 0

    def run(self) -> None:
        """Until somebody closes."""
        while self._take():
            self._admit()
            if self._running:
                self._step()

    def end(self, reason: EngineStopped) -> None:
        """Say to everybody who waits that nothing comes any more."""
        with self._gate.lock:
            self._gate.stopped = True
        for r in self._running:  # the model goes as a whole
            self._tell(r, Event("error", usage=r.usage(), error=reason))
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Request):
                self._waiting.append(item)
            elif isinstance(item, Job):
                item.error = reason
                item.done.set()
        for w in self._waiting:
            self._tell(w, Event("error", error=reason))

    def _take(self) -> bool:
        """What came in so far; waits if there is nothing else to do. False: close."""
        idle = not self._running and not self._waiting
        # Not until the inbox is empty: others may fill it as fast as it is emptied.
        for _ in range(max(self._inbox.qsize(), idle)):
            item = self._inbox.get()
            if isinstance(item, Close):
                return False
            if isinstance(item, Request):
                self._waiting.append(item)
            elif isinstance(item, Cancel):
                self._cancel(item.id)
            else:
                self._call(item)
        return True

    def _call(self, job: Job[Any]) -> None:
        if not job.abandoned and self._gate.enter(frozenset((job.id,))):
            try:
                job.result = job.work(self._loaded)
            except BaseException as e:
                job.error = e
            finally:
                self._gate.leave()
        else:
            job.error = EngineStopped("the model was closed before it came to this")
        job.done.set()

    def _cancel(self, request_id: int) -> None:
        self._gate.forget(request_id)
        for r in [r for r in self._running if r.id == request_id]:
            self._finish(r, "cancelled")
        for w in [w for w in self._waiting if w.id == request_id]:
            self._waiting.remove(w)
            self._tell(w, Event("done", finish_reason="cancelled"))

    def _admit(self) -> None:
        """Give waiting requests a place, in order of arrival."""
        while self._waiting and len(self._running) < self._model.max_sequences:
            waiting = self._waiting.pop(0)
            try:
                self._running.append(self._begin(waiting))
            except Exception as e:
                self._tell(waiting, Event("error", error=logged(e)))

    def _begin(self, w: Request) -> Running:
        tokens = prompt_tokens(self._loaded, w.request)
        params = w.request.params
        params.check_vocabulary(self._model.n_vocab)
        room = self._model.context - len(tokens)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(tokens)} tokens, but the context holds {self._model.context} with the "
                "answer; shorten it, or ask for more with --ctx"
            )
        return Running(
            id=w.id,
            request=w.request,
            on_event=w.on_event,
            tokens=tokens,
            n_prompt=len(tokens),
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            sampler=self._sampler(params),
            decoder=StreamDecoder(tuple(params.stop)),
            arrived=w.arrived,
            began=perf_counter(),
            seq=self._model.alloc(),
        )

    def _sampler(self, params: SamplingParams) -> Sampler:
        own = self._loaded.temperature
        return make_sampler(params) if own is None else make_sampler(params, default_temperature=own)

    def _step(self) -> None:
        start, native = perf_counter(), self._model.native_seconds
        chosen = schedule(self._running, self._model.plans.ubatch)
        step = Step(tuple(_chunk(r, n) for r, n in chosen))
        if not self._gate.enter(frozenset(r.id for r, _ in chosen)):
            return  # who must end is in the inbox
        try:
            logits = self._model.step(step)
        except Cancelled:
            return  # the same; the others run again
        except Exception as e:
            for r, _ in chosen:
                self._fail(r, logged(e))
            return
        finally:
            self._gate.leave()
        now, row = perf_counter(), 0
        for r, n in chosen:
            self._turn += 1
            r.turn = self._turn
            r.computed += n
            if not r.missing:
                self._next(r, logits[row], now)
                row += 1
        self._model.stats.step(perf_counter() - start, self._model.native_seconds - native)

    def _next(self, r: Running, logits: Floats, now: float) -> None:
        """Take the next token of a sequence and say so; end it where it ends."""
        r.first, r.last = r.first or now, now
        try:
            event = self._choose(r, logits)
        except Exception as e:
            self._fail(r, logged(e))
            return
        if event is None:
            self._finish(r, "stop")
        elif not self._tell(r, event):
            self._drop(r)
        elif r.decoder.stopped is not None:
            self._finish(r, "stop")
        elif r.generated >= r.limit:
            self._finish(r, "length")

    def _choose(self, r: Running, logits: Floats) -> Event | None:
        """The next token; None where the model says that it has finished."""
        choice, tokenizer = r.sampler.sample(logits), self._loaded.tokenizer
        r.sampler.accept(choice.token)
        if tokenizer and not r.request.params.ignore_eos and tokenizer.is_end(choice.token):
            return None
        text = r.decoder.push(tokenizer.piece(choice.token)) if tokenizer else ""
        r.tokens.append(choice.token)
        return Event("token", text, choice.token, self._logprob(choice))

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
        text, timings = r.decoder.flush(), r.timings(self._loaded.load_s)
        self._tell(r, Event("done", text, finish_reason=reason, usage=r.usage(), timings=timings))

    def _fail(self, r: Running, error: Exception) -> None:
        self._drop(r)
        self._tell(r, Event("error", usage=r.usage(), timings=r.timings(self._loaded.load_s), error=error))

    def _drop(self, r: Running) -> None:
        self._model.free(r.seq)
        self._running.remove(r)

    def _tell(self, r: Running | Request, event: Event) -> bool:
        """Call back; a receiver that fails is its own fault and must not end the others."""
        try:
            r.on_event(event)
        except Exception:
            log.exception("the receiver of request %d failed on a %s event", r.id, event.kind)
            return False
        return True


def logged(error: Exception) -> Exception:
    """The error; one that was not raised on purpose leaves its traceback in the log."""
    if not isinstance(error, HetrunError):
        log.error("a request failed", exc_info=error)
    return error


def _chunk(r: Running, n: int) -> Chunk:
    tokens = np.array(r.tokens[r.computed : r.computed + n], np.int64)
    if n < r.missing:
        return Chunk(r.seq, tokens, NOTHING)
    return Chunk(r.seq, tokens, LAST if n == 1 else np.array([n - 1], np.int64))


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The tokenizer, which must be there."""
    if loaded.tokenizer is None:
        raise OptionError(
            "there is no tokenizer for this model (a folder needs tokenizer.json), so it takes only token ids"
        )
    return loaded.tokenizer


def prompt_tokens(loaded: Loaded, request: GenerateRequest) -> list[int]:
    """The tokens of a request's prompt."""
    if request.tokens is not None:
        tokens = list(request.tokens)
        for i, token in enumerate(tokens):
            if not 0 <= token < loaded.model.n_vocab:
                last = loaded.model.n_vocab - 1
                raise OptionError(f"token {i} of the prompt is {token}; the vocabulary goes from 0 to {last}")
    else:
        tokenizer = tokenizer_of(loaded)
        if request.messages is None:
            tokens = tokenizer.encode(request.text or "")
        else:
            assert loaded.render is not None
            tokens = tokenizer.encode(loaded.render(request.messages))
    if not tokens:
        raise OptionError("the prompt is empty; give at least one token")
    return tokens
