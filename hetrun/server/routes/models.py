"""GET /v1/models and /v1/models/{id}: the available models, and which one a request means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import spellings
from hetrun.client.model_pool import OnDemand, Shelf
from hetrun.server.errors import ApiError, not_found, wrong_type
from hetrun.server.service import Service

Json = dict[str, object]


def answers_to(info: ModelInfo, name: str) -> bool:
    """Whether this name means the server's model."""
    return not {info.id, info.name, PurePath(info.path).name}.isdisjoint(spellings(name))


async def meant(said: Mapping[str, object], service: Service) -> Service:
    """The service with the model that a request's body, or its query, means.

    A single model is always meant, unless the server is strict, because most tools insist on sending a name.
    """
    name = said.get("model")
    if name is not None and not isinstance(name, str):
        raise wrong_type("model", "a string", name)
    if isinstance(service.client, Shelf):
        return replace(service, client=_of_several(name, service.client))
    if name is not None and service.strict and not answers_to(info := await service.info(), name):
        raise not_found(name, [info.id])
    return service


def _of_several(name: str | None, shelf: Shelf) -> OnDemand:
    if name is not None:
        if (model := shelf.find(name)) is None:
            raise not_found(name, list(shelf.models))
        return model
    if shelf.usual is None:
        message = (
            f"model is missing: this server has several, see /v1/models; one is {next(iter(shelf.models))}"
        )
        raise ApiError(message, "model", "missing_required_parameter")
    return shelf.usual


def engines(client: ChatClient) -> list[ChatClient]:
    """The models that are loaded; none for a single model that sleeps."""
    if isinstance(client, Shelf):
        return list(client.loaded)
    return [] if isinstance(client, OnDemand) and client.client is None else [client]


def routes(service: Service) -> list[Route]:
    def described(name: str, client: ChatClient, info: ModelInfo | None) -> Json:
        model: Json = {"id": name, "object": "model", "created": service.created, "owned_by": "hetrun"}
        return model | {"status": {"value": status_of(client)}, "meta": _meta(info) if info else None}

    async def all_of_them() -> list[Json]:
        shelf = service.client
        if isinstance(shelf, Shelf):
            return [described(name, model, model.known) for name, model in shelf.models.items()]
        info = await service.info()
        return [described(info.id, service.client, info)]

    async def listed(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await all_of_them()})

    async def one(request: Request) -> Response:
        name, shelf = request.path_params["name"], service.client
        if isinstance(shelf, Shelf):
            model = _of_several(name, shelf)
            return JSONResponse(described(model.found.name, model, model.known))
        info = await service.info()
        if not answers_to(info, name):
            raise not_found(name, [info.id])
        return JSONResponse(described(info.id, service.client, info))

    # A model's name may contain a slash.
    return [Route("/v1/models", listed), Route("/models", listed), Route("/v1/models/{name:path}", one)]


def status_of(client: ChatClient) -> str:
    """The state in the terms of llama.cpp's router."""
    if not engines(client):
        return "unloaded"
    status = client.health.status
    return status if status in ("loading", "failed") else "loaded"


def _meta(info: ModelInfo) -> Json:
    return {
        "name": info.name,
        "architecture": info.architecture,
        "n_ctx": info.context,
        "n_vocab": info.n_vocab,
        "n_embd": info.width,
        "n_params": info.parameters,
        "size": info.file_bytes,
        "chat_template": info.template_origin,
        "rerank": info.reranks,
        "infill": info.fills,
    }
