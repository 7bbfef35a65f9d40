"""Who asks: whom the engine gives equal shares of its time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.requests import Request

from hetrun.server.errors import wrong_type

NAMES = ("safety_identifier", "user")  # OpenAI's, the newer one first


def asker(request: Request, body: Mapping[str, object]) -> str:
    """The same word for all requests of one client: of the user that it names, else of its address.

    Requests with different API keys are of different clients, also where any key is accepted. It is a hash:
    neither a key nor a name goes any further, and it is short.
    """
    named: str | None = None
    for field in NAMES:
        value = body.get(field)
        if value is not None and not isinstance(value, str):
            raise wrong_type(field, "a string", value)
        named = named or value
    # Whoever comes through a Unix socket has no address.
    address = request.client.host if request.client else ""
    who = ("user", named) if named else ("address", address)
    return hashlib.blake2b("\0".join((_key(request), *who)).encode(), digest_size=8).hexdigest()


def owner(request: Request) -> str:
    """The same word for all requests with one API key: whose what is kept is."""
    return hashlib.blake2b(_key(request).encode(), digest_size=16).hexdigest()


def _key(request: Request) -> str:
    return request.headers.get("authorization") or request.headers.get("x-api-key", "")
