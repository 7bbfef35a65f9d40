"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.server.anthropic.output import MessageWriter
from hetrun.server.anthropic.request import message_order, omits_thoughts, user_of
from hetrun.server.anthropic_format.errors import PATH
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.query import few, input_tokens
from hetrun.server.request import Order
from hetrun.server.response_driver import respond
from hetrun.server.routes.models import meant
from hetrun.server.service import Service

BETA = "anthropic-beta"  # a header with the names of features
REQUEST_ID = "request-id"  # a header that the SDKs show


def routes(service: Service) -> list[Route]:
    async def read(request: Request, *, counted: bool = False) -> tuple[Service, Order, bool]:
        body = await json_object(request)
        here = await meant(body, service)
        client, beta = asker(request, user_of(body)), BETA in request.headers
        loaded, info = await service.pictures.loaded(body), await here.info()
        order = message_order(body, info, here, client, loaded, counted=counted, beta=beta)
        return here, order, omits_thoughts(body)

    async def create(request: Request) -> Response:
        here, order, omits = await read(request)
        writer = partial(MessageWriter, omits_thoughts=omits)
        response = await respond(request, here, order, whole=writer, stream=writer)
        response.headers[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
        return response

    async def count(request: Request) -> Response:
        here, order, _ = await read(request, counted=True)
        return JSONResponse({"input_tokens": await input_tokens(here, order.prompts[0])})

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [
        Route(PATH, create, methods=["POST"], middleware=[crowd]),
        Route(f"{PATH}/count_tokens", count, methods=["POST"], middleware=few()),
    ]
