"""Admits requests: what admission counts and predicts, from the engine's own lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from hetrun.client.events import GenerateRequest
from hetrun.engine.admission import Admission, RequestWork, letters
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.request import ActiveRequest
from hetrun.engine.scheduler import A
from hetrun.engine.step_time import STRETCH
from hetrun.errors import Overloaded


class AdmissionGate:
    """Refuses requests that came for nothing, and learns from those that did not.

    The lists are the engine's: those that run, those that gave up their places, and those that wait.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        running: list[ActiveRequest],
        displaced: list[ActiveRequest],
        waiting: list[ActiveRequest],
    ) -> None:
        self._model = loaded.model
        self._pictures = loaded.pictures
        self._running = running
        self._displaced = displaced
        self._waiting = waiting
        # A pass that stands aside lets answers have their step whenever it ran for STRETCH - 1 of these.
        aside = 1 / STRETCH if loaded.model.stands_aside else 0.0
        self._admission = Admission(
            loaded.model.max_sequences, loaded.times, most_waiting=loaded.most_waiting, aside=aside
        )

    def full(self) -> Overloaded | None:
        """Why one more request cannot wait, unless another one gives way."""
        self._admission.places = self._model.max_sequences
        held = len(self._running) + len(self._displaced) + len(self._waiting)
        return self._admission.refuse_arrival(held, self._begun())

    def refuse(self, w: ActiveRequest) -> Overloaded | None:
        """Why a waiting request, whose text is known by now, would wait in vain."""
        request = w.request
        if request.deadline_s is None:
            return None
        self._admission.places = self._model.max_sequences  # which another budget may have changed
        others = [*self._begun(), *(self._ahead(o) for o in self._waiting if o is not w)]
        left_s = request.deadline_s - (perf_counter() - w.arrived)
        whole = request.whole or request.most_tokens is not None
        return self._admission.refuse(self._ahead(w), others, left_s, whole=whole)

    def began(self, r: ActiveRequest) -> None:
        """A request has its place, and what was cached of it."""
        self._admission.saw_prompt(_letters(r), r.missing)

    def ended(self, r: ActiveRequest) -> None:
        """An answer is complete."""
        self._admission.finished(r.n_prompt, None if r.pooled else r.generated)

    def _begun(self) -> Iterator[RequestWork]:
        """Those that gave their places up are the first to get one."""
        for r in (*self._running, *self._displaced):
            answer = self._answer(r.request, r.generated, r.limit)
            work = RequestWork(max(r.missing - 1, 0), answer, True, r.priority, r.client)
            yield replace(work, pictures_s=self._pictures_s(r)) if r.spans else work

    def _ahead(self, w: ActiveRequest) -> RequestWork:
        """The whole work of a request without a place."""
        request = w.request
        seconds = 0.0
        if w.is_set_up:
            prompt, seconds = w.missing, self._pictures_s(w)
        elif self._pictures and w.prepared and w.prepared.seen:
            seen = w.prepared.seen
            prompt = self._admission.expected_prompt(_letters(w)) + sum(each.n_tokens for each in seen)
            seconds = sum(map(self._pictures.expected_s, self._pictures.rows_to_encode(seen)))
        elif request.tokens is not None:
            prompt = len(request.tokens)
        else:
            prompt = self._admission.expected_prompt(_letters(w))
        limit = request.most_tokens
        answer = self._answer(request, 0, self._model.context if limit is None else limit)
        return RequestWork(prompt, answer, False, w.priority, w.client, seconds)

    def _pictures_s(self, r: ActiveRequest) -> float:
        """What encoding its pictures still takes, as far as it needs their rows."""
        if self._pictures is None:
            return 0.0
        missing = [s for s in r.spans if s.end > r.computed and not self._pictures.has(s)]
        return sum(self._pictures.expected_s(span.rows.count) for span in missing)

    def _answer(self, request: GenerateRequest, generated: int, limit: int) -> float:
        certain = request.params.ignore_eos and request.params.max_tokens is not None
        return self._admission.expected_answer(generated, limit, certain)


def gives_way(new: A, waiting: Sequence[A]) -> A:
    """The request that is refused when the queue is full: the newest one of the highest priority number, of
    the client that has most requests in it. So one client's flood does not keep the others out."""
    everybody = [*waiting, new]
    many = Counter(w.client for w in everybody)
    return max(everybody, key=lambda w: (w.priority, many[w.client], w.arrived))


def _letters(w: ActiveRequest) -> int:
    text = w.prepared.text if w.prepared else None
    return letters(w.request) if text is None else len(text)
