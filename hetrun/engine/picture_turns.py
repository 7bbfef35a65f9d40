"""When pictures are encoded: one at a time, between two steps."""

from __future__ import annotations

from time import perf_counter

from hetrun.engine.active_requests import ActiveRequests
from hetrun.engine.cancellation import Gate
from hetrun.engine.pictures.marks import Span
from hetrun.engine.pictures.store import PictureStore
from hetrun.engine.request import ActiveRequest
from hetrun.errors import Cancelled


class PictureTurns:
    """Encodes the pictures that running requests need next. `pictures`: None where the model reads none."""

    def __init__(self, pictures: PictureStore | None, requests: ActiveRequests, gate: Gate) -> None:
        self._pictures = pictures
        self._requests = requests
        self._gate = gate

    def ready(self) -> list[ActiveRequest]:
        """Requests whose next tokens can be computed: the rows of a picture have to be there."""
        if (pictures := self._pictures) is None:
            return self._requests.running
        return [r for r in self._requests.running if (span := r.picture) is None or pictures.has(span)]

    def encode_next(self) -> None:
        """Encode the picture that is next. There is one call for each, in which nothing else runs."""
        pictures, running = self._pictures, self._requests.running
        if pictures is None or not any([r.spans for r in running]):
            return
        for r in self._requests.shares.ordered(running):
            if (span := r.picture) and not pictures.has(span):
                self._encode(pictures, r, span)
                return

    def _encode(self, pictures: PictureStore, r: ActiveRequest, span: Span) -> None:
        if not self._gate.enter(frozenset((r.id,)), pictures.expected_s(span.rows.count), "a picture"):
            return  # a cancel is in the inbox
        start = perf_counter()
        try:
            pictures.encode(span, r.request.pictures[span.picture])
        except Cancelled:
            return
        except Exception as e:
            self._requests.fail(r, e)
        finally:
            self._gate.leave()
        r.picture_s += perf_counter() - start
