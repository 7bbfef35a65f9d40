"""The endpoints of a server's private socket: its description, requests of `hetrun run`, `hetrun stop`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.client.event_json import event_as_json, request_of
from hetrun.client.events import GenerateRequest
from hetrun.client.local_servers import GENERATE, SERVER, STOP, ServedModel, ServerFacts
from hetrun.client.model_pool import ModelPool, OnDemand
from hetrun.client.queries import StateQuery
from hetrun.errors import HetrunError
from hetrun.server.body import json_object
from hetrun.server.errors import ApiError, not_found, on_api_error, on_http_exception
from hetrun.server.json_stream import json_text
from hetrun.server.routes.models import status_of
from hetrun.server.sse import JsonLines

STATE_S = 1.0  # for queries that an engine answers at once


def private_app(
    shelf: ModelPool,
    stop: asyncio.Event,
    *,
    address: str,
    needs_key: bool,
    options: Mapping[str, str],
) -> Starlette:
    """The app of the private socket; only this user can reach it, so it asks for no key."""
    since = time.time()

    async def server(request: Request) -> Response:
        await shelf.look_again()
        is_brief = "brief" in request.query_params
        models = await asyncio.gather(*(_described(model, is_brief) for model in shelf.models.values()))
        pid = os.getpid()
        facts = ServerFacts(__version__, pid, address, since, needs_key, options, tuple(models))
        return JSONResponse(asdict(facts))

    async def end(request: Request) -> Response:
        stop.set()
        return JSONResponse({"stopping": True})

    async def generate(request: Request) -> Response:
        body = await json_object(request)
        model = next((m for m in shelf.models.values() if m.found.name == body.get("model")), None)
        if model is None or stop.is_set():
            raise not_found(str(body.get("model")), [m.found.name for m in shelf.models.values()])
        said = body.get("request")
        try:
            order = request_of(said if isinstance(said, dict) else {})
        except (HetrunError, ValueError) as error:
            raise ApiError(str(error)) from None
        return JsonLines(_events(model, order))

    return Starlette(
        routes=[
            Route(SERVER, server),
            Route(STOP, end, methods=["POST"]),
            Route(GENERATE, generate, methods=["POST"]),
        ],
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_exception},
    )


async def _events(model: OnDemand, request: GenerateRequest) -> AsyncGenerator[str, None]:
    async with aclosing(model.stream(request)) as events:
        async for event in events:
            yield json_text(event_as_json(event))


async def _described(model: OnDemand, is_brief: bool) -> ServedModel:
    """Doesn't load a model for this; a brief one doesn't ask its engine, which may be in a long step."""
    health, memory, budget, requests = model.health, 0, None, model.users
    status = status_of(model)
    if status == "loaded" and not is_brief:
        try:
            async with asyncio.timeout(STATE_S):
                state = await model.ask(StateQuery())
            memory, budget, requests = state.used, state.budget, len(state.slots)
        except (TimeoutError, HetrunError):
            pass
    return ServedModel(model.found.name, model.identity, status, health.progress, memory, budget, requests)
