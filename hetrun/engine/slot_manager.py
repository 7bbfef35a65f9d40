"""Assigns places in the model's memory: begun with the cached prefix, preempted when memory is short."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hetrun.client.events import ContextShift
from hetrun.engine.loaded_model import LoadedModel
from hetrun.engine.request import ActiveRequest, Chosen
from hetrun.engine.scheduler import last_in_line
from hetrun.errors import BudgetError, system_fault
from hetrun.memory.kv.prefix_cache import LEAST, Prefixes

log = logging.getLogger(__name__)

LEAST_ROOM = 4  # tokens of the context that the beginning which is kept leaves in any case
AHEAD = 64  # tokens that each running request should have room for when another one begins


class SlotManager:
    """Gives sequences to requests and takes them back.

    When memory for keys and values runs out, first cached prompts go, the one that was not used for longest
    first; then the youngest request of the highest priority number gives up what is its, and computes it once
    more when there is room.
    """

    def __init__(
        self, loaded: LoadedModel, running: list[ActiveRequest], displaced: list[ActiveRequest]
    ) -> None:
        """Requests go from `running` to `displaced` when they give their places up."""
        self._model = loaded.model
        self._prefixes = loaded.prefixes
        self._running = running
        self._displaced = displaced

    def begin(self, r: ActiveRequest) -> bool:
        """A sequence for a request, with as much of its tokens as is known; False: there is no room now."""
        try:
            self._place(r)
        except BudgetError:
            if not self._running:
                raise
            return False
        needed = [(s.seq, s.missing + AHEAD) for s in (*self._running, r)]
        while self._running and not self._model.fits(needed):
            if not self._drop_cached():
                self._free(r)
                return False
        if not r.generated:  # else it has been told
            r.cached = r.computed
        return True

    def _place(self, r: ActiveRequest) -> None:
        if r.pooled and not r.pooled.of_last:  # each of its rows is wanted, and nothing of it is kept
            r.seq, r.computed = (self._prefixes or self._model).alloc(), 0
        elif self._prefixes:  # of a prompt whose tokens' probabilities are wanted, each must be computed
            tokens = r.tokens if r.generated else r.prompt
            if self._model.checkpoint_every:  # where texts part another one may part from them
                r.parts_at = self._prefixes.known(tokens)
            spans = [(span.start, span.end) for span in r.spans]
            reuse = not (r.wants_scores or r.request.fresh)
            r.seq, r.computed = self._prefixes.begin(tokens, reuse, spans)
        else:
            r.seq, r.computed = self._model.alloc(), 0

    def make_room(self, chosen: Chosen, standing: Collection[int]) -> Chosen:
        """What of a step there is room for, after the last in line gave theirs up if need be.

        `standing`: requests in the middle of a step, which cannot give anything up.
        """
        while chosen and not self._model.fits([(r.seq, n) for r, n in chosen]):
            if self._drop_cached([r.seq for r, _ in chosen]):
                continue
            others = [r for r in self._running if r.id not in standing]
            victim = last_in_line(others)
            if victim is None or (len(others) == 1 and not standing):
                return chosen  # none is left that could: the model will say what is wrong
            self.give_up(victim)
            chosen = [(r, n) for r, n in chosen if r is not victim]
        return chosen

    def give_up(self, r: ActiveRequest) -> None:
        """A request loses its place, but not what it is."""
        self._free(r)
        self._running.remove(r)
        self._displaced.append(r)

    def end(self, r: ActiveRequest, keep: bool = True) -> None:
        """A request is over; what the model knows of it may be of use to the next."""
        if keep and self._prefixes and not r.pooled:
            self._keep(self._prefixes, r)
            r.seq = -1
        else:
            self._free(r)

    @staticmethod
    def _keep(prefixes: Prefixes, r: ActiveRequest) -> None:
        """Without memory for its entry it is not kept; the answer is complete all the same."""
        try:
            prefixes.keep(r.seq, r.tokens[: r.computed])
        except Exception as e:
            if (fault := system_fault("a prompt was not kept for the next request", e)) is None:
                raise
            log.warning("%s", fault)

    def shift(self, r: ActiveRequest) -> None:
        """The context is full of a request's text: drop the oldest of it, and compute the rest again.

        What is kept stands at other positions then, and has not seen what was dropped: so its keys and values
        are the very ones that the shorter text would have had. That takes as long as reading it as a prompt.
        """
        assert r.shift is not None
        kept = after_shift(r.tokens, r.shift, r.n_prompt, self._model.context)
        begins = kept[: r.shift.keep] if r.shift.keep >= 0 else kept[: r.n_prompt]
        if self._prefixes and len(begins) >= LEAST:  # it begins with what stays in its place
            self._keep(self._prefixes, r)
            r.seq, r.computed = -1, 0
        else:
            self._free(r)
        r.dropped += len(r.tokens) - len(kept)
        r.tokens = kept
        self._running.remove(r)
        self._displaced.append(r)

    def observe(self, r: ActiveRequest) -> None:
        """A step has computed more of a request's tokens."""
        if self._prefixes:
            self._prefixes.progress(r.seq, r.computed)

    def awaits(self, r: ActiveRequest) -> bool:
        """Whether another request computes this request's prefix right now."""
        if self._prefixes is None or r.wants_scores or r.request.fresh or (r.pooled and not r.pooled.of_last):
            return False
        computing = [s.seq for s in self._running if s.missing > 1]
        return bool(computing) and self._prefixes.soon(r.prompt, computing)

    def _free(self, r: ActiveRequest) -> None:
        """What a request has computed is gone, but not what it is."""
        alone = r.pooled and not r.pooled.of_last
        owner = self._model if alone else self._prefixes or self._model
        owner.free(r.seq)
        r.seq, r.computed = -1, 0

    def _drop_cached(self, going_on: Collection[int] = ()) -> bool:
        """Give up what is only there in case it is of use; some sequences are about to go on."""
        return (self._prefixes is not None and self._prefixes.drop_one()) or self._model.thin(going_on)


def shortened(tokens: list[int], shift: ContextShift, context: int) -> list[int]:
    """A prompt that the context does not hold, without blocks from its middle: half of the room that its
    beginning leaves each, as many as needed. Room for an answer is left."""
    if len(tokens) < context:
        return tokens
    keep = _kept(shift, len(tokens), context)
    block = max((context - keep) // 2, 1)
    dropped = max((len(tokens) - keep - block) // block, 1) * block
    return tokens[:keep] + tokens[keep + dropped :]


def after_shift(tokens: list[int], shift: ContextShift, n_prompt: int, context: int) -> list[int]:
    """The tokens of a text that has filled the context, without the oldest after its beginning."""
    keep = _kept(shift, n_prompt, context)
    left = len(tokens) - keep
    dropped = min(shift.discard or max(left // 2, 1), left - 1)
    return tokens[:keep] + tokens[keep + dropped :]


def _kept(shift: ContextShift, n_prompt: int, context: int) -> int:
    """How many tokens at the beginning stay."""
    most = max(context - LEAST_ROOM, 0)
    return min(n_prompt if shift.keep < 0 else shift.keep, n_prompt, most)
