"""GET /openapi.json: this server's API, in OpenAPI 3.1."""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.server.json_stream import json_text
from hetrun.server.openapi import ollama, requests, responses
from hetrun.server.openapi.paths import RESPONSES, paths
from hetrun.server.openapi.schemas import Json
from hetrun.server.service import Service

SCHEMAS: Json = {
    "Message": requests.MESSAGE,
    "ChatRequest": requests.CHAT,
    "CompletionRequest": requests.COMPLETION,
    "NativeRequest": requests.NATIVE,
    "InfillRequest": requests.INFILL,
    "RerankRequest": requests.RERANK,
    "SlotFile": requests.SLOT_FILE,
    "ResponseRequest": requests.RESPONSE,
    "EmbeddingRequest": requests.EMBEDDING,
    "TokenizeRequest": requests.TOKENIZE,
    "DetokenizeRequest": requests.DETOKENIZE,
    "ApplyTemplateRequest": requests.APPLY_TEMPLATE,
    "RamRequest": requests.RAM,
    "WhatIfRequest": requests.WHAT_IF,
    "ChatAnswer": responses.CHAT,
    "CompletionAnswer": responses.COMPLETION,
    "NativeAnswer": responses.NATIVE,
    "Ranking": responses.RANKING,
    "Response": responses.RESPONSE,
    "Embeddings": responses.EMBEDDINGS,
    "Models": responses.MODELS,
    "Health": responses.HEALTH,
    "Error": responses.ERROR,
    "Usage": responses.USAGE,
    "Timings": responses.TIMINGS,
    "Model": responses.MODEL,
    **ollama.SCHEMAS,
}


def routes(service: Service) -> list[Route]:
    async def described(request: Request) -> Response:
        return Response(_as_text(), media_type="application/json")

    return [Route("/openapi.json", described)]


def document() -> Json:
    """The document; it doesn't depend on the model or on the server's options."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hetrun",
            "version": __version__,
            "description": "OpenAI's API with llama.cpp's and vLLM's names for what it lacks, and Ollama's. "
            "Fields that are not described are ignored, unless the server was started with --strict.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # Without --api-key, no key is required.
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths(),
        "components": {
            "schemas": SCHEMAS,
            "responses": RESPONSES,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


@cache
def _as_text() -> str:
    return json_text(document())
