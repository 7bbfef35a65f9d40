"""POST /v1/ram: changes the memory limit while the model runs."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.interface import ChatClient
from hetrun.client.model_pool import ModelPool
from hetrun.client.queries import SetRam
from hetrun.config import OPTIONS
from hetrun.errors import BudgetError, OptionError
from hetrun.server.body import json_object
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.service import Service

MOST_REQUESTS = 16  # held at a time: each waits for the end of a step


def routes(service: Service) -> list[Route]:
    async def change(request: Request) -> Response:
        nbytes = wanted(await json_object(request))
        try:
            memory = await _set(service.client, nbytes)
        except BudgetError as error:
            raise ApiError(str(error), "ram", "budget_too_small") from error
        except OptionError as error:  # a model whose memory cannot change
            raise ApiError(str(error), "ram", "unsupported_parameter") from error
        return JSONResponse({"ram": nbytes, "memory": dict(memory)})

    crowd = Middleware(Crowd, most_requests=MOST_REQUESTS)
    return [Route("/v1/ram", change, methods=["POST"], middleware=[crowd])]


async def _set(client: ChatClient, nbytes: int) -> Mapping[str, int]:
    """Several models share the limit; the answer contains their shares."""
    if isinstance(client, ModelPool) and client.only is None:
        return await client.set_ram(nbytes)
    return await client.ask(SetRam(nbytes))


def wanted(body: Mapping[str, object]) -> int:
    """The requested bytes. An unknown field is always an error, since no other server has this endpoint."""
    for name in body:
        if name != "ram":
            raise ApiError(f"Unrecognized request argument: {name[:80]}", name[:80], "unknown_parameter")
    ram = body.get("ram")
    if ram is None:
        message = "ram is missing: say how much memory, as 1.5GiB or in bytes"
        raise ApiError(message, "ram", "missing_required_parameter")
    if isinstance(ram, bool) or not isinstance(ram, str | int):
        raise wrong_type("ram", "a size as 1.5GiB, or a number of bytes", ram)
    try:
        return int(OPTIONS["ram"].parse(ram, "ram"))
    except OptionError as error:
        raise ApiError(str(error), "ram", "invalid_value") from None
