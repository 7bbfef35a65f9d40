"""What the engine's thread does: take what came in, run a step, hand out what it gave.

Prompts are computed in long passes that stand aside: now and then in the middle of one, a step of the running
answers runs (`_between`). So prompts keep the speed of large passes, and answers do not stand still.
"""

from __future__ import annotations

import queue
from time import perf_counter

from hetrun.backend import Rows
from hetrun.client.events import Event
from hetrun.engine.active_requests import ActiveRequests
from hetrun.engine.batching import BatchComposer, LongPass
from hetrun.engine.cancellation import Gate
from hetrun.engine.inbox import Cancel, Close, EngineCalls, InboxReader, Item, Job, Ready
from hetrun.engine.input_processor import Preparer
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.output_processor import Ending, OutputProcessor, tell, together
from hetrun.engine.picture_turns import PictureTurns
from hetrun.engine.request import ActiveRequest, Chosen, Drafts
from hetrun.engine.speculation.speculator import Speculator
from hetrun.engine.step_time import Clock, shape_of
from hetrun.engine.upkeep import ModelUpkeep
from hetrun.errors import Cancelled, DeviceLost, EngineStopped
from hetrun.executor.interface import look
from hetrun.executor.steps import Step


class Loop:
    """What the engine thread does: take what came in, run a step, hand out what it gave."""

    def __init__(self, loaded: LoadedModel, inbox: queue.SimpleQueue[Item], gate: Gate) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._inbox = InboxReader(inbox)
        self._gate = gate
        self._preparer = Preparer(
            loaded.render, loaded.tokenizer, loaded.grammars, loaded.pictures, EngineCalls(inbox, gate)
        )
        self._times = loaded.times
        self._answering = OutputProcessor(loaded)
        self._speculating = Speculator(loaded.model, loaded.speculation, self._times)
        self.requests = ActiveRequests(loaded, self._preparer, self._answering, self._speculating)
        self._mixing = BatchComposer(loaded.model, self.requests.shares, self._times)
        self._long_pass = LongPass(self._mixing, self.requests.running)
        self._pictures = PictureTurns(loaded.pictures, self.requests, gate)
        self._upkeep = ModelUpkeep(loaded.model, loaded.pictures)
        look(self._model)
        self._turn = 0

    def run(self) -> None:
        """Until it is closed."""
        while self._take():
            self.requests.expire()
            self.requests.admit()
            while self.requests.newcomers:  # others may come meanwhile
                self.requests.newcomers = False
                self._upkeep.expect(self.requests.missing, self._between)
            self._pictures.encode_next()
            if ready := self._pictures.ready():
                chosen, alone = self._mixing.next(ready)
                self._run(chosen, stands_aside=alone)
                self._upkeep.tend(idle=not self.requests.running, stood_aside=alone, between=self._between)

    def end(self, reason: EngineStopped) -> None:
        """Tell all waiting requests that nothing comes any more."""
        with self._gate.lock:
            self._gate.stopped = True
        self._preparer.close()
        self.requests.abort(reason)
        self._inbox.abort(lambda request: tell(request, Event("error", error=reason)), reason)

    # --- what comes in

    def _take(self) -> bool:
        """Handle what came in so far; wait if there is nothing else to do. False: close."""
        if not self._inbox.read_deferred(self._handle):
            return False
        if self._is_idle() and not self._inbox.has_arrivals:
            return self._upkeep.wait(self._inbox, self._handle, self._is_idle, self._between)
        return self._inbox.read(self._handle)

    def _is_idle(self) -> bool:
        """Whether there is nothing to do until something comes in."""
        return not self.requests.has_work and not self._inbox.has_deferred

    def _handle(self, item: Item) -> bool:
        match item:
            case Close():
                return False
            case ActiveRequest():
                self.requests.receive(item, self._inbox.put)
            case Ready():
                self.requests.take_prepared(item)
            case Cancel():
                self._gate.forget(item.id)
                self.requests.cancel(item.id)
            case Job():
                item.run(self._loaded, self._gate)
        return True

    # --- steps

    def _between(self) -> None:
        """Called in the middle of a long pass, and of what else takes long."""
        if not self._long_pass.is_due:
            return
        self._inbox.read_aside(self._handle, self._long_pass.ids)
        self.requests.admit()
        self._run(self._mixing.beside(self._pictures.ready(), self._long_pass.ids))
        if self._gate.must_end:
            raise Cancelled("a request in this step was cancelled")
        self._long_pass.resume()

    def _run(self, chosen: Chosen, stands_aside: bool = False) -> None:
        """One step, and what comes of it."""
        chosen = self.requests.places.make_room(chosen, self._long_pass.ids)
        chosen, drafts = self._speculating.add(chosen)
        ids = frozenset(r.id for r, _ in chosen)
        shape = shape_of(chosen, sum(map(len, drafts.values())))
        if not chosen or not self._gate.enter(ids, self._times.foreseen(shape)):
            return  # who must end is in the inbox
        clock = Clock(self._model)
        outer = self._long_pass.ids
        if stands_aside:
            self._long_pass.begin(ids)
        chunks = tuple([r.chunk(n, drafts.get(r.id, ()), self._loaded.pictures) for r, n in chosen])
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
                self.requests.fail(r, e)
            return
        finally:
            self._long_pass.ids = outer
            self._gate.leave()
        seconds = clock.seconds()
        first = self._speculating.compiled(chosen, drafts, seconds)
        # Plans change, and what was compiled for them goes: then a step with drafts says nothing of the next.
        if not first and not (drafts and clock.compiling):
            self._times.observe(shape, seconds)
        if not stands_aside:
            self._long_pass.mark_answered()
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
                self.requests.fail(r, self._answering.explained(e))
                continue
            if chunk.hidden:
                first = before + len(chunk.tokens) - chunk.hidden
                self._speculating.observe(r, first, self._model.hidden[seen - chunk.hidden : seen])
            self.requests.places.observe(r)
            self.requests.shares.gave(r.client, r.computed - before)
            given += r.computed - before
            self._ended(r, ending)
        return given or 1

    def _ended(self, r: ActiveRequest, ending: Ending | None) -> None:
        if ending == "gone":
            self.requests.drop(r)
        elif ending == "full":
            self._speculating.ended(r)
            self.requests.places.shift(r)
        elif ending:
            self.requests.finish(r, ending)
