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
from hetrun.client.model_catalog import name_of, spellings
from hetrun.client.model_pool import ModelPool, OnDemand
from hetrun.server.anthropic_format import models as anthropic_models
from hetrun.server.errors import ApiError, not_found, wrong_type
from hetrun.server.service import Service

Json = dict[str, object]


def answers_to(info: ModelInfo, name: str) -> bool:
    """Whether this name means the server's model."""
    path = PurePath(info.path)
    names = {*info.aliases, info.id, info.file_id, info.name, path.name, name_of(path)}
    return not names.isdisjoint(spellings(name))


def names_of(info: ModelInfo) -> list[str]:
    """The names under which the server's model is listed."""
    return list(info.aliases) or [info.id]


async def meant(said: Mapping[str, object], service: Service) -> Service:
    """The service with the model that a request's body, or its query, means.

    A single model that was named at the start is always meant, unless the server is strict, because most
    tools insist on sending a name.
    An unknown name may be that of a model that has just come.
    """
    name = said.get("model")
    if name is not None and not isinstance(name, str):
        raise wrong_type("model", "a string", name)
    shelf = service.client
    if isinstance(shelf, ModelPool):
        if name is not None and (model := await shelf.look_for(name)):
            return replace(service, client=model)
        # This model was not named when the server was started, so it is not meant by every name.
        if name is not None and shelf.only and not answers_to(await shelf.only.info(), name):
            raise not_found(name, list(shelf.models))
        service = replace(service, client=shelf.only or _usual(name, shelf))
    if name is not None and service.strict and not answers_to(info := await service.info(), name):
        raise not_found(name, names_of(info))
    return service


def _usual(name: str | None, shelf: ModelPool) -> OnDemand:
    """The one of several models that is meant if none is named."""
    if name is not None:
        raise not_found(name, list(shelf.models))
    if shelf.usual is None:
        message = (
            f"model is missing: this server has several, see /v1/models; one is {next(iter(shelf.models))}"
        )
        raise ApiError(message, "model", "missing_required_parameter")
    return shelf.usual


def engines(client: ChatClient) -> list[ChatClient]:
    """The models that are loaded; none for a single model that sleeps."""
    if isinstance(client, ModelPool):
        return list(client.loaded)
    return [] if isinstance(client, OnDemand) and client.client is None else [client]


def routes(service: Service) -> list[Route]:
    def described(name: str, client: ChatClient, info: ModelInfo | None) -> Json:
        model: Json = {"id": name, "object": "model", "created": service.created, "owned_by": "hetrun"}
        model["aliases"] = list(info.aliases) if info else []
        if info:
            takes = ["text", "image"] if info.pictures else ["text"]
            model["architecture"] = {"input_modalities": takes, "output_modalities": ["text"]}
        return model | {"status": {"value": status_of(client)}, "meta": _meta(info) if info else None}

    async def all_of_them() -> list[Json]:
        shelf = service.client
        if isinstance(shelf, ModelPool):
            await shelf.look_again()
            if shelf.only is None:
                return [described(name, model, model.known) for name, model in shelf.models.items()]
        info = await service.info()
        return [described(name, service.client, info) for name in names_of(info)]

    async def listed(request: Request) -> Response:
        models: Json = {"object": "list", "data": await all_of_them()}
        return JSONResponse(anthropic_models.listed(models) if anthropic_models.is_asked(request) else models)

    async def found(name: str) -> Json:
        shelf = service.client
        if isinstance(shelf, ModelPool):
            if model := await shelf.look_for(name):
                return described(model.found.name, model, model.known)
            if shelf.only is None:
                raise not_found(name, list(shelf.models))
        info = await service.info()
        if not answers_to(info, name):
            raise not_found(name, names_of(info))
        return described(name if name in info.aliases else info.id, service.client, info)

    async def one(request: Request) -> Response:
        model = await found(request.path_params["name"])
        return JSONResponse(
            anthropic_models.described(model) if anthropic_models.is_asked(request) else model
        )

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
        "vision": info.pictures,
    }
