"""POST /completion and /completions: llama.cpp's own endpoint, which continues texts."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.llamacpp.answer import respond
from hetrun.server.llamacpp.request import native_request
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.routes.models import meant
from hetrun.server.service import Service

PATHS = ("/completion", "/completions")


def routes(service: Service) -> list[Route]:
    async def complete(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        native = await native_request(body, await here.info(), here, asker(request, body))
        return await respond(request, here, native)

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [Route(path, complete, methods=["POST"], middleware=[crowd]) for path in PATHS]
