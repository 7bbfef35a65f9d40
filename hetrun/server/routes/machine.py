"""GET /machine and POST /what-if: what `hetrun chat --url` shows of the engine behind this server.

As in introspection.py, they contain no text of clients.
"""

from __future__ import annotations

from dataclasses import asdict

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.queries import KNOBS, Layers, StateQuery, WhatIf
from hetrun.errors import BudgetError, OptionError
from hetrun.server.body import json_object
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.query import LOOK_S, asked, few
from hetrun.server.routes.models import engines, meant
from hetrun.server.service import Service

MOST_REQUESTS = 4  # held at a time: each plans for a tenth of a second, on the engine's thread


def routes(service: Service) -> list[Route]:
    async def machine(request: Request) -> Response:
        here = await meant(request.query_params, service)
        if not engines(here.client):  # the model sleeps, and this query doesn't load it
            return JSONResponse({"state": None, "layers": []})
        state, layers = await asked(here, StateQuery(), LOOK_S), await asked(here, Layers(), LOOK_S)
        return JSONResponse({"state": asdict(state), "layers": [asdict(layer) for layer in layers]})

    async def what_if(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        try:
            found = await asked(here, WhatIf(wanted(body)))
        except BudgetError as error:
            raise ApiError(str(error), "ram", "budget_too_small") from error
        except OptionError as error:
            raise ApiError(str(error), code="invalid_value") from error
        return JSONResponse(asdict(found))

    crowd = Middleware(Crowd, most_requests=MOST_REQUESTS)
    return [
        Route("/machine", machine, middleware=few()),
        Route("/what-if", what_if, methods=["POST"], middleware=[crowd]),
    ]


def wanted(body: dict[str, object]) -> dict[str, object]:
    """The options to change, as users write them. An unknown field is always an error, since no other server
    has this endpoint."""
    for name, value in body.items():
        if name not in (*KNOBS, "model"):
            raise ApiError(f"Unrecognized request argument: {name[:80]}", name[:80], "unknown_parameter")
        if name != "model" and (isinstance(value, bool) or not isinstance(value, str | int)):
            raise wrong_type(name, "a text as on the command line, or a number", value)
    return {name: value for name, value in body.items() if name != "model"}
