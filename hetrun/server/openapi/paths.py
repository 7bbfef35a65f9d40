"""Paths and methods, and the possible statuses of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hetrun.server.anthropic_format.errors import OVERLOADED, is_here
from hetrun.server.errors import OLLAMA
from hetrun.server.llamacpp import slots
from hetrun.server.openapi import anthropic, ollama, responses as replies
from hetrun.server.openapi.schemas import NUMBER, STRING, Json, array, either, enum, ref, struct
from hetrun.server.routes import rerank, unsupported

JSON = "application/json"
LINES = "application/x-ndjson"
# Errors: the names of responses, by status.
STATUSES = {
    400: ("Wrong", "The request is wrong; param names the field."),
    401: ("NoKey", "The key is missing or wrong."),
    403: ("Page", "Web pages of this origin may not use the server."),
    404: ("Unknown", "There is no such model here."),
    405: ("Method", "Another method is needed."),
    409: ("InUse", "The model is in use."),
    408: ("TooSlow", "The body was not complete in time."),
    413: ("TooLarge", "The body is too large."),
    421: ("WrongHost", "The request is for another host than this machine."),
    429: ("Busy", "More than can be done now: Retry-After says when to come again."),
    500: ("Failed", "A mistake of the server."),
    501: ("NotHere", "Others have this, and this server has not; the message says what to use instead."),
    503: ("NoEngine", "No engine is available."),
    504: ("TooLate", "The deadline has passed."),
    OVERLOADED: ("Overloaded", "More than can be done now: Retry-After says when to come again."),
}
MODEL: tuple[Json, ...] = (
    {"name": "model", "in": "query", "schema": STRING, "description": "which, where there are several"},
)
RESPONSES: Json = {
    f"{prefix}{name}": {"description": said, "content": {JSON: {"schema": ref(f"{prefix}Error")}}}
    for prefix in ("", "Ollama", "Anthropic")
    for name, said in STATUSES.values()
}
ALWAYS = (401, 403, 405, 421, 500)
BODY = (400, 408, 413)  # for requests with a body
ENGINE = (429, 503, 504)  # for requests that use the engine


@dataclass(frozen=True)
class PathOperation:
    """One method of equivalent paths."""

    paths: tuple[str, ...]
    method: str
    summary: str
    answer: dict[str, Json]  # by media types
    body: Json | None = None
    statuses: Iterable[int] = ()
    more: Json = field(default_factory=dict)  # further answers
    query: tuple[Json, ...] = ()
    open: bool = False  # whether it needs no key
    optional_body: bool = False


def _json(schema: Json) -> dict[str, Json]:
    return {JSON: schema}


_ANSWER = (*BODY, 404, *ENGINE)
_LOOK = (400, 404, *ENGINE)
_HEALTH: Json = {"503": {"description": "not now", "content": {JSON: {"schema": ref("Health")}}}}
_NO_SLOT: Json = {
    "name": "fail_on_no_slot",
    "in": "query",
    "schema": STRING,
    "description": "503 if no place is idle",
}
_ACTION: Json = {"name": "action", "in": "query", "required": True, "schema": enum(*slots.ACTIONS)}
_KEPT = ("/v1/responses/{name}", "/responses/{name}")
OPERATIONS = (
    PathOperation(
        ("/v1/chat/completions", "/chat/completions"),
        "post",
        "Answer a conversation",
        {JSON: ref("ChatAnswer"), "text/event-stream": replies.STREAM},
        ref("ChatRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/v1/completions",),
        "post",
        "Continue texts, or score them",
        {JSON: ref("CompletionAnswer"), "text/event-stream": replies.STREAM},
        ref("CompletionRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/completion", "/completions"),
        "post",
        "Continue texts, in llama.cpp's own form",
        {
            JSON: either(ref("NativeAnswer"), array(ref("NativeAnswer"))),
            "text/event-stream": replies.NATIVE_STREAM,
        },
        ref("NativeRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/infill",),
        "post",
        "Fill in the middle of a text, in llama.cpp's own form",
        {JSON: ref("NativeAnswer"), "text/event-stream": replies.NATIVE_STREAM},
        ref("InfillRequest"),
        (*_ANSWER, 501),
    ),
    PathOperation(
        rerank.PATHS,
        "post",
        "Rank documents by how well they answer a query",
        _json(ref("Ranking")),
        ref("RerankRequest"),
        (*_ANSWER, 501),
    ),
    PathOperation(
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        "post",
        "Count the tokens of a conversation",
        _json(replies.INPUT_TOKENS),
        ref("ChatRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/v1/responses/input_tokens", "/responses/input_tokens"),
        "post",
        "Count the tokens of a response's input",
        _json(replies.INPUT_TOKENS),
        ref("ResponseRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/v1/responses", "/responses"),
        "post",
        "Answer, and keep the answer to go on from",
        {JSON: ref("Response"), "text/event-stream": replies.NAMED_STREAM},
        ref("ResponseRequest"),
        _ANSWER,
    ),
    PathOperation(_KEPT, "get", "A response that was kept", _json(ref("Response")), statuses=(400, 404)),
    PathOperation(_KEPT, "delete", "Forget a response", _json(replies.DROPPED), statuses=(404,)),
    PathOperation(
        ("/v1/embeddings", "/embeddings"),
        "post",
        "Make a vector of each text",
        _json(ref("Embeddings")),
        ref("EmbeddingRequest"),
        _ANSWER,
    ),
    PathOperation(("/v1/models", "/models"), "get", "All models", _json(ref("Models")), statuses=(503,)),
    PathOperation(("/v1/models/{name}",), "get", "One model", _json(ref("Model")), statuses=(404, 503)),
    PathOperation(
        ("/tokenize",),
        "post",
        "The tokens of a text",
        _json(replies.TOKENIZED),
        ref("TokenizeRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/detokenize",),
        "post",
        "The text of tokens",
        _json(replies.DETOKENIZED),
        ref("DetokenizeRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/apply-template",),
        "post",
        "The text that messages become",
        _json(replies.RENDERED),
        ref("ApplyTemplateRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/tokenizer_info",),
        "get",
        "The vocabulary and the template",
        _json(replies.TOKENIZER),
        statuses=_LOOK,
        query=MODEL,
    ),
    PathOperation(("/plan",), "get", "What runs where", _json(replies.PLAN), statuses=_LOOK, query=MODEL),
    PathOperation(("/props",), "get", "Settings", _json(replies.PROPS), statuses=_LOOK, query=MODEL),
    PathOperation(
        ("/slots",),
        "get",
        "Places for running requests, and those that wait for one",
        _json(replies.SLOTS),
        statuses=_LOOK,
        query=(*MODEL, _NO_SLOT),
    ),
    PathOperation(
        ("/slots/{id}",),
        "post",
        "Save, restore or forget what was computed last in a slot",
        _json(replies.SLOT_DONE),
        ref("SlotFile"),
        (*_ANSWER, 501),
        query=(*MODEL, _ACTION),
        optional_body=True,
    ),
    PathOperation(
        ("/machine",),
        "get",
        "Where layers run, memory, rates and requests",
        _json(replies.MACHINE),
        statuses=_LOOK,
        query=MODEL,
    ),
    PathOperation(
        ("/what-if",),
        "post",
        "What other options would mean for memory and speed",
        _json(replies.FORESEEN),
        ref("WhatIfRequest"),
        _ANSWER,
    ),
    PathOperation(("/metrics",), "get", "Numbers for Prometheus", {"text/plain": STRING}, statuses=ENGINE),
    PathOperation(
        ("/",),
        "get",
        "A page with a chat for browsers, addresses for others",
        {"text/html": STRING, "text/plain": STRING},
        open=True,
    ),
    PathOperation(
        ("/health", "/v1/health"),
        "get",
        "Whether requests are answered",
        _json(ref("Health")),
        more=_HEALTH,
        open=True,
    ),
    PathOperation(
        ("/v1/ram",),
        "post",
        "Change the memory that everything may take",
        _json(replies.RAM),
        ref("RamRequest"),
        (*BODY, *ENGINE),
    ),
    PathOperation(("/openapi.json",), "get", "This document", _json(replies.DOCUMENT)),
    PathOperation(
        ("/v1/messages",),
        "post",
        "Anthropic's: answer a conversation",
        {JSON: ref("AnthropicMessage"), "text/event-stream": anthropic.STREAM},
        ref("AnthropicRequest"),
        (*_ANSWER, OVERLOADED),
    ),
    PathOperation(
        ("/v1/messages/count_tokens",),
        "post",
        "Anthropic's: the number of tokens of a conversation",
        _json(anthropic.COUNT),
        ref("AnthropicCountRequest"),
        (*_ANSWER, OVERLOADED),
    ),
    PathOperation(
        ("/api/chat",),
        "post",
        "Ollama's: answer a conversation",
        {JSON: ref("OllamaChatAnswer"), LINES: ollama.LINES},
        ref("OllamaChatRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/api/generate",),
        "post",
        "Ollama's: answer or continue a text",
        {JSON: ref("OllamaGenerated"), LINES: ollama.LINES},
        ref("OllamaGenerateRequest"),
        (*_ANSWER, 501),
    ),
    PathOperation(
        ("/api/embed",),
        "post",
        "Ollama's: make a vector of each text",
        _json(ref("OllamaEmbeddings")),
        ref("OllamaEmbedRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/api/embeddings",),
        "post",
        "Ollama's: make a vector of a text, not of length 1",
        _json(struct({"embedding": array(NUMBER)})),
        ref("OllamaEmbeddingsRequest"),
        _ANSWER,
    ),
    PathOperation(("/api/version",), "get", "Ollama's: versions", _json(ref("OllamaVersion"))),
    PathOperation(("/api/tags",), "get", "Ollama's: all models", _json(ref("OllamaModels")), statuses=ENGINE),
    PathOperation(
        ("/api/ps",), "get", "Ollama's: loaded models", _json(ref("OllamaLoadedModels")), statuses=ENGINE
    ),
    PathOperation(
        ("/api/show",),
        "post",
        "Ollama's: one model",
        _json(ref("OllamaModel")),
        ref("OllamaShowRequest"),
        _ANSWER,
    ),
    PathOperation(
        ("/api/pull",),
        "post",
        "Ollama's: download a model",
        {JSON: ref("OllamaProgress"), LINES: ollama.LINES},
        ref("OllamaPullRequest"),
        (*BODY, *ENGINE, 501),
    ),
    PathOperation(
        ("/api/delete",),
        "delete",
        "Ollama's: delete a model",
        {},
        ref("OllamaDeleteRequest"),
        (*BODY, *ENGINE, 404, 409, 501),
    ),
)


def paths() -> Json:
    """All of them."""
    found: dict[str, Json] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            found.setdefault(path, _parameters(path))[operation.method] = _described(operation, path)
    for path, why in unsupported.REFUSED.items():
        path = written(path)
        refusal: Json = {"summary": why, "deprecated": True, "responses": _failures((501,), path)}
        found[path] = _parameters(path)
        for method in map(str.lower, unsupported.ANY):
            found[path][method] = refusal | {"operationId": _id(method, path)}
    return dict(found)


def written(path: str) -> str:
    """A route's path in OpenAPI's notation: without the types of its parameters."""
    return path.replace(":path}", "}")


def _described(operation: PathOperation, path: str) -> Json:
    answer = {kind: {"schema": schema} for kind, schema in operation.answer.items()}
    responses: Json = {"200": {"description": operation.summary, "content": answer}}
    responses |= _failures(operation.statuses, path) | operation.more
    said: Json = {"summary": operation.summary, "operationId": _id(operation.method, path)}
    if operation.body is not None:
        said["requestBody"] = {
            "required": not operation.optional_body,
            "content": {JSON: {"schema": operation.body}},
        }
    if operation.query:
        said["parameters"] = list(operation.query)
    if operation.open:
        said["security"] = []
    return said | {"responses": responses}


def _failures(statuses: Iterable[int], path: str) -> Json:
    prefix = "Ollama" if path.startswith(OLLAMA) else "Anthropic" if is_here(path) else ""
    return {
        str(status): {"$ref": f"#/components/responses/{prefix}{STATUSES[status][0]}"}
        for status in sorted({*ALWAYS, *statuses})
    }


def _parameters(path: str) -> Json:
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in names]
    return {"parameters": parameters} if parameters else {}


def _id(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"\w+", path)])
