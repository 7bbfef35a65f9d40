"""POST /infill: llama.cpp's endpoint that writes what stands between two texts."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.client.events import ModelInfo
from hetrun.client.queries import Literally, Snippet
from hetrun.server import request as orders
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body
from hetrun.server.infill import check_fills, fill_tokens
from hetrun.server.llamacpp.answer import respond
from hetrun.server.llamacpp.request import OWN, NativeRequest, native_order, normalised
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.routes.models import meant
from hetrun.server.sampling import limit_field
from hetrun.server.service import Service

PREFIX, SUFFIX, EXTRA, PROMPT = "input_prefix", "input_suffix", "input_extra", "prompt"
KNOWN = (*orders.COMMON, *OWN, PREFIX, SUFFIX, EXTRA, PROMPT)
MOST_SNIPPETS = 1024
MOST_TEXT = 1 << 20  # characters of all snippets
MOST_PARTS = 1024  # texts and tokens in turn
MOST_NAME = 4096  # characters of a file's name


def routes(service: Service) -> list[Route]:
    async def infill(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        native = await infill_order(body, await here.info(), here, asker(request, body))
        return await respond(request, here, native)

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    return [Route("/infill", infill, methods=["POST"], middleware=[crowd])]


async def infill_order(body: Body, info: ModelInfo, service: Service, client: str) -> NativeRequest:
    """Read a request of this client; ApiError names the field that is wrong."""
    body = await normalised(body, service)
    orders.check(body, info, service, KNOWN)
    check_fills(info)
    prefix, suffix = _text(body, PREFIX, info), _text(body, SUFFIX, info)
    begun = body.get(PROMPT)
    if begun is not None and not isinstance(begun, str):
        raise wrong_type(PROMPT, "a text: the beginning of what is to be written", begun)
    extra = _snippets(body)
    tokens = await fill_tokens(
        service,
        prefix,
        suffix,
        extra=extra,
        prompt=begun or "",
        repository=True,
        max_tokens=_limit(body),
        field=EXTRA if extra else PREFIX,  # texts around the gap are cut before they could be too long
    )
    return native_order(body, info, service, client, [tokens], PREFIX)


def _limit(body: Body) -> int | None:
    """The length of the answer, if it is given; what else it may be is checked elsewhere."""
    name = limit_field(body)
    value = body.get(name) if name else None
    return value if type(value) is int and value > 0 else None


def _text(body: Body, name: str, info: ModelInfo) -> Literally:
    """A text, or texts and tokens in turn."""
    given = body.get(name)
    if given is None:
        raise ApiError(f"{name} is missing", name, "missing_required_parameter")
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong_type(name, "a text, or a list of tokens and texts", given)
    if sum(isinstance(part, str) for part in given) > MOST_PARTS or len(given) > info.context + MOST_PARTS:
        message = f"{name} may hold {MOST_PARTS} texts, and as many tokens as the context"
        raise ApiError(message, name, "array_above_max_length")
    return tuple(_part(part, f"{name}[{i}]", info) for i, part in enumerate(given))


def _part(given: object, where: str, info: ModelInfo) -> str | int:
    if isinstance(given, str):
        return given
    if type(given) is int and 0 <= given < info.n_vocab:
        return given
    message = f"{where} must be a text or a token id from 0 to {info.n_vocab - 1}, not {short(given)}"
    raise ApiError(message, where, "invalid_value")


def _snippets(body: Body) -> list[Snippet]:
    """Other files, or parts of them."""
    given = body.get(EXTRA)
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong_type(EXTRA, "a list of objects with text and filename", given)
    if len(given) > MOST_SNIPPETS:
        message = f"{EXTRA} may hold {MOST_SNIPPETS} texts, not {len(given)}"
        raise ApiError(message, EXTRA, "array_above_max_length")
    found = [_snippet(one, f"{EXTRA}[{i}]") for i, one in enumerate(given)]
    if (size := sum(len(one.text) for one in found)) > MOST_TEXT:
        message = f"the texts in {EXTRA} may have {MOST_TEXT} characters in all, not {size}"
        raise ApiError(message, EXTRA, "string_above_max_length")
    return found


def _snippet(given: object, where: str) -> Snippet:
    if not isinstance(given, Mapping):
        raise wrong_type(where, "an object with text and filename", given)
    text, filename = given.get("text"), given.get("filename")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "a text", text)
    if filename is None:
        return Snippet(text)
    if not isinstance(filename, str):
        raise wrong_type(f"{where}.filename", "a text", filename)
    if len(filename) > MOST_NAME:
        message = f"{where}.filename may have {MOST_NAME} characters, not {len(filename)}"
        raise ApiError(message, f"{where}.filename", "string_above_max_length")
    return Snippet(text, filename)
