"""Adds drafts to a step of answers, and learns what became of them.

A draft is tried in the step that computes the token before it: the sequence's chunk is that token and the
draft, and every row is wanted. Rows are then taken one by one, as if each came from a step of its own
(`output_processor.py`), as long as the token chosen is the one that was guessed; the rest is taken back.
So there is nothing that a sampler, a grammar, a stop string or a limit would have to know, and the text
is the one that would have come without.
"""

from __future__ import annotations

import logging

from hetrun.backend import Floats
from hetrun.engine.request import ActiveRequest, Chosen, Drafts
from hetrun.engine.speculation.cost import DraftCosts
from hetrun.engine.speculation.draft_length import NOTHING, Decision, DraftCandidate, decide
from hetrun.engine.speculation.interface import LONGEST, Proposer, Speculation
from hetrun.engine.step_time import StepTimes
from hetrun.executor.interface import Model
from hetrun.system.ema import smoothed

log = logging.getLogger(__name__)

NONE: Drafts = {}
TRUST = 4.0  # tokens; fewer say nothing
LASTING = 0.95  # what a step counts when the next one with drafts has come
FORGIVING = 1 / 256
IDLE = 16  # looks
LOOK_S = 5e-5  # that a look takes for each sequence, about, between two steps that have emptied the caches
WORTH = 0.004  # of the time of a step: so much may looks take that find nothing
MOST_RESTS = 8  # one of this many steps is looked at in any case
MOST_CLOSE = 64  # tokens of a step where rows need not have the very bits that they have alone


class Promise:
    """Tokens that drafts were predicted to give, and those that they gave."""

    def __init__(self) -> None:
        self._made = self._kept = TRUST

    @property
    def trust(self) -> float:
        """Which part of a prediction to believe."""
        return min(1.0, self._kept / self._made)

    def made(self, tokens: float) -> None:
        """How many more the next step is to give than without drafts."""
        if tokens:
            self._made = LASTING * self._made + tokens
            self._kept *= LASTING
        else:  # what is not tried any more is forgiven
            self._kept = smoothed(self._kept, self._made, FORGIVING)

    def kept(self, tokens: int) -> None:
        """How many it gave."""
        self._kept += tokens


class Speculator:
    """All that the engine's loop knows of speculation."""

    def __init__(self, model: Model, speculation: Speculation | None, times: StepTimes) -> None:
        self._model = model
        self._speculation = speculation
        self._times = times
        self._costs = DraftCosts(times)
        self._proposers: dict[int, Proposer] = {}  # by request
        self._drafting = False
        self._idle = 0  # looks in a row that found nothing worth a try
        self._turn = 0
        self._looked = False  # before the last step
        self._promise = Promise()
        self._plans: object = None
        self._most = 0  # tokens of a step, by these plans

    def add(self, chosen: Chosen) -> tuple[Chosen, Drafts]:
        """A step, those with drafts first, and their drafts."""
        if self._speculation is None or not chosen or self._rests(chosen):
            return chosen, NONE
        if (most := self._most_tokens()) <= 1:
            return chosen, NONE
        proposers = [self._proposer(r) for r, _ in chosen]
        for proposer in proposers:
            proposer.follow()
        if most <= len(chosen) or not all(n == r.missing == 1 and not r.wants_scores for r, n in chosen):
            return chosen, NONE
        candidates = [
            DraftCandidate(i, proposer.chances(LONGEST), self._room(r), proposer.seconds)
            for i, ((r, _), proposer) in enumerate(zip(chosen, proposers, strict=True))
        ]
        depths = [r.computed for r, _ in chosen]
        found = decide(
            candidates, depths, self._costs, most - len(chosen), self._drafting, self._promise.trust
        )
        if found is not NOTHING and not self._fits(chosen, found):
            found = NOTHING
        self._drafting = found is not NOTHING
        self._idle = 0 if self._drafting else self._idle + 1
        guesses = {chosen[i][0].id: proposers[i].propose(found.length) for i in found.places}
        drafts = {i: draft for i, draft in guesses.items() if draft}
        self._promise.made(found.gain if drafts else 0.0)
        first = [chosen[i] for i in found.places if chosen[i][0].id in drafts]
        return first + [c for c in chosen if c[0].id not in drafts], drafts

    def compiled(self, chosen: Chosen, drafts: Drafts, seconds: float) -> bool:
        """Whether a step that took so long was the first one with such drafts, which says nothing of the
        next ones; its sequences do not know of it yet."""
        if not drafts:
            return False
        length = max(map(len, drafts.values()))
        return self._costs.compiled([r.computed for r, _ in chosen], len(drafts), length, seconds)

    def observe(self, r: ActiveRequest, first: int, hidden: Floats) -> None:
        """The hidden states of a request's tokens from a position on, as far as they are its own now."""
        own = hidden[: max(0, r.computed - first)]
        if len(own) and self._speculation:
            self._proposer(r).observe(first, own)

    def took(self, tokens: int) -> None:
        """How many guesses of the last step were right."""
        self._promise.kept(tokens)

    def ended(self, r: ActiveRequest) -> None:
        """A request is over."""
        if proposer := self._proposers.pop(r.id, None):
            proposer.close()

    def _rests(self, chosen: Chosen) -> bool:
        """Where nothing was worth a try for a while, not every short step is looked at: a look takes time for
        each sequence, and the next one finds what came meanwhile. Steps of embeddings never are."""
        self._looked = self._speculation is not None and not any([r.pooled for r, _ in chosen])
        if self._looked and self._idle >= IDLE and all([r.missing == 1 for r, _ in chosen]):
            step_s = self._times.quiet([r for r, _ in chosen])
            every = int(1 + len(chosen) * LOOK_S / (WORTH * step_s))
            self._turn = (self._turn + 1) % min(MOST_RESTS, every)
            self._looked = not self._turn
        return not self._looked

    def _fits(self, chosen: Chosen, found: Decision) -> bool:
        """Whether there is memory: no request gives any up for a guess."""
        drafting = frozenset(found.places)
        return self._model.fits(
            [(r.seq, 1 + found.length * (i in drafting)) for i, (r, _) in enumerate(chosen)]
        )

    def _proposer(self, r: ActiveRequest) -> Proposer:
        assert self._speculation is not None
        found = self._proposers.get(r.id)
        if found is None:
            found = self._proposers[r.id] = self._speculation.proposer(
                r.tokens, min(r.n_prompt, len(r.tokens))
            )
        return found

    def _room(self, r: ActiveRequest) -> int:
        """Tokens of a draft that can be of use: one more comes in any case."""
        if r.picture:  # the last token of the prompt is a row of one
            return 0
        room = self._model.context - len(r.tokens) - 1
        return min(r.limit - r.generated - 1, r.most - 1, room)

    def _most_tokens(self) -> int:
        """Of a step: more would not give the tokens that come without drafts."""
        if (plans := self._model.plans) is not self._plans:
            exact = self._speculation is not None and self._speculation.exact
            alike = self._model.alike
            before, self._plans = self._plans, plans
            self._most = min(plans.ubatch, alike if exact or not alike else MOST_CLOSE)
            if before is None and self._most <= 1:
                log.info(
                    "no speculation: computing several tokens at once would change the text"
                    if alike
                    else "no speculation: this model runs through libllama"
                )
        return self._most
