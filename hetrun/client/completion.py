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
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError, UserError
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
