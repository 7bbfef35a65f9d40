"""A request in the engine, from its arrival to its end: its tokens, its place, its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hetrun.backend import Floats
from hetrun.client.events import (
    ContextShift,
    GenerateRequest,
    OnEvent,
    PromptProgress,
    Timings,
    TokenLogprob,
    Usage,
)
from hetrun.engine.input_processor import PreparedInput
from hetrun.engine.pictures.marks import Span, boundary, places_between, span_at
from hetrun.executor.steps import Chunk
from hetrun.graph.pooling import MeanPool
from hetrun.memory.kv.radix_tree import Tokens
from hetrun.memory.kv.states import StateMark
from hetrun.sampling.interface import Sampler
from hetrun.text.detokenizer import StreamDecoder

ENDING = 16  # tokens of a prompt that belong to the answer: its role, and maybe the mark of a thought
LAST = np.zeros(1, np.int64)  # the wanted row of a chunk of one token
NOTHING = np.zeros(0, np.int64)
NO_PROMPT = np.zeros(0, np.int32)


class PictureRows(Protocol):
    """Where the rows of pictures are that were encoded."""

    def rows(self, span: Span) -> Floats:
        """Those of one, which must be there."""
        ...


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is not over.

    It waits, first for its input (`preparing`, then `prepared`), then for a place in the KV cache. `set_up`
    in `request_setup.py` gives it its tokens, and with them all that follows here, before it takes one.
    """

    id: int
    request: GenerateRequest
    on_event: OnEvent
    arrived: float
    preparing: Future[None] | None = None
    prepared: PreparedInput | None = None  # until it has a place
    # --- as it runs
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    # Of these the first, as the prefix cache wants them.
    prompt: Tokens = field(default_factory=lambda: NO_PROMPT)
    limit: int = 0  # tokens of the answer
    most_of_step: int = 0  # tokens that a step may have of it, whatever they are
    sampler: Sampler = field(init=False, repr=False)
    decoder: StreamDecoder = field(init=False, repr=False)
    opened: str = ""  # the mark of a thought that the prompt has begun
    began: float = 0.0  # when it first got a place
    seq: int = -1  # its place in the model; -1: it gave it up
    computed: int = 0
    cached: int = 0  # tokens of the prompt that need not be computed
    scored: int = 0  # tokens of the prompt whose log-probabilities were told
    turn: int = 0  # grows whenever a sequence has its turn
    first: float = 0.0  # when the first token came
    last: float = 0.0
    drafted: int = 0  # tokens of the answer that were guessed and tried
    accepted: int = 0  # how many of these were right
    end: TokenLogprob | None = None  # the token with which the model ended, where such are wanted
    pooled: MeanPool | None = None  # an embedding: not a token is wanted, but what this becomes
    checkpoint_every: int = 0  # tokens after which the model keeps what it knows; 0: it need not
    parts_at: int = 0  # where its text parts from another one's
    reach: int = 0  # of its last tokens hidden states are kept for guesses, and of all that follow
    slot: int = -1  # the number of its place, for clients; kept where it gives the place up
    shift: ContextShift | None = None  # None: its text ends where the context is full
    dropped: int = 0  # tokens that are not in `tokens` any more, because the context was full
    cut: int = 0  # tokens of the prompt that found no room at all
    has_line: bool = False  # the answer has a line break; kept only where its time is limited
    spans: tuple[Span, ...] = ()  # the pictures among its tokens
    spatial: bool = False  # tokens after a picture have other positions than their numbers
    picture_s: float = 0.0  # that encoding its pictures took

    @property
    def is_set_up(self) -> bool:
        """Whether it has its tokens."""
        return bool(self.tokens)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def client(self) -> str:
        """The client."""
        return self.request.client

    @property
    def priority(self) -> int:
        """Lower ones go first."""
        return self.request.priority

    def is_late(self, now: float) -> bool:
        """Whether it is not wanted any more."""
        deadline_s = self.request.deadline_s
        return deadline_s is not None and now > self.arrived + deadline_s

    @property
    def missing(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.tokens) - self.computed

    @property
    def answers(self) -> bool:
        """Whether it lacks one token only, as a running answer does."""
        return self.pooled is None and self.missing == 1

    @property
    def most(self) -> int:
        """Tokens that a step may have of it: all of texts, or all of the same picture."""
        if not self.spans:
            return self.most_of_step
        return min(self.most_of_step, boundary(self.spans, self.computed) or self.most_of_step)

    @property
    def least(self) -> int:
        """Tokens that a step must have of it, if it has any: those of a picture whose rows see each other."""
        span = self.picture
        return span.end - self.computed if span and span.rows.whole else 1

    @property
    def picture(self) -> Span | None:
        """The picture that the next token belongs to, if it belongs to one."""
        return span_at(self.spans, self.computed) if self.spans else None

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt's own tokens still want their log-probabilities."""
        return self.request.params.prompt_logprobs is not None and self.scored < self.n_prompt

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) + self.dropped - self.n_prompt

    def chunk(self, n: int, draft: Sequence[int] = (), pictures: PictureRows | None = None) -> Chunk:
        """The next n tokens, as the model takes them; after the last one a draft of what may follow."""
        if not self.spans or pictures is None:
            return self._chunk(n, draft)
        a, b = self.computed, self.computed + n + len(draft)
        chunk = self._chunk(n, draft)
        places = places_between(self.spans, a, b) if self.spatial else None
        if (span := self.picture) is None:
            return replace(chunk, places=places)
        rows = pictures.rows(span)[a - span.start : b - span.start]
        # What stands for rows is no token, and no table may look it up.
        nothing = np.zeros(n, np.int64)
        return replace(chunk, tokens=nothing, places=places, embedded=rows, whole=span.rows.whole)

    def _chunk(self, n: int, draft: Sequence[int]) -> Chunk:
        if draft:
            given = np.array([self.tokens[-1], *draft], np.int64)
            kept = len(given) if self.reach else 0
            return Chunk(self.seq, given, np.arange(len(given)), self.marks_of_draft(len(draft)), kept)
        tokens = np.array(self.tokens[self.computed : self.computed + n], np.int64)
        if self.pooled:
            return Chunk(self.seq, tokens, self.pooled.wanted(self.computed, n))
        marks, kept = self.marks(n), self._kept(n)
        if self.wants_scores:
            return Chunk(self.seq, tokens, np.arange(n), marks, kept)
        if n < self.missing:
            return Chunk(self.seq, tokens, NOTHING, marks, kept)
        return Chunk(self.seq, tokens, LAST if n == 1 else np.array([n - 1], np.int64), marks, kept)

    def _kept(self, n: int) -> int:
        """Of how many of the next n tokens hidden states are kept: those that guesses may need."""
        return max(0, min(n, self.computed + n - len(self.tokens) + self.reach)) if self.reach else 0

    def marks_of_draft(self, n: int) -> tuple[StateMark, ...]:
        """Of a draft any part may be right, and is to be cut off there."""
        if not self.checkpoint_every:
            return ()
        return tuple([StateMark(self.computed + 1 + i, checkpoint=False) for i in range(n)])

    def marks(self, n: int) -> tuple[StateMark, ...]:
        """Where among the next n tokens the model shall keep what it knows: now and then, where the text
        parts from another one's, around pictures, and before the prompt's end, which the next turn of a chat
        may change."""
        if not self.checkpoint_every:
            return ()
        a, b, every = self.computed, self.computed + n, self.checkpoint_every
        at = {*range(a // every * every + every, b + 1, every), self.parts_at, self.n_prompt - ENDING}
        at |= {end for span in self.spans for end in (span.start, span.end)}
        return tuple([StateMark(p) for p in sorted(at) if a < p <= b])

    def usage(self) -> Usage:
        """Tokens counted."""
        return Usage(self.n_prompt, self.generated, self.cached)

    def progress(self, now: float) -> PromptProgress:
        """How much of the prompt is computed."""
        return PromptProgress(self.n_prompt, self.cached, min(self.computed, self.n_prompt), now - self.began)

    def timings(self, load_s: float) -> Timings:
        """Rates measured."""
        prompt_s, decode_s = self.first - self.began, self.last - self.first
        return Timings(
            load_s=load_s,
            ttft_s=self.first - self.arrived if self.first else 0.0,
            prompt_tok_s=(self.n_prompt - self.cached) / prompt_s if prompt_s > 0 else 0.0,
            decode_tok_s=(self.generated - 1) / decode_s if self.generated > 1 and decode_s > 0 else 0.0,
            drafted=self.drafted,
            accepted=self.accepted,
            picture_s=self.picture_s,
        )


Chosen = list[tuple[ActiveRequest, int]]  # what goes into a step: requests, and how many tokens of each
Draft = Sequence[int]  # guesses that were tried
Drafts = Mapping[int, Draft]  # by request
