"""Endpoints of other servers that this one doesn't have, each with a sentence on what to use instead.

501, because the request may be valid but no retry will succeed. A path that no server has is 404, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.server.errors import FINAL, ApiError
from hetrun.server.service import Service

ANY = ["GET", "POST", "PUT", "PATCH", "DELETE"]
CHAT = "POST /v1/chat/completions"
MEDIA = "This server reads and writes text only"
ADAPTERS = "LoRA adapters are not supported: serve a model into which they were merged"
ACCOUNTS = "This server knows no accounts at Ollama"
CLOUD = "This server uses no services on the internet"
LOADED = "The model of this server is chosen when it starts (hetrun serve -m MODEL)"

REFUSED: Mapping[str, str] = {
    "/v1/messages": f"Anthropic's API is not supported: use OpenAI's, {CHAT}",
    "/v1/messages/{rest:path}": f"Anthropic's API is not supported: use OpenAI's, {CHAT}",
    "/api/copy": "Models are not copied: each name is that of a file or folder",
    "/api/create": "Models are not created here: hetrun convert makes GGUF files",
    "/api/push": "Models are not uploaded by this server",
    "/api/blobs/{digest}": "Files are not uploaded to this server",
    "/api/me": ACCOUNTS,
    "/api/signout": ACCOUNTS,
    "/api/web_search": CLOUD,
    "/api/web_fetch": CLOUD,
    "/lora-adapters": ADAPTERS,
    "/v1/load_lora_adapter": ADAPTERS,
    "/v1/unload_lora_adapter": ADAPTERS,
    "/v1/images/{rest:path}": MEDIA,
    "/v1/audio/{rest:path}": MEDIA,
    "/v1/videos": MEDIA,
    "/v1/videos/{rest:path}": MEDIA,
    "/v1/moderations": "Moderation is not supported: this server has one model, which writes text",
    "/v1/files": "Files and batches are not kept here: send each request by itself",
    "/v1/batches": "Files and batches are not kept here: send each request by itself",
    "/models/load": LOADED,
    "/models/unload": LOADED,
}


def routes(service: Service) -> list[Route]:
    return [Route(path, _refusal(why), methods=ANY) for path, why in REFUSED.items()]


def _refusal(why: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def refuse(request: Request) -> Response:
        raise ApiError(why, code="not_supported", status=501, headers=FINAL)

    return refuse
