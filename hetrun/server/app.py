"""The ASGI app: the list of routes, middleware and error handlers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from hetrun.client.interface import ChatClient
from hetrun.errors import HetrunError
from hetrun.server import openapi
from hetrun.server.anthropic import routes as anthropic
from hetrun.server.errors import ApiError, on_api_error, on_failure, on_gone, on_http_exception
from hetrun.server.library import ModelLibrary
from hetrun.server.llamacpp import infill, routes as llamacpp, slots
from hetrun.server.middleware.auth import RequireKey
from hetrun.server.middleware.concurrency import MOST_REQUESTS
from hetrun.server.middleware.drain import RequestDrain
from hetrun.server.middleware.fair_turns import InTurn
from hetrun.server.middleware.origin import OriginGuard
from hetrun.server.middleware.request_counter import RequestCounter
from hetrun.server.ollama import routes as ollama
from hetrun.server.pictures.sources import Sources
from hetrun.server.request_log import RequestLog, RequestLogger
from hetrun.server.responses import routes
from hetrun.server.routes import (
    chat_completions,
    completions,
    embeddings,
    health,
    introspection,
    machine,
    metrics,
    models,
    page,
    plugin_routes,
    ram,
    rerank,
    tokenize,
    unsupported,
)
from hetrun.server.service import Service

ENDPOINTS = (
    *(chat_completions.routes, completions.routes, routes.routes, embeddings.routes, models.routes),
    *(tokenize.routes, introspection.routes, machine.routes, metrics.routes, health.routes, ram.routes),
    *(anthropic.routes, ollama.routes),
    *(llamacpp.routes, slots.routes, infill.routes, rerank.routes),
    *(openapi.routes, page.routes, plugin_routes.routes, unsupported.routes),
)


def create_app(
    client: ChatClient,
    *,
    strict: bool = False,
    api_key: str | None = None,
    sampling: Mapping[str, object] | None = None,
    most_requests: int = MOST_REQUESTS,
    hosts: Iterable[str] | None = None,
    origins: Iterable[str] = (),
    tool_parser: str = "auto",
    reasoning_format: str = "auto",
    slot_save_path: Path | None = None,
    log: RequestLog | None = None,
    library: ModelLibrary | None = None,
    ollama_client: bool = False,
    keep_billing_header: bool = False,
    aliases: Iterable[str] = (),
    pictures: Sources | None = None,
) -> Starlette:
    """The server for this client; the caller closes the client.

    `hosts`: host names of this server, besides this machine's own; None: any. `origins`: web pages that may
    use it. `library`: what clients of Ollama's API may learn of models that are not loaded, download and
    delete. `ollama_client`: `GET /` answers programs as Ollama does. `aliases`: names of a single model,
    instead of its file's. `pictures`: what the server may read that requests name by an address.
    """
    service = Service(
        client=client,
        strict=strict,
        sampling=sampling or {},
        tool_parser=tool_parser,
        reasoning_format=reasoning_format,
        most_requests=most_requests,
        needs_key=api_key is not None,
        library=library,
        ollama=ollama_client,
        keep_billing_header=keep_billing_header,
        slot_save_path=slot_save_path,
        aliases=tuple(aliases),
        pictures=pictures or Sources(),
    )
    return Starlette(
        routes=[route for endpoints in ENDPOINTS for route in endpoints(service)],
        middleware=[
            *([] if log is None else [Middleware(RequestLogger, log=log)]),
            Middleware(RequestCounter, traffic=service.traffic),
            Middleware(RequestDrain),
            Middleware(OriginGuard, hosts=hosts, origins=tuple(origins), keyed=api_key is not None),
            *([] if api_key is None else [Middleware(RequireKey, key=api_key)]),
            Middleware(InTurn),
        ],
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_gone,
            HetrunError: on_failure,
            Exception: on_failure,
        },
    )
