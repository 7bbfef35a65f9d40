"""Reading a JSON object from a request, within limits."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from hetrun.server.errors import ApiError
from hetrun.system.strict_json import join_bounded, parsed
from hetrun.system.units import format_bytes

MAX_BYTES = 64 * 2**20  # a picture of 32 MiB in base64 takes 43
MOST_S = 60.0  # for the whole body: a client that stops halfway occupies a place


async def json_object(request: Request) -> dict[str, object]:
    """The body, which must be a JSON object."""
    raw = await _read(request)
    try:
        body = parsed(raw)
    except UnicodeError:
        raise ApiError("The body is not valid UTF-8 text", code="invalid_json") from None
    except RecursionError:
        raise ApiError("The body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object", code="invalid_type")
    return body


async def _read(request: Request) -> bytes:
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > MAX_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(MOST_S):
            return await join_bounded(request.stream(), MAX_BYTES, _too_large)
    except TimeoutError:
        message = f"The body was not complete after {MOST_S:g} s"
        headers = {"connection": "close"}
        raise ApiError(message, code="request_timeout", status=408, headers=headers) from None


def _too_large() -> ApiError:
    # The rest is not read, so the connection cannot be reused.
    message = f"The body is larger than {format_bytes(MAX_BYTES)}"
    return ApiError(message, code="request_too_large", status=413, headers={"connection": "close"})
