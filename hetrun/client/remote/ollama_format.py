"""Requests and events in Ollama's format: JSON lines, and options of its own names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hetrun.client.events import GenerateRequest, Message
from hetrun.client.pictures import in_base64, pictures_of
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
from hetrun.client.remote.openai_format import failure, number, score_of
from hetrun.errors import OptionError

TITLE = "Ollama's"
OPTIONS = frozenset(  # with the same names and meanings
    "temperature top_k top_p min_p typical_p repeat_penalty repeat_last_n frequency_penalty presence_penalty "
    "mirostat mirostat_tau mirostat_eta seed stop".split()
)
APART = ("max_tokens", "logprobs", "json_schema")
NANO = 1e9


class OllamaApi:
    """Ollama's own API (`RemoteApi`)."""

    name = "ollama"
    title = TITLE
    needs_list = True
    load_path = ""

    def headers(self, key: str | None) -> list[tuple[str, str]]:
        return [("Authorization", f"Bearer {key}")] if key else []

    async def listed(self, ask: JsonSender, url: str) -> list[Json]:
        """With their states: what /api/ps does not list is not loaded."""
        status, said = await ask("GET", "/api/tags")
        models = said.get("models")
        if status != 200 or not isinstance(models, list):
            raise failure(url, status, said)
        status, now = await ask("GET", "/api/ps")
        running = now.get("models") if status == 200 else None
        loaded = {_name(one): one for one in running if _name(one)} if isinstance(running, list) else None
        return [_model(one, loaded) for one in models if _name(one)]

    async def described(self, model: Json, ask: JsonSender) -> Json:
        """With the architecture and the context; of a loaded model the context is the one in force."""
        status, said = await ask("POST", "/api/show", {"model": model["id"]})
        info = said.get("model_info")
        if status != 200 or not isinstance(info, dict):
            return model
        kind = str(info.get("general.architecture") or "")
        found = {
            "architecture": kind,
            "n_params": info.get("general.parameter_count"),
            "n_ctx_train": info.get(f"{kind}.context_length"),
        }
        if isinstance(can := said.get("capabilities"), list):
            found["vision"] = "vision" in can
        return {**model, "meta": {**found, **model["meta"]}}

    def order(self, request: GenerateRequest, model: Json) -> RemoteOrder:
        body: dict[str, Any] = {"model": model["id"], "stream": True, "options": _options(request)}
        params = request.params
        if params.json_schema is not None:
            schema = params.json_schema
            body["format"] = json.loads(schema) if isinstance(schema, str) else schema
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        if request.echo or request.tokens is not None:
            raise OptionError(f"{TITLE} API gives no scores of a prompt, and takes no tokens")
        for name, value in request.template_options.items():
            if name != "enable_thinking":
                raise OptionError(f"{TITLE} API gives a template no {name}")
            body["think"] = bool(value)
        if request.messages is None:
            if request.pictures:
                raise OptionError(f"{TITLE} API takes pictures with messages only: leave out --raw")
            return RemoteOrder("/api/generate", body | {"prompt": request.text, "raw": True})
        files = iter(request.pictures)
        return RemoteOrder("/api/chat", body | {"messages": [_message(m, files) for m in request.messages]})

    def piece_of(self, said: Json, thinking: bool) -> StreamPiece:
        message = said.get("message")
        inner: Json = message if isinstance(message, dict) else said
        thought, text = (
            str(inner.get("thinking") or ""),
            str(inner.get("content") or inner.get("response") or ""),
        )
        shown, thinking = together(thought, text, thinking)
        score = score_of({"content": said.get("logprobs")})
        if not said.get("done"):
            return StreamPiece(shown, thinking, logprob=score)
        return StreamPiece(shown, thinking, str(said.get("done_reason") or "stop"), score, _figures(said))


def _name(model: object) -> str:
    name = (model.get("name") or model.get("model")) if isinstance(model, dict) else None
    return name if isinstance(name, str) else ""


def _model(said: Json, loaded: dict[str, Json] | None) -> Json:
    """`loaded`: what is loaded, by name; None: the server does not say."""
    name = _name(said)
    meta: dict[str, object] = {"size": said.get("size")}
    if loaded is None:
        return {"id": name, "meta": meta}
    if (now := loaded.get(name)) and number(now.get("context_length")):
        meta["n_ctx"] = now["context_length"]
    return {"id": name, "status": {"value": "loaded" if now else "unloaded"}, "meta": meta}


def _options(request: GenerateRequest) -> Json:
    found: dict[str, Any] = {}
    for name, value in differing(request.params):
        if name in OPTIONS:
            found[name] = value
        elif name not in APART:
            raise refuse(TITLE, name)
    if request.params.max_tokens is not None:
        found["num_predict"] = request.params.max_tokens
    return found


def _figures(said: Json) -> Json:
    read, written = number(said.get("prompt_eval_count")), number(said.get("eval_count"))
    usage = {"prompt_tokens": int(read), "completion_tokens": int(written)}
    rates = {
        "prompt_per_second": _rate(read, said.get("prompt_eval_duration")),
        "predicted_per_second": _rate(written, said.get("eval_duration")),
    }
    return {"usage": usage, "timings": rates}


def _rate(count: float, duration: object) -> float:
    spent = number(duration)
    return count * NANO / spent if spent > 0 else 0.0


def _message(message: Message, files: Iterator[bytes]) -> Json:
    images = [in_base64(file) for file in pictures_of(message, files)]
    said = {"role": message.get("role"), "content": text_of(message.get("content"))}
    return said | ({"images": images} if images else {})
