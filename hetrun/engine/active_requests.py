"""The requests that are not over: those that wait, that run, and that gave their places up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from hetrun.client.events import Event, FinishReason
from hetrun.engine.admission_gate import AdmissionGate, WaitingRequest, gives_way, is_late
from hetrun.engine.inbox import Ready, Request
from hetrun.engine.input_processor import PreparedRequest, Preparer
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.output_processor import OutputProcessor, logged, tell
from hetrun.engine.scheduler import Shares
from hetrun.engine.sequence import RunningRequest
from hetrun.engine.sequence_factory import begun
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
        self.waiting: list[WaitingRequest] = []
        self.running: list[RunningRequest] = []
        self.displaced: list[RunningRequest] = []  # gave up their places
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

    def snapshot(self) -> tuple[list[RunningRequest], list[RunningRequest], list[WaitingRequest]]:
        """Those that run, that gave up their places, and that wait; from any thread."""
        return self.running.copy(), self.displaced.copy(), self.waiting.copy()

    # --- how they come

    def receive(self, request: Request, put: Callable[[Ready], None]) -> None:
        """Let a new request wait, and prepare it; `put`, called by another thread, gets what came of that."""
        waiting = WaitingRequest(request)
        if refusal := self._entry.full():
            last = gives_way(waiting, self.waiting)
            if last is waiting:
                tell(request, Event("error", error=refusal))
                return
            self._refuse(last, refusal)
        if request.request.pictures and self._pictures is None:
            tell(request, Event("error", error=OptionError(self._loaded.no_pictures)))
            return
        self.waiting.append(waiting)
        self.shares.came(waiting.client)
        waiting.preparing = self._preparer.begin(
            request.request, lambda prepared: put(Ready(request.id, prepared))
        )

    def take_prepared(self, ready: Ready) -> None:
        """A waiting request is prepared, or cannot be."""
        for w in [w for w in self.waiting if w.id == ready.id]:  # it may have been cancelled
            if isinstance(ready.prepared, PreparedRequest):
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

    def _start(self, w: WaitingRequest) -> bool:
        """Begin a request, or refuse it; False: there is no room now."""
        try:
            r = w.running = w.running or begun(self._loaded, w.asked, w.prepared or PreparedRequest())
            if self.places.awaits(r):
                return True  # another request computes its prefix right now
            if self._slots.is_taken(self._wanted(r)):
                return True  # it waits for this place
            if not self.places.begin(r):
                return False
        except Exception as e:
            self._refuse(w, e)
            return True
        self.waiting.remove(w)
        self._entry.began(r, w)
        r.began = perf_counter()
        r.slot = self._slots.take(r.id, self._wanted(r))
        self.running.append(r)
        if self._pictures and r.spans:
            self._pictures.reused(sum(span.end <= r.computed or self._pictures.has(span) for span in r.spans))
        self.newcomers = True
        self._answering.began(r)
        return True

    def _wanted(self, r: RunningRequest) -> int | None:
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
            tell(w.asked, Event("done", finish_reason="cancelled"))

    def expire(self) -> None:
        """End requests whose deadline is over."""
        now = perf_counter()
        begun = (*self.running, *self.displaced)
        for r in [r for r in begun if is_late(r.arrived, r.request, now)]:
            self.fail(r, DeadlineExceeded(f"the answer was not complete within {r.request.deadline_s:g} s"))
        for w in [w for w in self.waiting if is_late(w.arrived, w.asked.request, now)]:
            deadline = w.asked.request.deadline_s
            self._refuse(w, DeadlineExceeded(f"the answer had not begun within {deadline:g} s"))

    def finish(self, r: RunningRequest, reason: FinishReason) -> None:
        """End a request whose answer is complete, or that was cancelled."""
        self.drop(r)
        if reason != "cancelled":
            self._entry.ended(r)
        self._answering.finish(r, reason)

    def fail(self, r: RunningRequest, error: Exception) -> None:
        """End a request with an error."""
        self.drop(r, keep=isinstance(error, DeadlineExceeded))
        self._answering.fail(r, error)

    def drop(self, r: RunningRequest, keep: bool = True) -> None:
        """Take a request's place back. `keep`: the prefix cache gets what was computed."""
        if r in self.displaced:
            self.displaced.remove(r)
        else:
            self._speculating.ended(r)
            self.places.end(r, keep)  # if that fails, it is still among those who hear that all is over
            self.running.remove(r)
        self._slots.left(r.slot, r.tokens[: r.computed] if keep and not r.pooled else ())
        self.shares.left(r.client)

    def _refuse(self, w: WaitingRequest, error: Exception) -> None:
        self._leave(w)
        tell(w.asked, Event("error", error=logged(error)))

    def _leave(self, w: WaitingRequest) -> None:
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
            tell(w.asked, Event("error", error=reason))
