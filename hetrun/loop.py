"""What the engine's thread does: take what came in, run a step, hand out what it gave.

Prompts are computed in long passes that stand aside: now and then in the middle of one, a step of the running
answers runs (`_aside`). So prompts keep the speed of large passes, and answers do not stand still meanwhile.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from hetrun.answering import Answering, Ending, logged, tell
from hetrun.entry import Entry, gives_way
from hetrun.errors import Cancelled, ContextFull, DeadlineExceeded, EngineStopped
from hetrun.events import Event, FinishReason
from hetrun.executor import Chunk, Step
from hetrun.inbox import Cancel, Close, Gate, Item, Job, Ready, Request
from hetrun.loaded import Loaded, prompt_tokens
from hetrun.model import Model
from hetrun.pace import STRETCH, Pace
from hetrun.params import SamplingParams
from hetrun.places import Chosen, Places
from hetrun.prepare import Prepared, Preparer
from hetrun.running import Running
from hetrun.sampling import DEFAULT_TEMPERATURE, Constraint, Sampler, make_sampler
from hetrun.scheduler import Shares, share_out, split
from hetrun.textstream import StreamDecoder
from hetrun.waiting import Waiting

LAST = np.zeros(1, np.int64)  # the wanted row of a chunk of one token
NOTHING = np.zeros(0, np.int64)
PROMPT_ROWS = 32 << 20  # bytes of logits that a step may give where every token of a prompt wants its own
FEW = 16  # tokens of prompts that never need a pass of their own
SHORT = 128  # tokens; so short a prompt may be computed beside answers while a long pass stands aside
BESIDE = (64, 32, 16)  # of these so many at a time
ALONE_S = 0.1  # how long that may take where no answer waits for it
LOOK_S = 0.01  # how often a long pass looks whether somebody came


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
        self._displaced: list[Running] = []  # gave up their places
        self._standing: frozenset[int] = frozenset()  # those in a pass that stands aside
        self._later: deque[Item] = deque()  # came while one did, and cannot be done meanwhile
        self._shares = Shares()
        self._pace = Pace(loaded.model)
        self._places = Places(loaded, self._running, self._displaced)
        self._answering = Answering(loaded)
        self._entry = Entry(loaded, self._running, self._displaced, self._waiting)
        self._turn = 0

    def run(self) -> None:
        """Until somebody closes."""
        while self._take():
            self._expire()
            begun = len(self._running)
            self._admit()
            if len(self._running) > begun:
                self._model.expect(sum(r.missing for r in self._running))
            if self._running:
                self._step()
                self._model.tend(idle=not self._running)

    def end(self, reason: EngineStopped) -> None:
        """Say to everybody who waits that nothing comes any more."""
        with self._gate.lock:
            self._gate.stopped = True
        self._preparer.close()
        for r in (*self._running, *self._displaced):  # the model goes as a whole
            tell(r, Event("error", usage=r.usage(), error=reason))
        for w in self._waiting:
            tell(w.asked, Event("error", error=reason))
        while self._later or not self._inbox.empty():
            item = self._later.popleft() if self._later else self._inbox.get()
            if isinstance(item, Request):
                tell(item, Event("error", error=reason))
            elif isinstance(item, Job):
                item.error = reason
                item.done.set()

    # --- what comes in

    def _take(self) -> bool:
        """What came in so far; waits if there is nothing else to do. False: close."""
        while self._later:
            if not self._handle(self._later.popleft()):
                return False
        ready = self._running or self._displaced or any(w.prepared for w in self._waiting)
        # Not until the inbox is empty: others may fill it as fast as it is emptied.
        return all(self._handle(self._inbox.get()) for _ in range(max(self._inbox.qsize(), not ready)))

    def _take_aside(self) -> None:
        """What can be done while a pass stands aside."""
        for _ in range(self._inbox.qsize()):
            item = self._inbox.get()
            if isinstance(item, (Job, Close)) or (isinstance(item, Cancel) and item.id in self._standing):
                self._later.append(item)
            else:
                self._handle(item)

    def _handle(self, item: Item) -> bool:
        match item:
            case Close():
                return False
            case Request():
                self._receive(item)
            case Ready():
                self._ready(item)
            case Cancel():
                self._cancel(item.id)
            case Job():
                self._call(item)
        return True

    def _receive(self, request: Request) -> None:
        waiting = Waiting(request)
        if refusal := self._entry.full():
            last = gives_way(waiting, self._waiting)
            if last is waiting:
                tell(request, Event("error", error=refusal))
                return
            self._refuse(last, refusal)
        self._waiting.append(waiting)
        self._shares.came(waiting.client)
        waiting.preparing = self._preparer.begin(
            request.request, lambda prepared: self._inbox.put(Ready(request.id, prepared))
        )

    def _ready(self, ready: Ready) -> None:
        for w in [w for w in self._waiting if w.id == ready.id]:  # it may have been cancelled
            if isinstance(ready.prepared, Prepared):
                w.prepared = ready.prepared
                if refusal := self._entry.refuse(w):
                    self._refuse(w, refusal)
            else:
                self._refuse(w, ready.prepared)

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
        for r in [r for r in (*self._running, *self._displaced) if r.id == request_id]:
            self._finish(r, "cancelled")
        for w in [w for w in self._waiting if w.id == request_id]:
            self._leave(w)
            tell(w.asked, Event("done", finish_reason="cancelled"))

    def _refuse(self, w: Waiting, error: Exception) -> None:
        self._leave(w)
        tell(w.asked, Event("error", error=logged(error)))

    def _leave(self, w: Waiting) -> None:
        self._waiting.remove(w)
        self._shares.left(w.client)
        if w.preparing:
            w.preparing.cancel()

    def _expire(self) -> None:
        """End what nobody wants any more."""
        now = perf_counter()
        begun = (*self._running, *self._displaced)
        for r in [r for r in begun if _late(r.arrived, r.request.deadline_s, now)]:
            self._fail(r, DeadlineExceeded(f"the answer was not complete within {r.request.deadline_s:g} s"))
        for w in [w for w in self._waiting if _late(w.arrived, w.asked.request.deadline_s, now)]:
            deadline = w.asked.request.deadline_s
            self._refuse(w, DeadlineExceeded(f"the answer had not begun within {deadline:g} s"))

    # --- who gets a place

    def _admit(self) -> None:
        """Give places to those who gave theirs up, then to those who wait."""
        for r in self._shares.ordered(self._displaced):
            if self._full or not self._places.begin(r):
                return
            self._displaced.remove(r)
            self._running.append(r)
        for w in self._shares.ordered([w for w in self._waiting if w.prepared]):
            if self._full or not self._start(w):
                return

    @property
    def _full(self) -> bool:
        return len(self._running) >= self._model.max_sequences

    def _start(self, w: Waiting) -> bool:
        """Begin a request, or refuse it; False: there is no room now."""
        try:
            r = w.running = w.running or self._prepared(w.asked, w.prepared or Prepared())
            if self._places.awaits(r):
                return True  # somebody computes its beginning right now
            if not self._places.begin(r):
                return False
        except Exception as e:
            self._refuse(w, e)
            return True
        self._waiting.remove(w)
        self._entry.began(r, w)
        r.began = perf_counter()
        self._running.append(r)
        return True

    def _prepared(self, asked: Request, prepared: Prepared) -> Running:
        tokens = prompt_tokens(self._loaded, asked.request, prepared.text)
        params = asked.request.params
        params.check_vocabulary(self._model.n_vocab)
        room = self._model.context - len(tokens)
        if room < (params.max_tokens != 0):
            raise ContextFull(
                f"the prompt has {len(tokens)} tokens, but the context holds {self._model.context} with the "
                "answer; shorten it, or ask for more with --ctx"
            )
        return Running(
            id=asked.id,
            request=asked.request,
            on_event=asked.on_event,
            tokens=tokens,
            prompt=np.array(tokens, np.int32),
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            most=most_tokens(params, self._model.n_vocab),
            sampler=self._sampler(params, tokens, prepared.constraint),
            decoder=StreamDecoder(tuple(params.stop)),
            arrived=asked.arrived,
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

    # --- steps

    def _step(self) -> None:
        """Answers and prompts together where answers stay smooth, else prompts in a pass that stands
        aside."""
        answers, prompts = split(self._running)
        prompts = self._shares.ordered(prompts)
        budget = self._model.plans.ubatch
        together = share_out(answers, prompts, budget)
        if not prompts or len(answers) >= budget:
            self._run(together)
        elif answers and self._smooth(answers, together):
            self._run(together)
        elif self._model.stands_aside:
            self._run(share_out((), prompts, budget), self._aside)
        else:
            self._run(self._beside(answers, prompts, budget))

    def _smooth(self, answers: list[Running], together: Chosen) -> bool:
        """Whether a step of answers and prompts is short enough for the answers."""
        if sum(n for _, n in together) <= len(answers) + FEW:
            return True
        joining = [r for r, _ in together[len(answers) :]]
        seconds = self._pace.seconds(together)
        return seconds is not None and seconds <= STRETCH * self._pace.quiet(answers, joining)

    def _beside(self, answers: list[Running], prompts: list[Running], budget: int) -> Chosen:
        """All answers, and as much of prompts as their next tokens can wait for."""
        if not prompts:
            return share_out(answers, (), budget)
        quiet = self._pace.quiet(answers, prompts[:1]) if answers else 0.0
        limit = STRETCH * quiet if answers else ALONE_S
        for n in (budget, *BESIDE) if answers or not self._standing else BESIDE:
            chosen = share_out(answers, prompts, min(budget, len(answers) + n))
            if (self._pace.seconds(chosen) or self._pace.guessed(chosen, quiet)) <= limit:
                return chosen
        return share_out(answers, prompts, min(budget, len(answers) + FEW))

    def _aside(self) -> Callable[[], None]:
        """What is called in the middle of a long pass."""
        due = 0.0

        def between() -> None:
            nonlocal due
            if perf_counter() < due:
                return
            if due:
                self._take_aside()
                self._admit()
                self._short_step()
                if self._gate.must_end:
                    raise Cancelled("one of those in this step was cancelled")
            due = perf_counter() + self._patience()

        return between

    def _patience(self) -> float:
        """How long a pass may go on before it stands aside once more."""
        others = [r for r in self._running if r.id not in self._standing]
        if not others:
            return LOOK_S
        joining = [r for r in self._running if r.id in self._standing]
        return (STRETCH - 1) * self._pace.quiet(others, joining)

    def _short_step(self) -> None:
        """A step of those who are not in the pass that stands aside."""
        answers, prompts = split(r for r in self._running if r.id not in self._standing)
        short = [r for r in self._shares.ordered(prompts) if r.missing <= SHORT]
        if answers or short:
            self._run(self._beside(answers, short, self._model.plans.ubatch))

    def _run(self, chosen: Chosen, aside: Callable[[], Callable[[], None]] | None = None) -> None:
        """One step, and what comes of it."""
        chosen = self._places.make_room(chosen, self._standing)
        ids = frozenset(r.id for r, _ in chosen)
        if not chosen or not self._gate.enter(ids, self._pace.seconds(chosen)):
            return  # who must end is in the inbox
        clock = Clock(self._model)
        outer, self._standing = self._standing, ids if aside else self._standing
        step = Step(tuple([_chunk(r, n) for r, n in chosen]))
        try:
            logits = self._model.step(step, aside() if aside else None)
        except Cancelled:
            return  # the same; the others run again
        except Exception as e:
            for r, _ in chosen:
                self._fail(r, e)
            return
        finally:
            self._standing = outer
            self._gate.leave()
        self._pace.saw(chosen, clock.seconds())
        self._entry.saw(chosen, clock.seconds())
        now, row = perf_counter(), 0
        for (r, n), chunk in zip(chosen, step.chunks, strict=True):
            rows = logits[row : row + len(chunk.wanted)]
            row += len(rows)
            self._turn += 1
            r.turn = self._turn
            r.computed += n
            self._places.saw(r)
            self._shares.gave(r.client, n)
            try:
                ending = self._answering.took(r, n, rows, now)
            except Exception as e:
                self._fail(r, self._answering.explained(e))
            else:
                self._ended(r, ending)
        clock.stop()

    def _ended(self, r: Running, ending: Ending | None) -> None:
        if ending == "gone":
            self._drop(r)
        elif ending:
            self._finish(r, ending)

    def _finish(self, r: Running, reason: FinishReason) -> None:
        self._drop(r)
        if reason != "cancelled":
            self._entry.ended(r)
        self._answering.finish(r, reason)

    def _fail(self, r: Running, error: Exception) -> None:
        self._drop(r, keep=isinstance(error, DeadlineExceeded))
        self._answering.fail(r, error)

    def _drop(self, r: Running, keep: bool = True) -> None:
        """A request gives its place back."""
        if r in self._displaced:
            self._displaced.remove(r)
        else:
            self._places.end(r, keep)  # if that fails, it is still among those who hear that all is over
            self._running.remove(r)
        self._shares.left(r.client)


class Clock:
    """The time of a step, without that of the steps that ran while it stood aside."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stats = model.stats
        self._native = model.native_seconds - self._stats.native_seconds
        self._start = perf_counter() - self._stats.step_seconds

    def seconds(self) -> float:
        """Until now."""
        return perf_counter() - self._stats.step_seconds - self._start

    def stop(self) -> None:
        """Book it."""
        native = self._model.native_seconds - self._stats.native_seconds - self._native
        self._stats.step(self.seconds(), native)


def _late(arrived: float, deadline_s: float | None, now: float) -> bool:
    return deadline_s is not None and now > arrived + deadline_s


def most_tokens(params: SamplingParams, n_vocab: int) -> int:
    """How many tokens of one sequence a step may have."""
    if params.prompt_logprobs is None:
        return sys.maxsize
    return max(PROMPT_ROWS // (4 * n_vocab), 1)


def _chunk(r: Running, n: int) -> Chunk:
    tokens = np.array(r.tokens[r.computed : r.computed + n], np.int64)
    if r.wants_scores:
        return Chunk(r.seq, tokens, np.arange(n))
    if n < r.missing:
        return Chunk(r.seq, tokens, NOTHING)
    return Chunk(r.seq, tokens, LAST if n == 1 else np.array([n - 1], np.int64))
