"""What the engine's thread does: take what came in, run a step, hand out what it gave.

Prompts are computed in long passes that stand aside: now and then in the middle of one, a step of the running
answers runs (`_between`). So prompts keep the speed of large passes, and answers do not stand still.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

from hetrun.backend import Rows
from hetrun.client.events import Event, FinishReason
from hetrun.engine.admission_gate import Entry, gives_way
from hetrun.engine.batching import Mixing
from hetrun.engine.cancellation import Gate
from hetrun.engine.inbox import Aside, Cancel, Close, Item, Job, Ready, Request
from hetrun.engine.input_processor import Prepared, Preparer
from hetrun.engine.loaded_model import Loaded
from hetrun.engine.output_processor import Answering, Ending, logged, tell, together
from hetrun.engine.pictures.marks import Span
from hetrun.engine.pictures.store import PictureStore
from hetrun.engine.scheduler import Shares
from hetrun.engine.sequence import Chosen, Drafts, Running
from hetrun.engine.sequence_factory import begun
from hetrun.engine.slot_manager import Places
from hetrun.engine.speculation.speculator import Speculating
from hetrun.engine.step_time import Clock, shape_of
from hetrun.engine.waiting_request import Waiting, is_late
from hetrun.errors import Cancelled, DeadlineExceeded, DeviceLost, EngineStopped, OptionError
from hetrun.executor.interface import Model, look
from hetrun.executor.steps import Step

log = logging.getLogger(__name__)

R = TypeVar("R")

SETTLED_S = 0.05  # without work: no further request was about to come
TENDED_S = 5.0  # between two looks after the model, while long passes run
REST_S = 2.0  # without work
LOOK_S = 0.5  # between two looks after the model, while there is work now and then


class Loop:
    """What the engine thread does: take what came in, run a step, hand out what it gave."""

    def __init__(self, loaded: Loaded, inbox: queue.SimpleQueue[Item], gate: Gate) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._inbox = inbox
        self._gate = gate
        self._pictures = loaded.pictures
        self._preparer = Preparer(
            loaded.render, loaded.tokenizer, loaded.grammars, loaded.pictures, self._on_engine
        )
        self._waiting: list[Waiting] = []
        self._running: list[Running] = []
        self._displaced: list[Running] = []  # gave up their places
        self._standing: frozenset[int] = frozenset()  # those in a pass that stands aside
        self._later: deque[Item] = deque()  # came while one did, and cannot be done meanwhile
        self._shares = Shares()
        self._times = loaded.times
        self._mixing = Mixing(loaded.model, self._shares, self._times)
        self._places = Places(loaded, self._running, self._displaced)
        self._slots = loaded.slots
        self._answering = Answering(loaded)
        self._speculating = Speculating(loaded.model, loaded.speculation, self._times)
        self._entry = Entry(loaded, self._running, self._displaced, self._waiting)
        look(self._model)
        self._turn = 0
        self._jobs = count(-1, -1)  # numbers of jobs of its own, which no other item has
        self._tended = 0.0
        self._newcomers = False  # since the model last heard what to expect
        self._answered = 0.0  # when answers last had a step
        self._due = 0.0  # when what takes long is to stand aside

    def run(self) -> None:
        """Until it is closed."""
        while self._take():
            self._expire()
            self._admit()
            while self._newcomers:  # others may come meanwhile
                self._newcomers = False
                self._look_after(lambda model, between: model.expect(self._missing, between))
            self._see()
            if ready := self._ready_ones():
                chosen, alone = self._mixing.next(ready)
                self._run(chosen, stands_aside=alone)
                self._tend(stood_aside=alone)

    def _tend(self, stood_aside: bool) -> None:
        """Look after the model between two steps. Nothing may wait for that: no answer that is due after a
        pass that stood aside, nor, when nothing runs, the next request."""
        idle = not self._running
        rest = TENDED_S if stood_aside else LOOK_S if idle else 0.0
        if perf_counter() > self._tended + rest:
            self._look_after(lambda model, between: model.tend(idle, between))
            if self._pictures:
                self._pictures.rest()
            self._tended = perf_counter()

    def _look_after(self, work: Callable[[Model, Callable[[], None]], None]) -> None:
        """Let the model prepare for what comes. Where that takes long, it stands aside."""
        try:
            work(self._model, self._between)
        except Cancelled:
            pass  # all is stopped, as the inbox says

    @property
    def _missing(self) -> int:
        return sum(r.missing for r in self._running)

    def keep(self) -> None:
        """The model is closed in order: what those who run have computed may be of use to the next one."""
        for r in self._running:
            try:
                self._places.end(r)
            except Exception:
                log.exception("the tokens of request %d could not be added to the prefix cache", r.id)

    def end(self, reason: EngineStopped) -> None:
        """Tell all waiting requests that nothing comes any more."""
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

    @property
    def requests(self) -> tuple[list[Running], list[Running], list[Waiting]]:
        """Those that run, that gave up their places, and that wait; from any thread."""
        return self._running.copy(), self._displaced.copy(), self._waiting.copy()

    # --- what comes in

    def _take(self) -> bool:
        """What came in so far; waits if there is nothing else to do. False: close."""
        while self._later:
            if not self._handle(self._later.popleft()):
                return False
        if self._idle and self._inbox.empty():
            return self._wait()
        # Not until the inbox is empty: others may fill it as fast as it is emptied.
        return all(self._handle(self._inbox.get()) for _ in range(self._inbox.qsize()))

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to do until something comes in."""
        begun = self._running or self._displaced or any(w.prepared for w in self._waiting)
        return not begun and not self._later

    def _wait(self) -> bool:
        """For the next thing that comes in; meanwhile the model is looked after, and in the end memory given
        back. False: close."""
        try:
            return self._handle(self._inbox.get(timeout=SETTLED_S))
        except queue.Empty:
            self._look_after(lambda model, between: model.tend(True, between))
        if not self._idle:
            return True  # something came meanwhile
        try:
            return self._handle(self._inbox.get(timeout=REST_S))
        except queue.Empty:
            self._model.rest()
        try:
            return self._handle(self._inbox.get(timeout=self._pictures.rest() if self._pictures else None))
        except queue.Empty:
            return True  # the encoder goes when it has not been needed for long enough

    def _take_aside(self) -> None:
        """What can be done while a pass stands aside."""
        for _ in range(self._inbox.qsize()):
            item = self._inbox.get()
            busy = isinstance(item, (Job, Close)) and not isinstance(item, Aside)
            if busy or (isinstance(item, Cancel) and item.id in self._standing):
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
        if request.request.pictures and self._pictures is None:
            tell(request, Event("error", error=OptionError(self._loaded.no_pictures)))
            return
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
            job.error = EngineStopped("the model was closed before this request was processed")
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
        """End requests that are not wanted any more."""
        now = perf_counter()
        begun = (*self._running, *self._displaced)
        for r in [r for r in begun if is_late(r.arrived, r.request, now)]:
            self._fail(r, DeadlineExceeded(f"the answer was not complete within {r.request.deadline_s:g} s"))
        for w in [w for w in self._waiting if is_late(w.arrived, w.asked.request, now)]:
            deadline = w.asked.request.deadline_s
            self._refuse(w, DeadlineExceeded(f"the answer had not begun within {deadline:g} s"))

    # --- who gets a place

    def _admit(self) -> None:
        """Give places to preempted requests, then to waiting ones."""
        for r in self._shares.ordered(self._displaced):
            try:
                if self._full or not self._places.begin(r):
                    return
            except Exception as e:
                self._fail(r, e)
            else:
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
            r = w.running = w.running or begun(self._loaded, w.asked, w.prepared or Prepared())
            if self._places.awaits(r):
                return True  # another request computes its prefix right now
            if self._slots.is_taken(self._wanted(r)):
                return True  # it waits for this place
            if not self._places.begin(r):
                return False
        except Exception as e:
            self._refuse(w, e)
            return True
        self._waiting.remove(w)
        self._entry.began(r, w)
        r.began = perf_counter()
        r.slot = self._slots.take(r.id, self._wanted(r))
        self._running.append(r)
        if self._pictures and r.spans:
            self._pictures.reused(sum(span.end <= r.computed or self._pictures.has(span) for span in r.spans))
        self._newcomers = True
        self._answering.began(r)
        return True

    def _wanted(self, r: Running) -> int | None:
        """The place that a request asks for, if there is such a one."""
        slot = r.request.slot
        return slot if slot is not None and slot < self._model.max_sequences else None

    # --- pictures

    def _on_engine(self, work: Callable[[], R]) -> R:
        """Call a function on the engine's thread, between two steps, and wait; called by another thread."""
        job = Job(next(self._jobs), lambda _: work())
        with self._gate.lock:  # so that nothing comes in after the thread's last look
            if self._gate.stopped:
                raise EngineStopped("the model was closed before the pictures were read")
            self._inbox.put(job)
        job.done.wait()
        if job.error:
            raise job.error
        return job.result  # type: ignore[return-value]  # set when there is no error

    def _ready_ones(self) -> list[Running]:
        """Those whose next tokens can be computed: the rows of a picture have to be there."""
        if (pictures := self._pictures) is None:
            return self._running
        return [r for r in self._running if (span := r.picture) is None or pictures.has(span)]

    def _see(self) -> None:
        """Encode the picture that is next. There is one call for each, in which nothing else runs."""
        pictures = self._pictures
        if pictures is None or not any([r.spans for r in self._running]):
            return
        for r in self._shares.ordered(self._running):
            if (span := r.picture) and not pictures.has(span):
                self._encode(pictures, r, span)
                return

    def _encode(self, pictures: PictureStore, r: Running, span: Span) -> None:
        if not self._gate.enter(frozenset((r.id,)), pictures.expected_s(span.rows.count), "a picture"):
            return  # a cancel is in the inbox
        start = perf_counter()
        try:
            pictures.encode(span, r.request.pictures[span.picture])
        except Cancelled:
            return
        except Exception as e:
            self._fail(r, e)
        finally:
            self._gate.leave()
        r.picture_s += perf_counter() - start

    # --- steps

    def _between(self) -> None:
        """Called in the middle of a long pass, and of what else takes long."""
        if perf_counter() < self._due:
            return
        self._take_aside()
        self._admit()
        self._run(self._mixing.beside(self._ready_ones(), self._standing))
        if self._gate.must_end:
            raise Cancelled("a request in this step was cancelled")
        self._due = perf_counter() + self._mixing.patience(self._running, self._standing)

    def _run(self, chosen: Chosen, stands_aside: bool = False) -> None:
        """One step, and what comes of it."""
        chosen = self._places.make_room(chosen, self._standing)
        chosen, drafts = self._speculating.add(chosen)
        ids = frozenset(r.id for r, _ in chosen)
        shape = shape_of(chosen, sum(map(len, drafts.values())))
        if not chosen or not self._gate.enter(ids, self._times.foreseen(shape)):
            return  # who must end is in the inbox
        clock = Clock(self._model)
        outer = self._standing
        if stands_aside:
            self._standing = ids
            self._due = self._answered + self._mixing.patience(self._running, ids)
        chunks = tuple([r.chunk(n, drafts.get(r.id, ()), self._pictures) for r, n in chosen])
        step = Step(chunks, shape.drafted, hidden=any(r.pooled for r, _ in chosen))
        try:
            between = self._between if stands_aside else None
            logits = self._answering.rows(step, [r for r, _ in chosen], between)
        except Cancelled:
            return  # the same; the others run again
        except DeviceLost:
            raise  # nothing else runs here, either: the next process tries again
        except Exception as e:
            for r, _ in chosen:
                self._fail(r, e)
            return
        finally:
            self._standing = outer
            self._gate.leave()
        seconds = clock.seconds()
        first = self._speculating.compiled(chosen, drafts, seconds)
        # Plans change, and what was compiled for them goes: then a step with drafts says nothing of the next.
        if not first and not (drafts and clock.compiling):
            self._times.saw(shape, seconds)
        self._answered = self._answered if stands_aside else perf_counter()
        given = self._take_rows(chosen, drafts, step, logits)
        if drafts:
            self._speculating.took(given - len(chosen))
            self._model.stats.accepted += given - len(chosen)
            self._times.gave(shape, seconds, given)
        look(self._model)
        clock.stop()

    def _take_rows(self, chosen: Chosen, drafts: Drafts, step: Step, logits: Rows) -> int:
        """What a step gave: tokens to those in it. How many of theirs the model has seen for good by it."""
        now, row, given, seen = perf_counter(), 0, 0, 0
        choices = together([r for r, _ in chosen], step, drafts, logits)
        for (r, n), chunk, mine in zip(chosen, step.chunks, choices, strict=True):
            rows = logits[row : row + len(chunk.wanted)]
            row += len(rows)
            self._turn += 1
            r.turn = self._turn
            before, draft = r.computed, drafts.get(r.id, ())
            seen += len(chunk.shown) if chunk.hidden else 0
            r.computed += n
            r.drafted += len(draft)
            self._answering.progressed(r, n, now)
            try:
                ending = self._answering.took(r, n, rows, now, mine, draft)
                if draft:
                    r.computed = self._model.truncate(r.seq, r.computed)
            except Exception as e:
                self._fail(r, self._answering.explained(e))
                continue
            if chunk.hidden:
                first = before + len(chunk.tokens) - chunk.hidden
                self._speculating.saw(r, first, self._model.hidden[seen - chunk.hidden : seen])
            self._places.saw(r)
            self._shares.gave(r.client, r.computed - before)
            given += r.computed - before
            self._ended(r, ending)
        return given or 1

    def _ended(self, r: Running, ending: Ending | None) -> None:
        if ending == "gone":
            self._drop(r)
        elif ending == "full":
            self._speculating.ended(r)
            self._places.shift(r)
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
            self._speculating.ended(r)
            self._places.end(r, keep)  # if that fails, it is still among those who hear that all is over
            self._running.remove(r)
        self._slots.left(r.slot, r.tokens[: r.computed] if keep and not r.pooled else ())
        self._shares.left(r.client)
