"""What the engine's thread does: take what came in, run a step, hand out what it gave."""

from __future__ import annotations

import logging
import queue
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from hetrun.backend import Floats
from hetrun.errors import BackendError, Cancelled, ContextFull, EngineStopped, HetrunError
from hetrun.events import Event, FinishReason, TokenLogprob
from hetrun.executor import Chunk, Step
from hetrun.inbox import Cancel, Close, Gate, Item, Job, Ready, Request
from hetrun.loaded import Loaded, prompt_tokens
from hetrun.params import SamplingParams
from hetrun.prepare import Prepared, Preparer
from hetrun.sampling import DEFAULT_TEMPERATURE, Constraint, Sampler, make_sampler, of_prompt
from hetrun.scheduler import Running, schedule
from hetrun.textstream import StreamDecoder

log = logging.getLogger(__name__)

LAST = np.zeros(1, np.int64)  # the wanted row of a chunk of one token
NOTHING = np.zeros(0, np.int64)
PROMPT_ROWS = 32 << 20  # bytes of logits that a step may give where every token of a prompt wants its own


@dataclass(slots=True)
class Waiting:
    """A request without a place; it may take one when it is prepared."""

    id: int
    request: Request
    prepared: Prepared | None = None
    preparing: Future[None] | None = None


class Loop:
    """What the engine thread does: take what came in, run a step, hand out what it gave."""

    def __init__(self, loaded: Loaded, inbox: queue.SimpleQueue[Item], gate: Gate) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._inbox = inbox
        self._gate = gate
        self._preparer = Preparer(loaded.render, loaded.tokenizer)
        self._waiting: list[Waiting] = []
        self._running: list[Running] = []
        self._turn = 0

    def run(self) -> None:
        """Until somebody closes."""
        while self._take():
            self._admit()
            if self._running:
                self._step()
                self._model.tend(idle=not self._running)

    def end(self, reason: EngineStopped) -> None:
        """Say to everybody who waits that nothing comes any more."""
        with self._gate.lock:
            self._gate.stopped = True
        self._preparer.close()
        for r in self._running:  # the model goes as a whole
            self._tell(r, Event("error", usage=r.usage(), error=reason))
        for w in self._waiting:
            self._tell(w.request, Event("error", error=reason))
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Request):
                self._tell(item, Event("error", error=reason))
            elif isinstance(item, Job):
                item.error = reason
                item.done.set()

    def _take(self) -> bool:
        """What came in so far; waits if there is nothing else to do. False: close."""
        idle = not self._running and not any(w.prepared for w in self._waiting)
        # Not until the inbox is empty: others may fill it as fast as it is emptied.
        for _ in range(max(self._inbox.qsize(), idle)):
            item = self._inbox.get()
            if isinstance(item, Close):
                return False
            if isinstance(item, Request):
                self._receive(item)
            elif isinstance(item, Ready):
                self._ready(item)
            elif isinstance(item, Cancel):
                self._cancel(item.id)
            else:
                self._call(item)
        return True

    def _receive(self, request: Request) -> None:
        waiting = Waiting(request.id, request)
        self._waiting.append(waiting)
        waiting.preparing = self._preparer.begin(
            request.request, lambda prepared: self._inbox.put(Ready(request.id, prepared))
        )

    def _ready(self, ready: Ready) -> None:
        for w in [w for w in self._waiting if w.id == ready.id]:  # it may have been cancelled
            if isinstance(ready.prepared, Prepared):
                w.prepared = ready.prepared
            else:
                self._waiting.remove(w)
                self._tell(w.request, Event("error", error=logged(ready.prepared)))

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
            if w.preparing:
                w.preparing.cancel()
            self._tell(w.request, Event("done", finish_reason="cancelled"))

    def _admit(self) -> None:
        """Give requests that are prepared a place, in order of arrival."""
        begun = len(self._running)
        for w in [w for w in self._waiting if w.prepared]:
            if len(self._running) == self._model.max_sequences:
                break
            self._waiting.remove(w)
            try:
                self._running.append(self._begin(w.request, w.prepared or Prepared()))
            except Exception as e:
                self._tell(w.request, Event("error", error=logged(e)))
        if len(self._running) > begun:
            self._model.expect(sum(r.missing for r in self._running))

    def _begin(self, r: Request, prepared: Prepared) -> Running:
        tokens = prompt_tokens(self._loaded, r.request, prepared.text)
        params = r.request.params
        params.check_vocabulary(self._model.n_vocab)
        room = self._model.context - len(tokens)
        if room < (params.max_tokens != 0):
            raise ContextFull(
                f"the prompt has {len(tokens)} tokens, but the context holds {self._model.context} with the "
                "answer; shorten it, or ask for more with --ctx"
            )
        return Running(
            id=r.id,
            request=r.request,
            on_event=r.on_event,
            tokens=tokens,
            n_prompt=len(tokens),
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            most=most_tokens(params, self._model.n_vocab),
            sampler=self._sampler(params, tokens, prepared.constraint),
            decoder=StreamDecoder(tuple(params.stop)),
            arrived=r.arrived,
            began=perf_counter(),
            seq=self._model.alloc(),
        )

    def _sampler(self, params: SamplingParams, prompt: list[int], constraint: Constraint | None) -> Sampler:
        own, tokenizer = self._loaded.temperature, self._loaded.tokenizer
        return make_sampler(
            params,
            DEFAULT_TEMPERATURE if own is None else own,
            prompt=prompt,
            context=self._model.context,
            pieces=tokenizer.pieces if tokenizer else None,
            encode=tokenizer.encode_plain if tokenizer else None,
            constraint=constraint,
        )

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
        for (r, n), chunk in zip(chosen, step.chunks, strict=True):
            rows = logits[row : row + len(chunk.wanted)]
            row += len(rows)
            self._turn += 1
            r.turn = self._turn
            r.computed += n
            try:
                self._took(r, n, rows, now)
            except Exception as e:
                self._fail(r, logged(self._explained(e)))
        self._model.stats.step(perf_counter() - start, self._model.native_seconds - native)

    def _took(self, r: Running, n: int, rows: Floats, now: float) -> None:
        """A step has seen n more tokens of a sequence."""
        if r.scored and r.computed - n < r.n_prompt and not self._tell(r, self._scores(r, n, rows)):
            self._drop(r)
        elif not r.missing and not r.limit:
            self._finish(r, "length")
        elif not r.missing:
            self._next(r, rows[-1], now)

    def _scores(self, r: Running, n: int, rows: Floats) -> Event:
        """How probable the prompt's own tokens were behind each other."""
        followed = r.tokens[r.computed - n + 1 : min(r.computed + 1, r.n_prompt)]
        top = r.request.params.prompt_logprobs or 0
        found = of_prompt(rows[: len(followed)], followed, top) if followed else []
        scores = (self._logprob(token, *score) for token, score in zip(followed, found, strict=True))
        return Event("prompt", prompt_logprobs=tuple(scores))

    def _next(self, r: Running, logits: Floats, now: float) -> None:
        """Take the next token of a sequence and say so; end it where it ends."""
        r.first, r.last = r.first or now, now
        event = self._choose(r, logits)
        if event is None:
            self._finish(r, "stop")
        elif not self._tell(r, event):
            self._drop(r)
        elif r.decoder.stopped is not None or r.sampler.finished:
            self._finish(r, "stop")
        elif r.generated >= r.limit:
            self._finish(r, "length")

    def _explained(self, error: Exception) -> Exception:
        """Logits that are no numbers come from weights that are none, mostly."""
        return (isinstance(error, BackendError) and self._loaded.diagnose()) or error

    def _choose(self, r: Running, logits: Floats) -> Event | None:
        """The next token; None where the model says that it has finished."""
        choice, tokenizer = r.sampler.sample(logits), self._loaded.tokenizer
        r.sampler.accept(choice.token)
        if tokenizer and not r.request.params.ignore_eos and tokenizer.is_end(choice.token):
            return None
        text = r.decoder.push(tokenizer.piece(choice.token)) if tokenizer else ""
        r.tokens.append(choice.token)
        score = None if choice.logprob is None else self._logprob(choice.token, choice.logprob, choice.top)
        return Event("token", text, choice.token, score)

    def _logprob(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob:
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            return TokenLogprob(token, logprob, top)
        pieces = tuple(tokenizer.piece(t) for t, _ in top)
        return TokenLogprob(token, logprob, top, tokenizer.piece(token), pieces)

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


def most_tokens(params: SamplingParams, n_vocab: int) -> int:
    """How many tokens of one sequence a step may have."""
    if params.prompt_logprobs is None:
        return sys.maxsize
    return max(PROMPT_ROWS // (4 * n_vocab), 1)


def _chunk(r: Running, n: int) -> Chunk:
    tokens = np.array(r.tokens[r.computed : r.computed + n], np.int64)
    if r.scored and r.computed < r.n_prompt:
        return Chunk(r.seq, tokens, np.arange(n))
    if n < r.missing:
        return Chunk(r.seq, tokens, NOTHING)
    return Chunk(r.seq, tokens, LAST if n == 1 else np.array([n - 1], np.int64))
