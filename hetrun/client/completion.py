"""Arguments and results of `LLM`: prompts become requests, events become one answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from hetrun.client.events import (
    Event,
    FinishReason,
    GenerateRequest,
    Timings,
    TokenLogprob,
    Usage,
    brief,
)
from hetrun.client.ranking import best_first, log_odds, probability
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import ContextFull, OptionError, UserError
from hetrun.graph.pooling import Pooling

Prompt = str | Sequence[int]
EndReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called.

    id: names the call; the answer to it is `{"role": "tool", "tool_call_id": id, "content": ...}`.
    name: the function.
    arguments: its arguments as the model wrote them: a JSON object, unless the answer was cut off.
    """

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as a dictionary; UserError if the model did not write a JSON object."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the arguments of the call to {self.name} are not JSON: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"the arguments of the call to {self.name} are not a JSON object")
        return found

    def to_json(self) -> dict[str, Any]:
        """The call as OpenAI has it in messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    text: the answer; of a chat without reasoning and tool calls.
    tokens: the ids of the generated tokens.
    finish_reason: "stop" (the model ended, or a stop string came), "length" (max_tokens, or the context is
        full), "tool_calls" or "cancelled".
    usage: tokens of prompt and answer, and how many of the prompt came from the prefix cache.
    timings: seconds and tokens per second.
    logprobs: one for each token, if asked for.
    prompt_logprobs: one for each token of the prompt, if asked for; None for the first.
    reasoning: what the model wrote before its answer (chat only).
    tool_calls: the functions it wants to be called (chat only).
    """

    text: str
    tokens: list[int]
    finish_reason: EndReason
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant's message, ready to be appended to the messages of the chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        return brief(self)


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """A part of an answer, as it comes.

    text: more of the answer.
    reasoning: more of what the model writes before its answer.
    tool_calls: calls that are complete now.
    finish_reason, usage: with the last chunk, as in `Completion`.
    completion: with the last chunk, the whole answer; its `message` can be appended to the messages.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: EndReason | None = None
    usage: Usage | None = None
    completion: Completion | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return brief(self)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of numbers is one."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(prompts)
    if all(isinstance(p, (int, np.integer)) for p in several):
        return [cast(list[int], several)]
    return cast(list[Prompt], several)


def prompt_request(prompt: Prompt, params: SamplingParams) -> GenerateRequest:
    """A raw prompt as a request."""
    if isinstance(prompt, str):
        return GenerateRequest(params, text=prompt)
    return GenerateRequest(params, tokens=tuple(int(t) for t in prompt))


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


def embedding_request(text: Prompt, pooling: Pooling) -> GenerateRequest:
    """One vector for a text, as a request."""
    if pooling not in get_args(Pooling):
        raise OptionError(f"pooling is one of {', '.join(get_args(Pooling))}, not {pooling!r}")
    return replace(prompt_request(text, SamplingParams()), pooling=pooling, whole=True)


def completion(events: Sequence[Event]) -> Completion:
    """A finished request as one object."""
    last = events[-1]
    tokens = [e.token for e in events if e.token is not None]
    logprobs = [e.logprob for e in events if e.kind == "token" and e.logprob is not None]
    scores = [score for e in events for score in e.prompt_logprobs]
    text = "".join(e.text for e in events)
    return Completion(
        text,
        tokens,
        last.finish_reason or "stop",
        last.usage,
        last.timings,
        logprobs,
        [None, *scores] if any(e.kind == "prompt" for e in events) else [],
    )
