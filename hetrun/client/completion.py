"""What `LLM` is given and what it gives back: prompts as requests, and events as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast, get_args

import numpy as np

from hetrun.client.events import Event, FinishReason, GenerateRequest, Timings, TokenLogprob, Usage
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError
from hetrun.graph.pooling import Pooling

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text, the tokens that were generated, and why it ended."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # One for each token of the prompt, if asked for; nothing comes before the first.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


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
