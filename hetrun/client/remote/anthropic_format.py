"""Requests and events in Anthropic's format: messages with blocks, and named events."""

from __future__ import annotations

from typing import Any

from hetrun.client.events import GenerateRequest
from hetrun.client.pictures import anthropic_content
from hetrun.client.remote.interface import (
    Json,
    JsonSender,
    RemoteOrder,
    StreamPiece,
    differing,
    refuse,
    text_of,
    together,
)
from hetrun.client.remote.openai_format import failure, number
from hetrun.errors import OptionError

TITLE = "Anthropic's"
VERSION = "2023-06-01"  # of the API
NO_ROUTE = (404, 405, 501)
USUAL_LIMIT = 8192  # tokens of an answer, where neither the user nor the server's list says it
LEAST_THOUGHT = 1024  # tokens of reasoning that may be asked for
NAMES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_sequences"}
APART = ("max_tokens", "seed")  # `run` chooses a seed for every answer
REASONS = {"max_tokens": "length", "model_context_window_exceeded": "length"}


class AnthropicApi:
    """Anthropic's messages (`RemoteApi`)."""

    name = "anthropic"
    title = TITLE
    needs_list = False
    load_path = ""

    def headers(self, key: str | None) -> list[tuple[str, str]]:
        return [("anthropic-version", VERSION), *([("x-api-key", key)] if key else [])]

    async def listed(self, ask: JsonSender, url: str) -> list[Json]:
        status, said = await ask("GET", "/v1/models?limit=1000")
        if status in NO_ROUTE:
            return []
        models = said.get("data")
        if status != 200 or not isinstance(models, list):
            raise failure(url, status, said)
        return [_model(one) for one in models if isinstance(one, dict) and isinstance(one.get("id"), str)]

    async def described(self, model: Json, ask: JsonSender) -> Json:
        return model

    def order(self, request: GenerateRequest, model: Json) -> RemoteOrder:
        if request.messages is None or request.echo:
            raise OptionError(f"{TITLE} API answers messages only: leave out --raw")
        params = request.params
        limit = params.max_tokens or int(number(model.get("max_tokens"))) or USUAL_LIMIT
        body: dict[str, Any] = {"model": model["id"], "stream": True, "max_tokens": limit}
        for name, value in differing(params):
            if name in NAMES:
                body[NAMES[name]] = [value] if name == "stop" and isinstance(value, str) else value
            elif name not in APART:
                raise refuse(TITLE, name)
        said = [(str(m.get("role")), text_of(m.get("content"))) for m in request.messages]
        if system := "\n\n".join(text for role, text in said if role in ("system", "developer")):
            body["system"] = system
        files = iter(request.pictures)
        contents = [(str(m.get("role")), anthropic_content(m, files)) for m in request.messages]
        body["messages"] = [
            {"role": role, "content": blocks if any(b["type"] == "image" for b in blocks) else text}
            for (role, text), (_, blocks) in zip(said, contents, strict=True)
            if role in ("user", "assistant") and (text or blocks)
        ]
        return RemoteOrder("/v1/messages", {**body, **_thinking(request, limit)})

    def piece_of(self, said: Json, thinking: bool) -> StreamPiece:
        match said:
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                return StreamPiece(*together("", text, thinking))
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}}:
                return StreamPiece(*together(text, "", thinking))
            case {"type": "content_block_start", "content_block": {"type": "text", "text": str(text)}}:
                return StreamPiece(*together("", text, thinking))
            case {"type": "message_start", "message": {"usage": dict(begun)}}:
                return StreamPiece("", thinking, figures={"usage": _usage(begun)})
            case {"type": "message_delta", "delta": {"stop_reason": str(reason)}, **more}:
                usage: object = more.get("usage")
                figures = {"usage": _usage(usage)} if isinstance(usage, dict) else {}
                return StreamPiece("", thinking, REASONS.get(reason, "stop"), figures=figures)
        return StreamPiece("", thinking)


def _model(said: Json) -> Json:
    """A model of the list; hetrun's own server says more of it."""
    meta = said.get("meta")
    known: Json = meta if isinstance(meta, dict) else {}
    return {
        **said,
        "meta": {"name": said.get("display_name"), "n_ctx": said.get("max_input_tokens"), **known},
    }


def _thinking(request: GenerateRequest, limit: int) -> Json:
    found: dict[str, Any] = {}
    for name, value in request.template_options.items():
        if name != "enable_thinking":
            raise OptionError(f"{TITLE} API gives a template no {name}")
        found["thinking"] = {"type": "disabled"}
        if value and limit > LEAST_THOUGHT:  # the budget is a part of the limit
            found["thinking"] = {"type": "enabled", "budget_tokens": max(limit // 2, LEAST_THOUGHT)}
    return found


def _usage(said: Json) -> Json:
    """The counts that are in an event, by OpenAI's names: there the whole prompt counts, cached or not."""
    found: dict[str, Any] = {}
    if said.get("input_tokens") is not None:
        cached = number(said.get("cache_read_input_tokens"))
        written = number(said.get("cache_creation_input_tokens"))
        found["prompt_tokens"] = int(number(said["input_tokens"]) + cached + written)
        found["prompt_tokens_details"] = {"cached_tokens": int(cached)}
    if number(said.get("output_tokens")):
        found["completion_tokens"] = int(said["output_tokens"])
    return found
