"""Documents ranked by a reranker: what `LLM.rerank` takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.client.events import Event, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import ContextFull, OptionError
from hetrun.text.ranking import best_first, log_odds, probability


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document that was ranked.

    index: its place among the documents that were given.
    score: the probability that it meets the query's requirements, from 0 to 1.
    document: the document.
    """

    index: int
    score: float
    document: str


def ranking_requests(prompts: Sequence[Sequence[int]], context: int) -> list[GenerateRequest]:
    """The judgements of documents whose prompts these are, as requests; an empty one is far too long."""
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= context:
            size = f"{len(prompt)} tokens" if prompt else "far too many tokens"
            raise ContextFull(
                f"document {i} has {size} with the query and the instructions, but the context holds "
                f"{context}; shorten it, or ask for more with --ctx"
            )
    return [GenerateRequest(SamplingParams(), tokens=tuple(p), pooling="rank", whole=True) for p in prompts]


def ranked(ends: Sequence[Event], documents: Sequence[str], top_n: int | None) -> list[Ranked]:
    """Documents by the last events of their requests, the best first."""
    scores = [probability(log_odds(end)) for end in ends]
    return [Ranked(i, scores[i], documents[i]) for i in best_first(scores, top_n)]


def checked_documents(query: object, documents: object, top_n: object) -> list[str]:
    """The documents, if all that is given has the right types."""
    if not isinstance(query, str):
        raise OptionError(f"the query must be a text, not {type(query).__name__}")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise OptionError("documents must be a list of texts")
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            raise OptionError(f"document {i} must be a text, not {type(document).__name__}")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise OptionError(f"top_n must be an integer of at least 1, not {top_n!r}")
    return list(documents)
