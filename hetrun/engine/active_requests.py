"""The requests that are not over: those that wait, that run, and that gave their places up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from hetrun.client.events import Event, FinishReason
from hetrun.engine.admission_gate import AdmissionGate, gives_way
from hetrun.engine.inbox import Ready
from hetrun.engine.input_processor import PreparedInput, Preparer
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.output_processor import OutputProcessor, logged, tell
from hetrun.engine.request import ActiveRequest
from hetrun.engine.request_setup import set_up
from hetrun.engine.scheduler import Shares
from hetrun.engine.slot_manager import SlotManager
from hetrun.engine.speculation.speculator import Speculator
from hetrun.errors import DeadlineExceeded, EngineStopped, OptionError

log = logging.getLogger(__name__)


class ActiveRequests:
    """Receives requests, gives them places, and ends them; on the engine's thread."""

    def __init__(
        self, loaded: LoadedModel, preparer: Preparer, answering: OutputProcessor, speculating: Speculator
    ) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._pictures = loaded.pictures
        self._slots = loaded.slots
        self._preparer = preparer
        self._answering = answering
        self._speculating = speculating
        self.waiting: list[ActiveRequest] = []
        self.running: list[ActiveRequest] = []
        self.displaced: list[ActiveRequest] = []  # gave up their places
        self.shares = Shares()
        self.places = SlotManager(loaded, self.running, self.displaced)
        self.newcomers = False  # some began since this was last reset
        self._entry = AdmissionGate(loaded, self.running, self.displaced, self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a request can go on, or may be given a place."""
        return bool(self.running or self.displaced or any(w.prepared for w in self.waiting))

    @property
    def missing(self) -> int:
        """Tokens of the running requests that the model has not seen yet."""
        return sum(r.missing for r in self.running)

    def snapshot(self) -> tuple[list[ActiveRequest], list[ActiveRequest], list[ActiveRequest]]:
        """Those that run, that gave up their places, and that wait; from any thread."""
        return self.running.copy(), self.displaced.copy(), self.waiting.copy()

    # --- how they come

    def receive(self, new: ActiveRequest, put: Callable[[Ready], None]) -> None:
        """Let a new request wait, and prepare it; `put`, called by another thread, gets what came of that."""
        if refusal := self._entry.full():
            last = gives_way(new, self.waiting)
            if last is new:
                tell(new, Event("error", error=refusal))
                return
            self._refuse(last, refusal)
        if new.request.pictures and self._pictures is None:
            tell(new, Event("error", error=OptionError(self._loaded.no_pictures)))
            return
        self.waiting.append(new)
        self.shares.came(new.client)
        new.preparing = self._preparer.begin(new.request, lambda prepared: put(Ready(new.id, prepared)))

    def take_prepared(self, ready: Ready) -> None:
        """A waiting request is prepared, or cannot be."""
        for w in [w for w in self.waiting if w.id == ready.id]:  # it may have been cancelled
            if isinstance(ready.prepared, PreparedInput):
                w.prepared = ready.prepared
                if refusal := self._entry.refuse(w):
                    self._refuse(w, refusal)
            else:
                self._refuse(w, ready.prepared)

    # --- how they get a place

    def admit(self) -> None:
        """Give places to preempted requests, then to waiting ones."""
        for r in self.shares.ordered(self.displaced):
            try:
                if self._is_full or not self.places.begin(r):
                    return
            except Exception as e:
                self.fail(r, e)
            else:
                self.displaced.remove(r)
                self.running.append(r)
        for w in self.shares.ordered([w for w in self.waiting if w.prepared]):
            if self._is_full or not self._start(w):
                return

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self._model.max_sequences

    def _start(self, r: ActiveRequest) -> bool:
        """Begin a request, or refuse it; False: there is no room now."""
        try:
            if not r.is_set_up:
                set_up(self._loaded, r)
            if self.places.awaits(r):
                return True  # another request computes its prefix right now
            if self._slots.is_taken(self._wanted(r)):
                return True  # it waits for this place
            if not self.places.begin(r):
                return False
        except Exception as e:
            self._refuse(r, e)
            return True
        self.waiting.remove(r)
        self._entry.began(r)
        r.preparing = r.prepared = None  # a long text is not held twice
        r.began = perf_counter()
        r.slot = self._slots.take(r.id, self._wanted(r))
        self.running.append(r)
        if self._pictures and r.spans:
            self._pictures.reused(sum(span.end <= r.computed or self._pictures.has(span) for span in r.spans))
        self.newcomers = True
        self._answering.began(r)
        return True

    def _wanted(self, r: ActiveRequest) -> int | None:
        """The place that a request asks for, if there is such a one."""
        slot = r.request.slot
        return slot if slot is not None and slot < self._model.max_sequences else None

    # --- how they end

    def cancel(self, request_id: int) -> None:
        """End a request, if it is not over, because its client does not want it any more."""
        for r in [r for r in (*self.running, *self.displaced) if r.id == request_id]:
            self.finish(r, "cancelled")
        for w in [w for w in self.waiting if w.id == request_id]:
            self._leave(w)
            tell(w, Event("done", finish_reason="cancelled"))

    def expire(self) -> None:
        """End requests whose deadline is over."""
        now = perf_counter()
        begun = (*self.running, *self.displaced)
        for r in [r for r in begun if r.is_late(now)]:
            self.fail(r, DeadlineExceeded(f"the answer was not complete within {r.request.deadline_s:g} s"))
        for w in [w for w in self.waiting if w.is_late(now)]:
            self._refuse(w, DeadlineExceeded(f"the answer had not begun within {w.request.deadline_s:g} s"))

    def finish(self, r: ActiveRequest, reason: FinishReason) -> None:
        """End a request whose answer is complete, or that was cancelled."""
        self.drop(r)
        if reason != "cancelled":
            self._entry.ended(r)
        self._answering.finish(r, reason)

    def fail(self, r: ActiveRequest, error: Exception) -> None:
        """End a request with an error."""
        self.drop(r, keep=isinstance(error, DeadlineExceeded))
        self._answering.fail(r, error)

    def drop(self, r: ActiveRequest, keep: bool = True) -> None:
        """Take a request's place back. `keep`: the prefix cache gets what was computed."""
        if r in self.displaced:
            self.displaced.remove(r)
        else:
            self._speculating.ended(r)
            self.places.end(r, keep)  # if that fails, it is still among those who hear that all is over
            self.running.remove(r)
        self._slots.left(r.slot, r.tokens[: r.computed] if keep and not r.pooled else ())
        self.shares.left(r.client)

    def _refuse(self, w: ActiveRequest, error: Exception) -> None:
        self._leave(w)
        tell(w, Event("error", error=logged(error)))

    def _leave(self, w: ActiveRequest) -> None:
        self.waiting.remove(w)
        self.shares.left(w.client)
        if w.preparing:
            w.preparing.cancel()

    # --- when the engine ends

    def keep(self) -> None:
        """Give what the running requests have computed to the prefix cache, for the next process."""
        for r in self.running:
            try:
                self.places.end(r)
            except Exception:
                log.exception("the tokens of request %d could not be added to the prefix cache", r.id)

    def abort(self, reason: EngineStopped) -> None:
        """Tell all requests that nothing comes any more. Their places stay: the model goes as a whole."""
        for r in (*self.running, *self.displaced):
            tell(r, Event("error", usage=r.usage(), error=reason))
        for w in self.waiting:
            tell(w, Event("error", error=reason))
