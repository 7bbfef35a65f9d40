"""Requests and events in OpenAI's format, for a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from hetrun.client.events import Event, FinishReason, GenerateRequest, ModelInfo, Timings, TokenLogprob, Usage
from hetrun.client.pictures import in_base64, openai_messages
from hetrun.client.remote.interface import (
    THOUGHT,
    Json,
    JsonSender,
    RemoteOrder,
    StreamPiece,
    differing,
    together,
)
from hetrun.errors import HetrunError, UserError

REASONS: dict[str, FinishReason] = {"length": "length", "cancelled": "cancelled"}
MOST_SAID = 500  # characters of a server's error message
# Fields that have another name or place there.
MOST = 1 << 62  # of a number
MOST_SCORES = 5  # alternatives of a token that OpenAI's completions give
_APART = ("logprobs", "prompt_logprobs", "max_tokens", "logit_bias")


class OpenAIApi:
    """OpenAI's API, with what hetrun and llama.cpp add to it (`RemoteApi`)."""

    name = "openai"
    title = "OpenAI's"
    needs_list = True
    load_path = "/props"

    def headers(self, key: str | None) -> list[tuple[str, str]]:
        return [("Authorization", f"Bearer {key}")] if key else []

    async def listed(self, ask: JsonSender, url: str) -> list[Json]:
        status, said = await ask("GET", "/v1/models")
        models = said.get("data")
        if status != 200 or not isinstance(models, list):
            raise failure(url, status, said)
        return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]

    async def described(self, model: Json, ask: JsonSender) -> Json:
        return model

    def order(self, request: GenerateRequest, model: Json) -> RemoteOrder:
        return asked_for(request, str(model["id"]))

    def piece_of(self, said: Json, thinking: bool) -> StreamPiece:
        return piece_of(said, thinking)


def asked_for(request: GenerateRequest, model: str) -> RemoteOrder:
    """The route and the body of a request."""
    params = request.params
    body: dict[str, Any] = {"model": model, "stream": not request.echo}
    body |= {name: value for name, value in differing(params) if name not in _APART}
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if not request.echo:
        body["stream_options"] = {"include_usage": True}
    if request.messages is not None:
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        if request.template_options:
            body["chat_template_kwargs"] = dict(request.template_options)
        return RemoteOrder("/v1/chat/completions", body | {"messages": openai_messages(request)})
    most = params.prompt_logprobs if request.echo else params.logprobs
    body |= {"logprobs": min(most, MOST_SCORES)} if most is not None else {}
    body |= {"echo": True} if request.echo else {}
    prompt: object = request.text if request.text is not None else list(request.tokens or ())
    if request.pictures:
        files = [in_base64(file) for file in request.pictures]
        prompt = {"prompt_string": request.text, "multimodal_data": files}
    return RemoteOrder("/v1/completions", body | {"prompt": prompt})


def piece_of(said: Json, thinking: bool) -> StreamPiece:
    """Text and reasoning together, as the model wrote them."""
    choices = said.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    inner = choice.get("delta")
    delta: Json = inner if isinstance(inner, dict) else choice
    thought = next((t for n in ("reasoning_content", "reasoning") if isinstance(t := delta.get(n), str)), "")
    text = next((t for n in ("content", "text") if isinstance(t := delta.get(n), str)), "")
    shown, thinking = together(thought, text, thinking)
    reason, score = choice.get("finish_reason"), score_of(choice.get("logprobs"))
    figures = {name: said[name] for name in ("usage", "timings") if said.get(name)}
    return StreamPiece(shown, thinking, reason if isinstance(reason, str) else "", score, figures)


def score_of(said: object) -> TokenLogprob | None:
    """Of the first token; a stream has one in each piece."""
    match said:
        case {"content": [{"token": str(token), "logprob": int() | float() as logprob, **more}, *_]}:
            top = more.get("top_logprobs")
            known = [t for t in top if isinstance(t, dict)] if isinstance(top, list) else []
            pairs = [(str(t.get("token", "")), float(t.get("logprob", 0.0))) for t in known]
            return _scored(token, float(logprob), pairs)
    return None


def _scored(token: str, logprob: float, top: list[tuple[str, float]]) -> TokenLogprob:
    """OpenAI's API has no token ids."""
    pieces = tuple(text.encode() for text, _ in top)
    return TokenLogprob(-1, logprob, tuple((-1, p) for _, p in top), token.encode(), pieces)


def echoed(said: Json) -> Iterator[Event]:
    """A prompt with its log-probabilities, as completions echo it."""
    match said.get("choices"):
        case [{"logprobs": {"tokens": [*tokens], "token_logprobs": [*scores], **more}}, *_]:
            tops = more.get("top_logprobs")
            found: list[TokenLogprob] = []
            for i, (token, score) in enumerate(zip(tokens, scores, strict=False)):
                if isinstance(token, str) and isinstance(score, int | float):
                    top = tops[i] if isinstance(tops, list) and i < len(tops) else None
                    pairs = [(str(t), float(p)) for t, p in top.items()] if isinstance(top, dict) else []
                    found.append(_scored(token, float(score), sorted(pairs, key=lambda pair: -pair[1])))
            yield Event("prompt", prompt_logprobs=tuple(found))
            yield Event("done", finish_reason="length")
        case _:
            raise UserError("the server gives no log-probabilities of prompts")


def last_of(end: Json, count: int, begun: float, first: float, now: float, thinking: bool) -> Event:
    """The last event, with the server's own figures if it sends them, else with those measured here."""
    usage, timings = end.get("usage"), end.get("timings")
    known: Json = usage if isinstance(usage, dict) else {}
    times: Json = timings if isinstance(timings, dict) else {}
    details = known.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    tokens = number(known.get("completion_tokens")) or count
    seen = (count - 1) / (now - first) if count > 1 and now > first else 0.0
    return Event(
        "done",
        THOUGHT.rstrip() if thinking else "",
        finish_reason=REASONS.get(str(end.get("finish_reason")), "stop"),
        usage=Usage(int(number(known.get("prompt_tokens"))), int(tokens), int(number(cached))),
        timings=Timings(
            ttft_s=first - begun if first else 0.0,
            prompt_tok_s=number(times.get("prompt_per_second")),
            decode_tok_s=number(times.get("predicted_per_second")) or seen,
        ),
    )


def info_of(model: Json, url: str) -> ModelInfo:
    """A server's description of a model; missing values are empty."""
    meta = model.get("meta")
    known: Json = meta if isinstance(meta, dict) else {}

    def count(*names: str) -> int:
        return next((int(n) for name in names if (n := number(known.get(name)))), 0)

    def text(name: str) -> str:
        return str(known.get(name) or "")

    return ModelInfo(
        name=text("name") or str(model["id"]),
        path=str(model["id"]),
        architecture=text("architecture") or f"at {url}",
        n_vocab=count("n_vocab"),
        context=count("n_ctx", "n_ctx_train"),
        parameters=count("n_params"),
        file_bytes=count("size"),
        template_origin=text("chat_template") or "the server",
        load_s=0.0,
        listed_as=str(model["id"]),
        pictures=_reads_pictures(model, known),
    )


def _reads_pictures(model: Json, known: Json) -> bool:
    """Whether the model reads pictures; true where the server does not say it, which then answers for it."""
    if isinstance(said := known.get("vision"), bool):
        return said
    match model:
        case {"architecture": {"input_modalities": list(takes)}}:
            return "image" in takes
    return True


def status_of(model: Json) -> str:
    """The state of a model in a server's list, in llama.cpp's terms: loaded, loading, unloaded, failed;
    empty if the server doesn't say."""
    status = model.get("status")
    return str(status.get("value", "")) if isinstance(status, dict) else ""


def read(kind: Any, said: object) -> Any:  # noqa: ANN401 - of the kind that is asked for
    """Parse one of our dataclasses from a server's JSON; raises ValueError if it is invalid. Missing fields
    get their defaults, if they have one."""
    inner, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(said, dict):
        kinds = get_type_hints(kind)
        known = {f.name: read(kinds[f.name], said[f.name]) for f in fields(kind) if f.name in said}
        try:
            return cast("Callable[..., object]", kind)(**known)
        except TypeError as error:
            raise ValueError(str(error)) from None
    if inner is UnionType:
        return None if said is None else read(next(part for part in parts if part is not NoneType), said)
    if inner is tuple and isinstance(said, list):
        return tuple(read(parts[0], one) for one in said)
    if inner is Mapping and isinstance(said, dict):
        return {str(name): read(parts[1], one) for name, one in said.items()}
    if inner is Literal and said in parts:
        return said
    if kind is float and isinstance(said, int | float) and not isinstance(said, bool) and abs(said) < MOST:
        return float(said)
    if kind is int and type(said) is int and abs(said) < MOST:
        return said
    if kind in (str, bool) and type(said) is kind:
        return said
    raise ValueError(f"{str(said)[:40]!r} is no {getattr(kind, '__name__', kind)}")


def failure(url: str, status: int, said: Json) -> HetrunError:
    """The server's error message, if it sent one."""
    error = said.get("error")
    why = error.get("message") if isinstance(error, dict) else error
    told = str(why or said.get("detail") or f"it answers with status {status}")[:MOST_SAID]
    hint = "; give its key with --api-key" if status in (401, 403) else ""
    return UserError(f"{url}: {told}{hint}")


def number(value: object) -> float:
    """A number; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
