"""GET /v1/models and /v1/models/{id}: the one model that runs."""

from __future__ import annotations

from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.events import ModelInfo
from hetrun.server.errors import not_found
from hetrun.server.service import Service


def answers_to(info: ModelInfo, name: str) -> bool:
    """Whether a request for this model means ours."""
    return name in (info.id, info.name, PurePath(info.path).name)


def routes(service: Service) -> list[Route]:
    def described(info: ModelInfo) -> dict[str, object]:
        meta = {
            "name": info.name,
            "architecture": info.architecture,
            "n_ctx": info.context,
            "n_vocab": info.n_vocab,
            "n_params": info.parameters,
            "size": info.file_bytes,
            "chat_template": info.template_origin,
        }
        model = {"id": info.id, "object": "model", "created": service.created, "owned_by": "hetrun"}
        return model | {"meta": meta}

    async def listed(request: Request) -> Response:
        info = await service.info()
        return JSONResponse({"object": "list", "data": [described(info)]})

    async def one(request: Request) -> Response:
        info = await service.info()
        name = request.path_params["name"]
        if not answers_to(info, name):
            raise not_found(name)
        return JSONResponse(described(info))

    # A model's name may hold a slash.
    return [Route("/v1/models", listed), Route("/v1/models/{name:path}", one)]
