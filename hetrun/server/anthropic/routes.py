"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.server.anthropic import output
from hetrun.server.anthropic.output import MessageEvents
from hetrun.server.anthropic.request import Asked, asker_fields, message_request, own_names
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.errors import MESSAGES
from hetrun.server.input_tokens import input_tokens
from hetrun.server.json_stream import json_response
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.query import few
from hetrun.server.response_driver import Events, answered
from hetrun.server.routes.models import meant
from hetrun.server.service import Service


def routes(service: Service) -> list[Route]:
    async def read(request: Request, *, counts: bool = False) -> tuple[Service, Asked]:
        body = await json_object(request)
        here = await meant(body, service)
        client = asker(request, asker_fields(body))
        return here, message_request(body, await here.info(), here, client, counts=counts)

    async def create(request: Request) -> Response:
        here, asked = await read(request)

        async def in_one(events: Events) -> Response:
            return await json_response(await output.whole(asked, events))

        def stream(events: Events) -> MessageEvents:
            return MessageEvents(output.chunks(asked, events))

        with own_names():
            return await answered(request, here, asked.order, in_one, stream)

    async def count(request: Request) -> Response:
        here, asked = await read(request, counts=True)
        with own_names():
            return JSONResponse({"input_tokens": await input_tokens(here, asked.order.prompts[0])})

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [
        Route(MESSAGES, create, methods=["POST"], middleware=[crowd]),
        Route(f"{MESSAGES}/count_tokens", count, methods=["POST"], middleware=few()),
    ]
