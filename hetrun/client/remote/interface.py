"""What the client of a running server needs of an API, and what all of them share."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from hetrun.client.events import GenerateRequest, TokenLogprob
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError

Json = Mapping[str, Any]

THINKING, THOUGHT = "<think>\n", "\n</think>\n\n"  # around reasoning, as front ends fold it


class JsonSender(Protocol):
    """Sends one request; the status and the JSON object of the answer."""

    def __call__(self, method: str, path: str, body: Json | None = None) -> Awaitable[tuple[int, Json]]: ...


class RemoteOrder(NamedTuple):
    """How an answer is asked for."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One event of a stream: text and reasoning together, as the model wrote them."""

    text: str = ""
    thinking: bool = False  # what follows is reasoning
    finish_reason: str = ""
    logprob: TokenLogprob | None = None
    figures: Json = field(default_factory=dict)  # usage and timings, as in OpenAI's and llama.cpp's API


class RemoteApi(Protocol):
    """An API of a server. Models are described as in the list of hetrun's own server."""

    name: str  # of the option --api
    title: str  # in sentences
    needs_list: bool  # False: many servers do not list their models, and a model must be named
    load_path: str  # a GET there, with the model in the query, loads it; empty: the first answer does

    def headers(self, key: str | None) -> list[tuple[str, str]]:
        """The headers of every request besides those of HTTP."""
        ...

    async def listed(self, ask: JsonSender, url: str) -> list[Json]:
        """The server's models; raises UserError if it does not say."""
        ...

    async def described(self, model: Json, ask: JsonSender) -> Json:
        """The same model with all that the server says of it."""
        ...

    def order(self, request: GenerateRequest, model: Json) -> RemoteOrder:
        """The route and the body; OptionError names what the API cannot express."""
        ...

    def piece_of(self, said: Json, thinking: bool) -> StreamPiece:
        """An object of the stream; `thinking`: the last piece was reasoning."""
        ...


def together(thought: str, text: str, thinking: bool) -> tuple[str, bool]:
    """Reasoning and text in one, with marks where one follows the other; whether reasoning goes on."""
    if thought and not thinking:
        return THINKING + thought, True
    if text and thinking and not thought:
        return THOUGHT + text, False
    return thought + text, thinking


def differing(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """The parameters that are not at their default; other servers know few of these names."""
    usual = SamplingParams()
    yield from params.more.items()
    for one in fields(params):
        value = getattr(params, one.name)
        if one.name != "more" and value != getattr(usual, one.name):
            yield one.name, list(value) if isinstance(value, tuple) else value


def refuse(title: str, name: str) -> OptionError:
    """The error for a sampling parameter that an API does not have."""
    return OptionError(f"{title} API has no {name}: leave out --{name.replace('_', '-')}")


def text_of(content: object) -> str:
    """A message's content as text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
