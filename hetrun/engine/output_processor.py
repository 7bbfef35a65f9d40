"""From rows of logits to events: the next token of each sequence, its text, and whether it was the last."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

from hetrun.backend import Floats, Rows, TopLogits
from hetrun.client.events import Event, FinishReason, TokenLogprob
from hetrun.engine.loaded_model import LoadedModel, reranker_of, tokenizer_of
from hetrun.engine.request import ActiveRequest, Draft, Drafts
from hetrun.errors import BackendError, HetrunError, system_fault
from hetrun.executor.interface import LogitChooser
from hetrun.executor.steps import Between, Step
from hetrun.graph.pooling import read_vector
from hetrun.sampling.batch import choose
from hetrun.sampling.interface import SampledToken
from hetrun.sampling.logprobs import of_prompt

log = logging.getLogger(__name__)

Choices = Sequence[SampledToken | None]
# gone: the client does not listen any more; full: the context is, and the text is to go on.
Ending = FinishReason | Literal["gone", "full"]


class OutputProcessor:
    """Tells the client what the model says."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._chooses = self._model if isinstance(self._model, LogitChooser) else None

    def rows(self, step: Step, running: Sequence[ActiveRequest], between: Between | None) -> Rows:
        """The model's output for a step, as much of it as is needed."""
        if self._chooses and (k := enough(running, self._model.n_vocab)):
            return self._chooses.choose(step, k, between)
        return self._model.step(step, between)

    def began(self, r: ActiveRequest) -> None:
        """A request has its place: say what its prompt's tokens stand for, and how many of them are cached,
        where that is wanted."""
        if r.request.echo:
            piece = tokenizer_of(self._loaded).piece
            echo = tuple(piece(token) if token >= 0 else b"" for token in r.tokens)
            tell(r, Event("prompt", echo=echo, slot=r.slot))
        if r.request.progress:
            tell(r, Event("prompt", progress=r.progress(r.began)))

    def progressed(self, r: ActiveRequest, n: int, now: float) -> None:
        """A step has computed n more tokens of a request: say how far its prompt is, where that is wanted."""
        if r.request.progress and not r.dropped and r.computed - n < r.n_prompt:
            tell(r, Event("prompt", progress=r.progress(now)))

    def took(
        self, r: ActiveRequest, n: int, rows: Rows, now: float, choices: Choices = (None,), draft: Draft = ()
    ) -> Ending | None:
        """A step has seen n more tokens of a sequence, and a draft; how the request ends by the rows it gave.

        `choices`: the token that follows each, where those were found for all together.
        """
        if r.pooled:
            assert not isinstance(rows, TopLogits)  # a sequence that wants whole rows gets them
            r.first, r.last = r.first or now, now
            r.pooled.add(rows)
            return None if r.missing else "stop"
        if r.wants_scores and not isinstance(rows, TopLogits) and not self._score(r, n, rows):
            return "gone"
        if r.missing:
            return None
        if not r.limit:
            return "length"
        for row, choice, guess in zip(rows[-1 - len(draft) :], choices, (*draft, None), strict=True):
            choice = choice or r.sampler.sample(row)
            ending = self._next(r, choice, now)
            if ending or choice.token != guess:
                return ending
            r.computed += 1  # the next row is the one after this token
            r.accepted += 1
        return None

    def _score(self, r: ActiveRequest, n: int, rows: Floats) -> bool:
        """How probable each of the prompt's tokens was after those before it."""
        begin = r.computed - n
        told = max(0, r.scored - begin)  # before it gave its place up
        followed = r.tokens[begin + told + 1 : min(r.computed + 1, r.n_prompt)]
        top = r.request.params.prompt_logprobs or 0
        found = of_prompt(rows[told : told + len(followed)], followed, top) if followed else []
        scores = (self._logprob(token, *score) for token, score in zip(followed, found, strict=True))
        r.scored = max(r.scored, min(r.computed, r.n_prompt))
        return tell(r, Event("prompt", prompt_logprobs=tuple(scores)))

    def _next(self, r: ActiveRequest, choice: SampledToken, now: float) -> Ending | None:
        """Take the next token of a sequence and say so."""
        r.first, r.last = r.first or now, now
        event = self._take(r, choice)
        if event is None:
            return "stop"
        if not tell(r, event):
            return "gone"
        if r.decoder.stopped is not None or r.sampler.finished:
            return "stop"
        if r.generated >= r.limit or self._is_late(r, event.text, now):
            return "length"
        return "full" if r.shift and len(r.tokens) >= self._model.context else None

    def _is_late(self, r: ActiveRequest, text: str, now: float) -> bool:
        """Whether an answer has taken the time that it may take; a line of it is complete in any case."""
        if (limit := r.request.line_limit_s) is None:
            return False
        r.has_line = r.has_line or "\n" in text
        return r.has_line and now - r.first > limit

    def _take(self, r: ActiveRequest, choice: SampledToken) -> Event | None:
        """The next token; None where the model says that it has finished."""
        tokenizer = self._loaded.tokenizer
        r.sampler.accept(choice.token)
        score = None if choice.logprob is None else self._logprob(choice.token, choice.logprob, choice.top)
        if tokenizer and not r.request.params.ignore_eos and tokenizer.is_end(choice.token):
            r.end = score
            return None
        text = r.decoder.push(tokenizer.piece(choice.token)) if tokenizer else ""
        r.tokens.append(choice.token)
        opened = r.opened if r.generated == 1 else ""
        return Event("token", text, choice.token, score, opened=opened)

    def _logprob(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            return TokenLogprob(token, logprob, tuple(top))
        pieces = tuple(tokenizer.piece(t) for t, _ in top)
        return TokenLogprob(token, logprob, tuple(top), tokenizer.piece(token), pieces)

    def finish(self, r: ActiveRequest, reason: FinishReason) -> None:
        """Say that a request is over, with the rest of its text."""
        text, timings = r.decoder.flush(), r.timings(self._loaded.load_s)
        vector = self._pooled(r)
        stopped = r.decoder.stopped or ""
        tell(
            r,
            Event(
                kind="done",
                text=text,
                token=None,
                logprob=r.end,
                finish_reason=reason,
                usage=r.usage(),
                timings=timings,
                embedding=vector,
                stopped=stopped,
                slot=r.slot,
                dropped=r.dropped + r.cut,
            ),
        )

    def _pooled(self, r: ActiveRequest) -> bytes | None:
        """The vector of a text, or the score of a document; None if neither is complete."""
        vector = r.pooled.vector if r.pooled else None
        if vector is None or r.request.pooling != "rank":
            return vector
        return reranker_of(self._loaded).log_odds(read_vector(vector, normalise=False))

    def fail(self, r: ActiveRequest, error: Exception) -> None:
        """Say why a request ends too early."""
        tell(r, Event("error", usage=r.usage(), timings=r.timings(self._loaded.load_s), error=logged(error)))

    def explained(self, error: Exception) -> Exception:
        """Logits that are no numbers come from weights that are none, mostly."""
        return (isinstance(error, BackendError) and self._loaded.diagnose()) or error


def enough(running: Sequence[ActiveRequest], n_vocab: int) -> int:
    """How many of the greatest logits of each row all of them can do with; 0: one wants whole rows."""
    wanted = [0 if r.pooled or r.wants_scores else r.sampler.enough for r in running]
    return max(wanted) if all(wanted) and max(wanted) < n_vocab else 0


def together(running: Sequence[ActiveRequest], step: Step, drafts: Drafts, logits: Rows) -> Iterator[Choices]:
    """The next tokens of each sequence, where samplers can look at all rows of a step at once."""
    counts = [1 + len(drafts.get(r.id, ())) for r in running]
    found: Choices = (None,) * sum(counts)
    answers = all([len(chunk.wanted) == n for chunk, n in zip(step.chunks, counts, strict=True)])
    if len(logits) > 1 and answers and not step.hidden:
        found = choose([r.sampler for r, n in zip(running, counts, strict=True) for _ in range(n)], logits)
    at = 0
    for n in counts:
        yield found[at : at + n]
        at += n


def tell(r: ActiveRequest, event: Event) -> bool:
    """Call back; a receiver that fails is its own fault and must not end the others."""
    try:
        r.on_event(event)
    except Exception:
        log.exception("the receiver of request %d failed on a %s event", r.id, event.kind)
        return False
    return True


def logged(error: Exception) -> Exception:
    """The error; one that was not raised on purpose leaves its traceback in the log, and what the system
    refused becomes one of ours."""
    error = system_fault("the request failed", error) or error
    if not isinstance(error, HetrunError):
        log.error("a request failed", exc_info=error)
    return error
